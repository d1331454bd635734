"""`python -m tests.simulation`: many seeds, one seed again with its trace, or a failing one made short."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from tests.simulation.protocol import faults
from tests.simulation.protocol.plan import CRASHING, DELAYED, MODES, PHASES, draw
from tests.simulation.protocol.run import Outcome, run
from tests.simulation.protocol.shrink import shrink


def main(words: Sequence[str] | None = None) -> int:
    """The command. Returns 1 where a promise was broken."""
    if os.environ.get("PYTHONHASHSEED") != "0" and words is None:  # order in sets of words must be the same at every replay
        os.execve(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=300, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--mode", choices=(*MODES, *DELAYED, CRASHING), help="only this mode, or sync with shards whose processes crash")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one seed and print what happened")
    parser.add_argument("--shrink", type=int, metavar="SEED", help="make a failing seed short and print what happened")
    parser.add_argument("--uncovered", action="store_true", help="print the pairs of phase and fault that were not met")
    parser.add_argument("--first", action="store_true", help="stop at the first broken promise")
    asked = parser.parse_args(words)
    if asked.replay is not None:
        return _show(run(draw(asked.replay, asked.mode), traced=True))
    if asked.shrink is not None:
        made = run(draw(asked.shrink, asked.mode))
        return _show(shrink(made, lambda text: print(text, flush=True)) if made.broken else made)
    began = time.perf_counter()
    total = Total()
    for outcome in outcomes(range(asked.seed, asked.seed + asked.seeds), asked.mode, asked.jobs):
        total.add(outcome)
        if outcome.broken:
            print(f"seed {outcome.plan.seed}: {outcome.broken}: {outcome.detail[:2000]}", flush=True)
            if asked.first:
                break
    if asked.uncovered:
        print("not met: " + ", ".join(f"{phase}/{kind}" for phase, kind in sorted(every_pair() - total.pairs)))
    print(total.words(time.perf_counter() - began))
    return 1 if total.broken else 0


def outcomes(seeds: Iterable[int], mode: str | None, jobs: int) -> Iterator[Outcome]:
    """Run seeds, in `jobs` processes, in order."""
    asked = [(seed, mode) for seed in seeds]
    if jobs < 2:
        yield from map(_one, asked)
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(_one, asked, chunksize=8)


def _one(asked: tuple[int, str | None]) -> Outcome:
    return run(draw(*asked))


def every_pair() -> set[tuple[str, str]]:
    """Every pair of phase and fault."""
    return {(phase, kind) for phase in PHASES for kind in faults.KINDS}


class Total:
    """What many runs come to."""

    def __init__(self) -> None:
        self.seeds = self.events = 0
        self.virtual = 0.0
        self.broken: list[int] = []
        self.pairs: set[tuple[str, str]] = set()
        self.counts: Counter[str] = Counter()

    def add(self, outcome: Outcome) -> None:
        """One more."""
        self.seeds += 1
        self.events += outcome.events
        self.virtual += outcome.seconds
        self.pairs |= outcome.pairs & every_pair()
        self.counts.update(outcome.counts)
        if outcome.broken:
            self.broken.append(outcome.plan.seed)

    def words(self, seconds: float) -> str:
        """All of it in one sentence."""
        broken = "no promise broken" if not self.broken else f"promises broken in {len(self.broken)} seeds, first {self.broken[0]}"
        return (
            f"{self.seeds} seeds in {seconds:.0f} s: {broken}; {len(self.pairs)} of {len(every_pair())} pairs of phase and fault met; "
            f"{self.counts['updates']} updates, {self.counts['commits']} commits, {self.counts['restores']} restores"
        )


def _show(outcome: Outcome) -> int:
    print("\n".join(outcome.trace))
    print(outcome.plan.words())
    print(
        f"{outcome.broken or 'every promise holds'} after {outcome.seconds:.1f} virtual seconds "
        f"and {outcome.events} events; {outcome.detail}"
    )
    return 1 if outcome.broken else 0
