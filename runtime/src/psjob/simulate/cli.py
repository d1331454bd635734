"""What `psjob simulate` asks for: schedules, single trainings, the table of digits-64, and what a trace says."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from psjob import contract, rules
from psjob.modes import LocalAsync, Mode
from psjob.process import system
from psjob.rules.base import Hyperparameters, Rule, check_hyperparameters
from psjob.simulate import comparison, digits64, replay, words
from psjob.simulate.engine import Trace, WorkerSpeeds, read_trace, simulate
from psjob.simulate.training import Digits, Inner, SimulatedTraining, TrainingProblem

EXIT_GATE = EXIT_DIFFERENT = 1
EXIT_BAD_INPUT = 2
LIMITS = {
    "workers": (1, 10_000),
    "pushes": (1, 10**12),
    "seeds": (1, 1000),
    "processes": (1, 1024),
    "shards": (1, 16),
    "seed": (0, 2**63),
    "time_seed": (0, 2**63),
}
"""Of options that are whole numbers."""
PATHS = ("trace", "file")


def run_asked(asked: str) -> int:
    """Do what `asked` says; the exit code. No traceback for what a user got wrong.

    It is the JSON that `psjob simulate` makes of its options: {"does": one of DOES, option: value, …}, every option present.
    """
    options = SimpleNamespace(**json.loads(asked))
    for name in PATHS:
        if getattr(options, name, None) is not None:
            setattr(options, name, Path(getattr(options, name)))
    try:
        _check_whole(options)
        return DOES[options.does](options)
    except BrokenPipeError:
        raise
    except MemoryError:
        told = "there is not enough memory here; take fewer --workers or a smaller --problem"
    except OSError as error:
        told = f"{error.filename}: {error.strerror}; name another file" if error.filename else str(error)
    except ValueError as error:
        told = str(error)
    print(f"psjob simulate: {told}", file=sys.stderr)
    return EXIT_BAD_INPUT


def _check_whole(options: SimpleNamespace) -> None:
    """Raises ValueError naming the option, its value and what it may be."""
    for name, (least, most) in LIMITS.items():
        value = getattr(options, name, None)
        if isinstance(value, int) and not least <= value <= most:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be {least} to {most}")


def _schedule(options: SimpleNamespace) -> int:
    modes = [words.mode_of(text, options.workers) for text in options.mode] or comparison.usual(options.workers)
    if options.trace and len(modes) > 1:
        raise ValueError(f"--trace {options.trace}: is of one mode; give one --mode")
    pushes = options.pushes or 400 * options.workers
    bar = digits64.Bar(pushes * len(modes), "pushes")
    try:
        lines = comparison.compare_modes(
            modes, options.workers, _speeds(options), pushes, options.time_seed, Trace(options.trace), options.interrupt, bar.at
        )
    finally:
        bar.close()
    if options.json:
        _print_json([asdict(one) for one in lines])
    else:
        print(comparison.schedule_text(lines))
    return 0


def _train(options: SimpleNamespace) -> int:
    modes = [words.mode_of(text, options.workers) for text in options.mode or ["async"]]
    if len(modes) > 1:
        raise ValueError("--mode: is given more than once; a training has one")
    if options.replayable:
        options.library = "torch"
        if options.trace is None:
            raise ValueError("--replayable: is for a --trace FILE; name one")
    problem, rule, speeds = words.problem_of(options.problem, options.seed), _rule("--rule", options), _speeds(options)
    if options.replayable:
        replay.check_replayable(modes[0], options.workers, speeds, options.interrupt)
    steps, inner = modes[0].inner_steps, _inner(options, modes[0])
    asked, digits = words.option_numbers("--set", options.set), isinstance(problem, Digits) and not modes[0].inner_steps
    hyperparameters: Hyperparameters = digits64.protocol_hyperparameters(rule, asked) if digits else check_hyperparameters(rule, asked)
    given = (
        digits64.rate_schedule(hyperparameters, options.workers) if digits and not options.replayable else lambda batches: hyperparameters
    )
    pushes = options.pushes or max(options.workers, digits64.PUSHES // (steps or 1))
    bar = digits64.Bar(pushes, "pushes")
    began = time.perf_counter()
    try:
        with np.errstate(all="ignore"):  # what diverges says so by its score
            training = SimulatedTraining(problem, rule, given, options.library, inner, modes[0].delay)
            written = digits64.GapTrace(options.trace)
            work = replay.WorkRecording(training, written) if options.replayable else training
            outcome = simulate(modes[0], options.workers, speeds, pushes, options.time_seed, work, written, bar.at, options.interrupt)
            score, gap = training.score(), written.mean()
    finally:
        bar.close()
    if options.replayable:
        replay.check_decided(outcome)
        weights = training.state.weights
        facts = replay.training_facts(modes[0], options.workers, options.problem, options.seed, rule.name, hyperparameters, inner, weights)
        replay.seal(options.trace, facts)
    line = comparison.mode_line(modes[0], options.workers, speeds, outcome)
    found = {
        "problem": options.problem, "rule": options.rule, "mode": line.mode, "workers": options.workers, "score": score, "gap": gap,
        "staleness": line.staleness, "staleness_p95": line.staleness_p95, "useful": line.useful,
        "pushes": outcome.pushes, "updates": outcome.updates, "dropped": outcome.dropped,
        "elapsed": outcome.elapsed, "sha256": outcome.sha256,
        "pushes_per_second": outcome.pushes / (time.perf_counter() - began),
    }  # fmt: skip
    if options.json:
        _print_json(found)
    else:
        print("\n".join(f"{name:18} {value:.6g}" if isinstance(value, float) else f"{name:18} {value}" for name, value in found.items()))
    return 0


def _replay(options: SimpleNamespace) -> int:
    log = logging.getLogger("psjob")
    level = log.level
    log.setLevel(logging.ERROR)  # that processes wait for each other at the beginning is no news
    try:
        found = replay.replay_trace(options.file, options.shards)
    finally:
        log.setLevel(level)
    if options.json:
        _print_json({"same": found.same, "simulated": found.simulated, "served": found.served})
    else:
        print(f"{'same' if found.same else 'DIFFERENT'}: simulated {found.simulated}, served {found.served}")
    return 0 if found.same else EXIT_DIFFERENT


def _compare(options: SimpleNamespace) -> int:
    modes = [words.mode_of(text, options.workers) for text in options.mode] or comparison.usual(options.workers)
    speeds, pushes = _speeds(options), options.pushes or digits64.PUSHES
    rule = _rule("--rule", options)
    hyperparameters = digits64.protocol_hyperparameters(rule, words.option_numbers("--set", options.set))
    bar = digits64.Bar(pushes * len(modes), "pushes")
    found = []
    try:
        for number, mode in enumerate(modes):
            problem = words.problem_of(options.problem, options.seed)
            setting = comparison.Setting(problem, rule, digits64.rate_schedule(hyperparameters, options.workers))
            if mode.inner_steps:
                setting = _outer(mode, options.workers, problem, Inner(rule, hyperparameters, mode.inner_steps))
            told = lambda done, before=number * pushes: bar.at(before + done)  # noqa: E731
            found.append(comparison.training_curve(mode, setting, options.workers, speeds, pushes, options.time_seed, told))
    finally:
        bar.close()
    if options.json:
        _print_json(found)
    else:
        print(comparison.curves_text(found))
    return 0


def _digits64(options: SimpleNamespace) -> int:
    entries, workers, seeds = digits64.QUICK if options.quick else (tuple(digits64.ENTRIES), digits64.WORKERS, digits64.SEEDS)
    entries = tuple(options.only.split(",")) if options.only else entries
    workers = tuple(_counts(options.workers)) if options.workers else workers
    unknown = [entry for entry in entries if entry not in digits64.ENTRIES]
    if unknown:
        raise ValueError(f"--only {unknown[0]}: there are {', '.join(digits64.ENTRIES)}")
    seeds = tuple(range(options.seeds)) if options.seeds else seeds
    speeds = _speeds(options)
    speeds.draws(max(workers), 0)  # say at once what does not fit
    if not 0 <= options.lr < math.inf:
        raise ValueError(f"--lr {options.lr}: must be a finite number of 0 or more, as {digits64.LR}")
    tasks = [
        digits64.Task(entry, n, seed, options.lr, speeds) for n in sorted(workers, reverse=True) for entry in entries for seed in seeds
    ]
    bar = digits64.Bar(len(tasks), "trainings")
    began = time.perf_counter()
    try:
        filled = digits64.fill(tasks, min(options.processes or system.cores(), len(tasks)), bar.at)
    finally:
        bar.close()
    gate = digits64.gate(filled)
    if options.json:
        rows = [
            {"entry": key, "workers": n, "accuracy": [one.accuracy for one in ones], "gap": digits64.mean(ones, "gap"),
             "staleness": digits64.mean(ones, "staleness"), "sha256": [one.sha256 for one in ones]}
            for (key, n), ones in filled.items()
        ]  # fmt: skip
        _print_json({"table": rows, "gate": gate, "seconds": time.perf_counter() - began})
    else:
        print(f"test accuracy in %, mean of {len(seeds)} seeds; gap x 10,000\n\n{digits64.text(filled)}\n")
        told = {True: "holds", False: "FAILS", None: "not asked"}
        print("\n".join(f"{told[held]:9}  {words}" for words, held in gate.items()))
        print(f"\n{len(tasks)} trainings in {time.perf_counter() - began:.0f} s")
    return EXIT_GATE if False in gate.values() else 0


def _trace(options: SimpleNamespace) -> int:
    again, seen = Trace(), Counter[int]()
    pushes = dropped = 0
    for record in read_trace(options.file):
        again.rows.append(record)
        again.flush()
        pushes += 1
        dropped += record.weight == 0
        seen[record.staleness] += record.weight != 0
    if not pushes:
        raise ValueError(f"{options.file}: has no records")
    kept = sum(seen.values())
    mean = sum(staleness * count for staleness, count in seen.items()) / max(1, kept)
    histogram = {staleness: seen[staleness] for staleness in sorted(seen) if seen[staleness]}
    found = {"sha256": again.close(), "pushes": pushes, "dropped": dropped, "staleness": mean, "staleness_histogram": histogram}
    if options.json:
        _print_json(found)
        return 0
    print("\n".join(f"{name:9} {found[name]}" for name in ("sha256", "pushes", "dropped", "staleness")))
    rows = [[str(staleness), str(count), f"{100 * count / kept:.2f}"] for staleness, count in histogram.items()]
    print("\n" + digits64.text_columns(["staleness", "pushes", "%"], rows))
    return 0


def _print_json(told: object) -> None:
    """As JSON; a gap that is not finite is null there."""

    def plain(value: object) -> object:
        if isinstance(value, dict):
            return {str(name): plain(one) for name, one in value.items()}
        if isinstance(value, list):
            return [plain(one) for one in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    print(json.dumps(plain(told), indent=2))


def _counts(text: str) -> list[int]:
    least, most = LIMITS["workers"]
    counts = [int(word) if word.isdecimal() and len(word) < 19 else 0 for word in text.split(",")]
    if not all(least <= count <= most for count in counts):
        raise ValueError(f"--workers {text}: must be whole numbers of {least} to {most}, as 1,16,32")
    return list(dict.fromkeys(counts))


def _rule(option: str, options: SimpleNamespace) -> Rule:
    """The rule that `option` names. Raises ValueError for one that this simulation cannot run, with what to take instead."""
    name = getattr(options, option.strip("-"))
    rule = rules.named(name)
    if "lr" not in rule.hyperparameters:
        raise ValueError(f"{option} {name}: changes no weights, the workers' own optimizers do; take sgd, adam or another rule")
    if getattr(rule, "on_torch", False) and options.library != "torch":
        raise ValueError(f"{option} {name}: is a kernel of torch's; add --library torch")
    return rule


def _outer(mode: Mode, workers: int, problem: TrainingProblem, inner: Inner) -> comparison.Setting:
    """With the outer rule and the hyperparameters that a job in this mode has on its shards."""
    late = isinstance(mode, LocalAsync)
    rule = rules.named(contract.ASYNC_OUTER_RULE if late else "outer-nesterov")
    hyperparameters = {**rule.hyperparameters, "every": float(workers)} if late else rule.hyperparameters
    return comparison.Setting(problem, rule, lambda batches: hyperparameters, inner)


def _inner(options: SimpleNamespace, mode: Mode) -> Inner | None:
    """The workers' own steps in local mode. Raises ValueError for options of them in another."""
    if mode.inner_steps:
        own = _rule("--inner", options)
        return Inner(own, check_hyperparameters(own, words.option_numbers("--inner-set", options.inner_set)), mode.inner_steps)
    if options.inner_set or options.inner != "plain":
        given_for = f"--inner-set {options.inner_set[0]}" if options.inner_set else f"--inner {options.inner}"
        raise ValueError(f"{given_for}: is for --mode local:… and local-async:…; with {mode.name} workers make no steps of their own")
    return None


def _speeds(options: SimpleNamespace) -> WorkerSpeeds:
    return words.speeds_of(
        options.speeds, options.mean, options.shape, options.spread, options.slow, options.stall, options.crash, options.up, options.down
    )


DOES: dict[str, Callable[[SimpleNamespace], int]] = {
    "schedule": _schedule,
    "train": _train,
    "compare": _compare,
    "digits-64": _digits64,
    "trace": _trace,
    "replay": _replay,
}
