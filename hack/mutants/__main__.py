"""`python -m hack.mutants`: put faults into a copy of the sources, and see whether the tests notice."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from hack.mutants.byhand import BY_HAND, ByHand
from hack.mutants.faults import Fault, drawn, lines
from hack.mutants.nearby import Nearby, module_of
from hack.mutants.running import Copy, Result, run, warm
from hack.testing.slices import commits

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "operator/src/psjob_operator/plan",
    *(f"runtime/src/psjob/{name}" for name in ("protocol", "modes", "rules", "tables", "codecs", "checkpoint")),
)
"""Where faults are drawn from: decisions, arithmetic and files."""
REVIEWED = Path(__file__).with_name("equivalent.toml")
ENOUGH = 0.5
"""Share of drawn faults that must be noticed with `--ci`. In so few seconds not all tests of a file run, so that a few faults live."""
SECONDS = 20.0
"""CPU seconds of tests that a drawn fault must outlive to survive."""
WHOLE_SECONDS = 600.0
"""The same of named tests, which all run."""


def main(words: Sequence[str] | None = None) -> int:
    """The command. Returns 1 where a fault was not noticed."""
    parser = argparse.ArgumentParser(prog="python -m hack.mutants", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--table", action="store_true", help="put in each fault of byhand.py, and print a table")
    what.add_argument("--random", type=int, metavar="N", help=f"draw so many faults from {', '.join(FOLDERS)}")
    parser.add_argument("--seed", type=int, help="of the draw (default: the number of commits, so that each CI run draws others)")
    parser.add_argument("--ci", action="store_true", help=f"with --random: fail only if less than {ENOUGH:.0%}% are noticed")
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="of the table those whose name, of the draw those whose file holds WORDS"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="CPU seconds of tests a drawn fault (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="faults at a time (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="name the faults and run nothing")
    asked = parser.parse_args(words)
    if asked.table:
        return _table([fault for fault in BY_HAND if asked.only in fault.what], asked.jobs, asked.list)
    return _random(asked)


# -- by hand -------------------------------------------------------------------------------------------


def _table(faults: Sequence[ByHand], jobs: int, only_list: bool) -> int:
    changed = [fault.applied(ROOT) for fault in faults]
    if only_list:
        print("\n".join(fault.what for fault in faults))
        return 0
    began = time.perf_counter()
    tests = sorted({test for fault in faults for test in fault.tests})
    tasks = [Task(None, b"", tuple(tests), WHOLE_SECONDS)]
    tasks += [Task(fault.path, new, fault.tests, WHOLE_SECONDS) for fault, new in zip(faults, changed, strict=True)]
    results = list(_each(tasks, jobs))
    clean, results = results[0], results[1:]
    print(f"without a fault: {clean.outcome}, {clean.ran} tests, {clean.seconds:.1f} CPU s {clean.by}")
    print("| fault | caught by | CPU s |\n| --- | --- | --- |")
    for fault, result in zip(faults, results, strict=True):
        print(
            f"| {fault.what} | {result.by if result.outcome == 'failed' else f'**{result.outcome}** {result.by}'} | {result.seconds:.1f} |"
        )
    missed = [fault.what for fault, result in zip(faults, results, strict=True) if not result.killed]
    seconds = sum(result.seconds for result in (clean, *results))
    print(f"{len(faults) - len(missed)} of {len(faults)} are caught; {seconds:.0f} CPU s, {time.perf_counter() - began:.0f} s")
    return 1 if missed or clean.outcome != "passed" else 0


# -- drawn ---------------------------------------------------------------------------------------------


def _random(asked: argparse.Namespace) -> int:
    began, seed = time.perf_counter(), commits() if asked.seed is None else asked.seed
    sources = {str(path.relative_to(ROOT)): path.read_bytes() for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}
    faults = [fault for fault in drawn(sources, seed, asked.random) if asked.only in fault.path]
    reviewed = equivalent()
    if asked.list:
        for fault in faults:
            print(described(sources[fault.path], fault))
        return 0
    near = Nearby(ROOT)
    tried = [fault for fault in faults if key(sources[fault.path], fault) not in reviewed]
    tasks = []
    for fault in tried:
        module = module_of(fault.path)
        tests = near.tests(module, fault.within.split(".")[-2:])
        tasks.append(Task(fault.path, fault.applied(sources[fault.path]), tuple(map(str, tests)), asked.seconds, module))
    survivors = 0
    seconds = 0.0
    for fault, result in zip(tried, _each(tasks, asked.jobs), strict=True):
        seconds += result.seconds
        end = f"{result.by.removeprefix('tests/')}, {result.ran} tests, {result.seconds:.1f} CPU s"
        if result.killed:
            print(f"killed    {fault.path}:{fault.line} {fault.kind}: {end}", flush=True)
        else:
            survivors += 1
            whole = "" if result.whole else "; not all of its tests have run"
            print(f"SURVIVED  {described(sources[fault.path], fault)}\n  {result.outcome} {end}{whole}", flush=True)
    known = len(faults) - len(tried)
    print(
        f"{len(faults)} faults of seed {seed}: {len(tried) - survivors} killed, {survivors} survived, {known} equivalent; "
        f"{seconds:.0f} CPU s, {time.perf_counter() - began:.0f} s"
    )
    if survivors:
        print(f"Write a test that fails with each, or, where none can, an entry with the reason in {REVIEWED.relative_to(ROOT)}.")
    allowed = len(tried) * (1 - ENOUGH) if asked.ci else 0
    return 1 if survivors > allowed else 0


def equivalent() -> set[tuple[str, str, str]]:
    """The faults that no test can notice, as `key` names them."""
    return {(entry["path"], entry["old"], entry["new"]) for entry in tomllib.loads(REVIEWED.read_text()).get("fault", [])}


def key(source: bytes, fault: Fault) -> tuple[str, str, str]:
    """What names a fault when lines above it come and go."""
    was, became = lines(source, fault)
    return fault.path, was.strip(), became.strip()


def described(source: bytes, fault: Fault) -> str:
    """A fault as a diff."""
    was, became = lines(source, fault)
    removed = "\n".join(f"  - {line.strip()}" for line in was.splitlines())
    added = "\n".join(f"  + {line.strip()}" for line in became.splitlines())
    return f"{fault.path}:{fault.line} {fault.within} ({fault.kind})\n{removed}\n{added}"


# -- running -------------------------------------------------------------------------------------------


class Task:
    """A file with another content (None: none), and the tests that run then."""

    def __init__(self, path: str | None, content: bytes, tests: tuple[str, ...], seconds: float, module: str | None = None) -> None:
        self.path, self.content, self.tests, self.seconds, self.module = path, content, tests, seconds, module


_copy: Copy | None = None


def _each(tasks: Sequence[Task], jobs: int) -> Iterator[Result]:
    """The results in order; each of `jobs` processes has a copy of its own."""
    warm()
    jobs = max(1, min(jobs, len(tasks)))
    copies = [Copy(ROOT) for _ in range(jobs)]
    context = multiprocessing.get_context("fork")
    free = context.SimpleQueue()
    for number in range(jobs):
        free.put(number)
    try:
        with context.Pool(jobs, _begin, (copies, free)) as pool:
            yield from pool.imap(_one, tasks)
    finally:
        for copy in copies:
            copy.remove()


def _begin(copies: Sequence[Copy], free: multiprocessing.SimpleQueue[int]) -> None:
    global _copy
    _copy = copies[free.get()]


def _one(task: Task) -> Result:
    assert _copy is not None
    if task.path is None:
        return run(_copy, task.tests, task.seconds)
    with _copy.changed(task.path, task.content):
        return run(_copy, task.tests, task.seconds, task.module)


if __name__ == "__main__":
    sys.exit(main())
