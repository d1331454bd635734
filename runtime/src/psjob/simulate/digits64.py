"""The protocol digits-64: ten ways to train the same digits with 1 to 64 workers, and what must come out.

The trainings of the whole table are spread over this machine's cores. Tables read well and pipe well, and a bar shows the progress.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from psjob import rules
from psjob.modes import Async, Mode, Sync
from psjob.rules.base import HasHyperparameters, Hyperparameters, check_hyperparameters
from psjob.simulate.engine import Trace, WorkerSpeeds, simulate
from psjob.simulate.training import Digits, SimulatedTraining

EPOCHS = 60
LR = 0.05
DROPS = (30, 45)
"""Epochs after which lr is a tenth of what it was."""
WORKERS: tuple[int, ...] = (1, 4, 8, 16, 24, 32, 48, 64)
SEEDS: tuple[int, ...] = (0, 1, 2, 3, 4)
PUSHES = EPOCHS * Digits.updates_per_epoch
"""Batches of a training, whatever the number of workers."""


@dataclass(frozen=True)
class TableEntry:
    """A line of the table."""

    title: str
    rule: str
    mode: Mode = field(default_factory=Async)


ENTRIES = {
    "asgd": TableEntry("ASGD, no momentum", "plain"),
    "nag-asgd": TableEntry("NAG-ASGD", "nag"),
    "multi-asgd": TableEntry("Multi-ASGD", "multi-momentum"),
    "dana-zero": TableEntry("DANA-Zero", "dana-zero"),
    "dana-slim": TableEntry("DANA-Slim", "dana-slim"),
    "dana-dc": TableEntry("DANA-DC", "dana-dc"),
    "dc-asgd": TableEntry("DC-ASGD-a + heavy ball", "dc-asgd"),
    "ga-nag": TableEntry("GA + NAG", "gap-aware"),
    "ga-dana": TableEntry("GA + DANA", "gap-aware-dana"),
    "ssgd": TableEntry("SSGD, lr not scaled", "nag", Sync()),
}
QUICK: tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]] = ("asgd", "nag-asgd", "multi-asgd", "dana-zero"), (1, 16, 32), (0, 1)
"""Entries, workers and seeds of the small table: seconds."""


@dataclass(frozen=True)
class Task:
    """One training of `entry`, a key of ENTRIES."""

    entry: str
    workers: int
    seed: int
    lr: float = LR
    speeds: WorkerSpeeds = field(default_factory=WorkerSpeeds)


@dataclass(frozen=True)
class TrainingResult:
    """What a training came to: accuracy from 0 to 1, mean gap and staleness over its pushes, SHA-256 of its trace."""

    accuracy: float
    gap: float
    staleness: float
    sha256: str


def train_once(task: Task) -> TrainingResult:
    """Train once. The seed of the data is the task's, that of the times is another one made from it."""
    entry, problem = ENTRIES[task.entry], Digits(task.seed)
    rule = rules.named(entry.rule)
    hyperparameters = rate_schedule(protocol_hyperparameters(rule, {"lr": task.lr}), task.workers)
    training = SimulatedTraining(problem, rule, hyperparameters, delay=entry.mode.delay)
    trace = GapTrace()
    with np.errstate(all="ignore"):  # a rule may diverge; that is what the table shows
        outcome = simulate(entry.mode, task.workers, task.speeds, PUSHES, 1000 + task.seed, training, trace)
        return TrainingResult(training.score(), trace.mean(), float(np.mean(outcome.staleness)), outcome.sha256)


def protocol_hyperparameters(rule: HasHyperparameters, given: Hyperparameters) -> Hyperparameters:
    """The rule's hyperparameters: the protocol's where the rule has such (momentum: where it has one by default), and `given` before them.

    Raises ValueError for one that the rule does not have.
    """
    lr = given.get("lr", LR)
    ours = {"lr": lr, "max_lr": lr, "weight_decay": 1e-4, "momentum": 0.9 if rule.hyperparameters.get("momentum") else 0.0}
    return check_hyperparameters(rule, {**{name: value for name, value in ours.items() if name in rule.hyperparameters}, **given})


def rate_schedule(hyperparameters: Hyperparameters, workers: int) -> Callable[[int], Hyperparameters]:
    """`protocol_hyperparameters` after so many batches: lr / workers to lr in the first epoch, a tenth of it after 30 and 45."""
    lr = float(hyperparameters["lr"])
    steps = [{**hyperparameters, "lr": lr * 0.1**drops} for drops in range(len(DROPS) + 1)]
    return partial(_hyperparameters, hyperparameters, steps, lr, workers)


def _hyperparameters(common: Hyperparameters, steps: Sequence[Hyperparameters], lr: float, workers: int, batches: int) -> Hyperparameters:
    if batches < Digits.updates_per_epoch:
        least = lr / workers
        return {**common, "lr": least + (lr - least) * batches / Digits.updates_per_epoch}
    return steps[sum(batches >= epoch * Digits.updates_per_epoch for epoch in DROPS)]


class GapTrace(Trace):
    """A trace that keeps the sum of gaps."""

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(path)
        self._total, self._count = 0.0, 0

    def flush(self) -> None:
        self._total += sum(row[5] for row in self.rows)
        self._count += len(self.rows)
        super().flush()

    def mean(self) -> float:
        """The mean gap of all pushes; inf where one was not finite."""
        return self._total / self._count if np.isfinite(self._total) else float("inf")


def mean(trainings: Sequence[TrainingResult], what: Literal["accuracy", "gap", "staleness"]) -> float:
    """Over seeds."""
    return float(np.mean([getattr(one, what) for one in trainings]))


Table = Mapping[tuple[str, int], list[TrainingResult]]


def gate(table: Table) -> dict[str, bool | None]:
    """What must hold of the means over seeds, in words; None where the table does not have what it takes."""

    def accuracy(key: str, workers: int) -> float:
        return 100 * mean(table[key, workers], "accuracy")

    nag, multi, dana = "nag-asgd", "multi-asgd", "dana-zero"
    both = [n for n in WORKERS if n >= 24 and (dana, n) in table and (multi, n) in table]
    tests: dict[str, Callable[[], bool]] = {
        "NAG-ASGD collapses: below 80 % at 32 workers": lambda: accuracy(nag, 32) < 80,
        "DANA-Zero does not: above 97 % at 32 workers": lambda: accuracy(dana, 32) > 97,
        "DANA-Zero is within 0.5 of Multi-ASGD or above from 24 workers on": lambda: all(
            accuracy(dana, n) >= accuracy(multi, n) - 0.5 for n in both or [24]
        ),
        "the gap of NAG-ASGD is at least 10 times DANA-Zero's at 32 workers": lambda: (
            mean(table[nag, 32], "gap") >= 10 * mean(table[dana, 32], "gap")
        ),
        "DANA-Zero with 16 workers is within 0.5 of one worker": lambda: abs(accuracy(dana, 16) - accuracy(dana, 1)) <= 0.5,
    }
    found: dict[str, bool | None] = {}
    for words, test in tests.items():
        try:
            found[words] = test()
        except KeyError:
            found[words] = None
    return found


WIDTH = 30
EVERY = 0.1


def text_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns with two spaces between; the first is text, the others are numbers to the right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            word.ljust(width) if i == 0 else word.rjust(width) for i, (word, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


class Bar:
    """How much of `total` is done, on standard error; nothing where that is no terminal."""

    def __init__(self, total: int, unit: str) -> None:
        self._total, self._unit, self._shown = total, unit, 0.0
        self._began = time.monotonic()
        self._live = sys.stderr.isatty()

    def at(self, done: int) -> None:
        now = time.monotonic()
        if not self._live or now - self._shown < EVERY:
            return
        self._shown = now
        part = min(1.0, done / self._total)
        left = f", {(now - self._began) * (1 / part - 1):.0f} s left" if part else ""
        bar = "█" * round(WIDTH * part)
        print(f"\r{bar:░<{WIDTH}} {done:,}/{self._total:,} {self._unit}{left}\x1b[K", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Take it off the terminal."""
        if self._live and self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


GAP_AT = (16, 32)


def fill(tasks: Sequence[Task], processes: int, told: Callable[[int], None] = lambda done: None) -> Table:
    """Train all of `tasks`; `told` hears how many are done. One process trains here, more in processes of their own.

    Raises ValueError when a process was killed.
    """
    found: dict[int, TrainingResult] = {}
    if processes == 1:
        for place, task in enumerate(tasks):
            found[place] = train_once(task)
            told(len(found))
    else:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            with _deaf():
                waiting = {pool.submit(train_once, task): place for place, task in enumerate(tasks)}
            try:
                for future in as_completed(waiting):
                    found[waiting[future]] = future.result()
                    told(len(found))
            except KeyboardInterrupt:
                for process in multiprocessing.active_children():
                    process.terminate()
                raise
            except BrokenProcessPool:
                raise ValueError("simulate digits-64: a training's process was killed, perhaps for memory; try --processes 1") from None
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
    table: dict[tuple[str, int], list[TrainingResult]] = {}
    for place, task in enumerate(tasks):
        table.setdefault((task.entry, task.workers), []).append(found[place])
    return table


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes started here do not hear Ctrl-C: this one does, and ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def text(table: Table) -> str:
    """Test accuracy in %, the mean over seeds, and the mean gap x 10,000 at 16 and 32 workers."""
    keys = [key for key in ENTRIES if any(key == entry for entry, _ in table)]
    counts = sorted({workers for _, workers in table})
    gaps = [n for n in GAP_AT if n in counts]
    rows = [
        [
            ENTRIES[key].title,
            *(f"{100 * mean(table[key, n], 'accuracy'):.1f}" for n in counts),
            *(f"{1e4 * mean(table[key, n], 'gap'):.0f}" for n in gaps),
        ]
        for key in keys
    ]
    return text_columns(["workers", *map(str, counts), *(f"gap at {n}" for n in gaps)], rows)
