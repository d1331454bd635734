"""Discrete events on a virtual clock: workers step, push and wait as the mode says. The same mode objects as on a shard.

A mode with a delay has workers that compute while pushes of theirs are under way (Li et al. 2014, OSDI, §3): `_DelayedRun`.

`WorkerSpeeds` says how long steps take. Times are drawn from a seed of their own: gamma times, unequal machines, stalls, outages, delays.
A `Trace` has what happened, push by push. Its SHA-256 stands for a whole simulation: the same seeds give the same value.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import struct
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from heapq import heappop, heappush
from itertools import chain, islice, repeat
from operator import add
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

import numpy as np

from psjob.modes import Batch, Mode, Push, Sync

EVERY = 1024
"""Pushes between two calls of `told`."""
NOT_TRAINED = (math.nan, math.nan)


class SimulatedWork(Protocol):
    """What is trained on the schedule. Without any only the schedule is simulated."""

    def begin(self, worker: int) -> None:
        """The worker is given the weights as they stand for it. Without a delay its next step is computed on these."""

    def push(self, push: Push) -> None:
        """The worker's gradient arrives, computed on the weights of version `push.base`; it waits to be decided on."""

    def decide(self, batch: Batch, version: int) -> list[tuple[float, float]]:
        """Apply what is kept, forget what is dropped. Returns (gap, loss) of each, kept ones first."""

    def leave(self, worker: int) -> None:
        """The worker is gone for good."""


@dataclass(frozen=True)
class SimulationOutcome:
    """What a simulation came to. Times are in the unit of the speeds."""

    elapsed: float
    pushes: int
    kept: int
    dropped: int
    updates: int
    staleness: array[int]
    """Of the pushes that were kept, in order."""
    sha256: str
    """Of the trace."""
    waited: tuple[float, ...]
    """How long each worker was there and made no step since the mode held the answer to a push. Times of `up` and `down` are not in it."""


def simulate(
    mode: Mode,
    workers: int,
    speeds: WorkerSpeeds,
    pushes: int,
    seed: int = 0,
    work: SimulatedWork | None = None,
    trace: Trace | None = None,
    told: Callable[[int], None] | None = None,
    interrupt: bool = False,
) -> SimulationOutcome:
    """Let `workers` continue until `pushes` have arrived, or nobody can continue. `seed` is that of the times.

    Events are ordered by (time, worker): at one time the lower worker comes first. `told` hears now and then how many pushes came.
    `interrupt`: workers hear of each update, and give up a step whose push would be dropped; else they finish it first, as a job's do.
    Raises ValueError for numbers that do not fit, and what `work` raises.
    """
    if workers < 1 or pushes < 1:
        raise ValueError(f"simulate: workers is {workers} and pushes is {pushes}, both must be 1 or more")
    run = (_DelayedRun if mode.delay else _Run)(mode, workers, speeds, seed, work, trace or Trace(), interrupt)
    heap, due = run.heap, run.due
    while run.pushed < pushes and heap:
        now, who = heappop(heap)
        if who < workers:
            if due[who] != now:
                continue  # its worker was lost on the way
            run.arrive(who, now)
            if run.pushed % EVERY == 0:
                run.trace.flush()
                if told:
                    told(run.pushed)
        elif who > workers:
            run.outage(who - workers - 1, now)
        run.now = now
        run.decide(now, who)
    kept = len(run.staleness)
    return SimulationOutcome(run.now, run.pushed, kept, run.dropped, run.version, run.staleness, run.trace.close(), run.so_far())


class _Run:
    """All that changes while the clock continues. `idle` have pushed and not been answered; `behind` is how many are at `lowest`."""

    def __init__(
        self, mode: Mode, workers: int, speeds: WorkerSpeeds, seed: int, work: SimulatedWork | None, trace: Trace, interrupt: bool
    ) -> None:
        self.takes, self.may_go, self.inner = mode.takes, mode.may_go, mode.inner_steps
        self.stale = mode.stale if interrupt else None
        self.work, self.trace, self.outages = work, trace, speeds.outages
        self.workers, self.draws, self.delay = workers, speeds.draws(workers, seed), mode.delay
        self.up, self.down = speeds.up, speeds.down
        self.wire = speeds.up + speeds.down
        self.heap: list[tuple[float, int]] = []
        """(time, w): push of worker w arrives; w = workers: the mode wants to be asked; above: an outage begins (even) or ends (odd)."""
        self.due = [0.0] * workers
        self.base, self.clocks = [0] * workers, [0] * workers
        self.since, self.waited = [0.0] * workers, [0.0] * workers
        """Since when who is idle waits, which with a delay may be later than now; all of it so far."""
        self.waiting, self.away = [0] * workers, [False] * workers
        """Pushes that have arrived and are not decided on, one at most: the next leaves when it is answered. Who is lost and not back."""
        self.idle: set[int] = set()
        self.pending: list[Push] = []
        self.expected = frozenset(range(workers))
        self.lowest, self.behind = 0, workers
        self.risen = False
        self.now, self.version, self.pushed, self.dropped, self.until = 0.0, 0, 0, 0, -1.0
        self.staleness: array[int] = array("q")
        for worker in range(workers):
            self.begin(worker, 0.0)
        for number, outage in enumerate(self.outages):
            heappush(self.heap, (outage.at, workers + 1 + 2 * number))

    def begin(self, who: int, now: float) -> None:
        """The worker takes the weights and starts a step (in local mode H of them)."""
        draws = self.draws[who]
        # sum() rounds otherwise since Python 3.12, and a schedule is the same everywhere.
        time = now + self.wire + (reduce(add, islice(draws, self.inner), 0.0) if self.inner else next(draws))
        self.base[who], self.due[who] = self.version, time
        heappush(self.heap, (time, who))
        if self.work:
            self.work.begin(who)

    def arrive(self, who: int, now: float) -> None:
        clock = self.clocks[who]
        push = Push(who, clock, self.base[who], now)
        self.pending.append(push)
        self.clocks[who] = clock + 1
        self.waiting[who] = 1
        self.since[who] = now
        self.idle.add(who)
        self.pushed += 1
        if clock == self.lowest:
            self._less_behind()
        if self.work:
            self.work.push(push)

    def decide(self, now: float, who: int) -> None:
        """Ask the mode until it has nothing more to say; then let go who may, of those for whom something has changed."""
        idle = self.idle
        freed = sorted(idle) if self.risen else [who]
        self.risen = False
        while self.pending and (batch := self.takes(self.pending, self.expected, self.version, now)) is not None:
            if batch.kept or batch.dropped:
                self._settle(batch, now, freed)
                continue
            if batch.until is not None and batch.until != self.until:
                self.until = batch.until
                heappush(self.heap, (batch.until, self.workers))
            break
        for free in freed:
            if free in idle and not self.away[free] and self._may_be_answered(free):
                idle.remove(free)
                self.waited[free] += max(0.0, now - self.since[free])
                self.begin(free, now)

    def _may_be_answered(self, who: int) -> bool:
        """May it go on from its newest push? With a delay the answer lets it begin the step that lies so many steps further ahead."""
        return self.may_go(self.clocks[who] + self.delay, self.lowest, self.waiting[who] + self.delay)

    def so_far(self) -> tuple[float, ...]:
        """What each has waited when the simulation ends."""
        still = {who: max(0.0, self.now - self.since[who]) for who in self.idle if not self.away[who]}
        return tuple(waited + still.get(who, 0.0) for who, waited in enumerate(self.waited))

    def outage(self, number: int, now: float) -> None:
        outage = self.outages[number // 2]
        who = outage.worker
        if who not in self.expected:
            return
        if number % 2:
            self.away[who] = False
            self._come_back(who, now)
            return
        if who in self.idle and not self.away[who]:
            self.waited[who] += max(0.0, now - self.since[who])
        self.away[who], self.due[who] = True, math.nan
        if math.isfinite(outage.away):
            heappush(self.heap, (now + outage.away, self.workers + 2 + number))
            return
        self.expected -= {who}
        if self.clocks[who] == self.lowest:
            self._less_behind()
        if self.work:
            self.work.leave(who)

    def _come_back(self, who: int, now: float) -> None:
        if who in self.idle:
            self.risen, self.since[who] = True, now  # it may be asked whether it may go
        else:
            self.begin(who, now)  # the step in hand is made again

    def _less_behind(self) -> None:
        """One worker less is at the lowest clock; where none is left there, the lowest rises."""
        self.behind -= 1
        if not self.behind and self.expected:
            clocks = [self.clocks[who] for who in self.expected]
            self.lowest = min(clocks)
            self.behind = clocks.count(self.lowest)
            self.risen = True

    def _settle(self, batch: Batch, now: float, freed: list[int]) -> None:
        """Apply a decision and write it down."""
        kept, dropped, weights, _ = batch
        version, rows, seen, clocks = self.version, self.trace.rows, self.staleness, self.clocks
        notes = self.work.decide(batch, version) if self.work else None
        decided, mean = kept, 1 / len(kept) if kept else 0.0
        if dropped:
            decided, weights = kept + dropped, (weights or (mean,) * len(kept)) + (0.0,) * len(dropped)
        for place, (who, clock, base, _) in enumerate(decided):
            staleness = version - (base or 0)  # nothing is restored here: a base is always known
            part = weights[place] if weights else mean
            gap, loss = notes[place] if notes else NOT_TRAINED
            if part:
                seen.append(staleness)
            rows.append((now, clock, who, staleness, part, gap, loss))
            if clock == clocks[who] - 1:
                self.waiting[who] = 0
            freed.append(who)
        if kept:
            self.version = version + 1
            if self.stale:
                self._interrupt(now)
        self.dropped += len(dropped)
        if len(decided) == len(self.pending):
            self.pending.clear()
        else:
            gone = set(decided)
            self.pending = [push for push in self.pending if push not in gone]

    def _interrupt(self, now: float) -> None:
        assert self.stale
        for who in self.expected - self.idle:
            if not self.away[who] and self.stale(self.base[who], self.version):
                self.begin(who, now)


class _DelayedRun(_Run):
    """A worker goes on computing after its push, while up to `delay` of its pushes are not answered.

    Its pushes go one after the other: push k leaves when it is computed and the answer to push k - 1 has come. Step k is begun when the
    answer to push k - 1 - delay has come, and before push k - 1 leaves. In sync it is computed on the weights of that answer, so that a run
    has the same result each time; in another mode on those of the newest answer that has come when it begins. So all that push k depends on
    is known with the answer to push k - 1.
    """

    def __init__(
        self, mode: Mode, workers: int, speeds: WorkerSpeeds, seed: int, work: SimulatedWork | None, trace: Trace, interrupt: bool
    ) -> None:
        self.fixed = isinstance(mode, Sync)
        self.ends = [0.0] * workers
        """When the last step of `steps`, or the one before them, is computed."""
        self.steps: list[deque[tuple[float, float]]] = [deque() for _ in range(workers)]
        """Begin and end of the steps that may be begun, and whose pushes have not left."""
        self.answers: list[deque[tuple[float, int]]] = [deque(maxlen=mode.delay + 1) for _ in range(workers)]
        """When the last answers come, and the version of their weights. The first is that which lets the oldest of `steps` begin."""
        super().__init__(mode, workers, speeds, seed, work, trace, interrupt)

    def begin(self, who: int, now: float) -> None:
        """Answer the worker's newest push, or give it the first weights: it may begin one step more, and its next push may leave."""
        self._answer(who, now)
        self._compute(who, now + self.down, self.delay + 1)
        self._send(who, now + self.down)

    def arrive(self, who: int, now: float) -> None:
        super().arrive(who, now)
        self.since[who] = max(now, self.ends[who] - self.down)

    def _come_back(self, who: int, now: float) -> None:
        """Steps whose pushes have not arrived are made again: in sync on the same weights, else on those of now."""
        there = now + self.down
        if not self.fixed:
            self.answers[who].clear()
            self._answer(who, now)
        self.steps[who].clear()
        self.ends[who] = there
        if who in self.idle:
            self._compute(who, there, self.delay)
            self.risen, self.since[who] = True, max(now, self.ends[who] - self.down)
        else:
            self._compute(who, there, self.delay + 1)
            self._send(who, there)

    def _answer(self, who: int, now: float) -> None:
        self.answers[who].append((now + self.down, self.version))
        if self.work:
            self.work.begin(who)

    def _compute(self, who: int, come: float, count: int) -> None:
        """Let the worker compute until so many pushes of its have not left; an answer that comes at `come` allows the last of them."""
        steps, draws = self.steps[who], self.draws[who]
        while len(steps) < count:
            begun = max(self.ends[who], come)
            self.ends[who] = begun + next(draws)
            steps.append((begun, self.ends[who]))

    def _send(self, who: int, come: float) -> None:
        """Let its oldest push leave, at `come` at the earliest."""
        begun, ended = self.steps[who].popleft()
        answers = self.answers[who]
        before = list(answers)[:-1] or answers  # the newest is that to a push that left when the step had begun, or the first of all
        self.base[who] = answers[0][1] if self.fixed else max(version for at, version in before if at <= begun)
        self.due[who] = max(ended, come) + self.up
        heappush(self.heap, (self.due[who], who))


CHUNK = 256


@dataclass(frozen=True)
class Stall:
    """Each step, with this chance, takes `factor` times as long and an exponential time of `extra` mean steps longer."""

    chance: float
    factor: float = 1.0
    extra: float = 0.0


@dataclass(frozen=True)
class Outage:
    """A worker is gone from `at` on, for `away` (inf: for good, and nobody waits for it any more). Its step in hand is lost."""

    worker: int
    at: float
    away: float = math.inf


@dataclass(frozen=True)
class WorkerSpeeds:
    """Times of steps in any unit. By default all machines are equal: Gamma(shape 100, mean 128), a spread of 10 %.

    With `spread` V > 0 the machines themselves differ: worker means are Gamma of that coefficient of variation (0.6 in Ali et al. 2000).
    `measured` rows, one per worker (or in turn), take the place of the gamma: times are drawn from them with replacement.
    """

    mean: float = 128.0
    shape: float = 100.0
    spread: float = 0.0
    slow: Mapping[int, float] = field(default_factory=dict)
    """How many times as long as others a worker takes, always."""
    stall: Stall | None = None
    outages: tuple[Outage, ...] = ()
    up: float = 0.0
    """Time of a push on its way to the server."""
    down: float = 0.0
    """Time of the weights on their way back."""
    measured: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        for name, value, least in (("mean", self.mean, True), ("shape", self.shape, True), ("spread", self.spread, False)):
            if not (value > 0 if least else value >= 0) or (name != "shape" and math.isinf(value)):
                raise ValueError(f"speeds: {name} is {value}, must be a number {'above 0' if least else 'of 0 or more'}")
        for name, value in (("up", self.up), ("down", self.down), *((f"slow factor of worker {w}", f) for w, f in self.slow.items())):
            if not 0 <= value < math.inf or (name.startswith("slow") and value == 0):
                raise ValueError(f"speeds: {name} is {value}, must be {'above 0' if name.startswith('slow') else '0 or more'}")
        if self.stall and not (0 <= self.stall.chance <= 1 and 0 < self.stall.factor < math.inf and 0 <= self.stall.extra < math.inf):
            chance, factor, extra = self.stall.chance, self.stall.factor, self.stall.extra
            raise ValueError(
                f"speeds: stall has chance {chance}, factor {factor} and extra {extra}: "
                "must be a chance of 0 to 1, a factor above 0 and an extra of 0 or more"
            )
        for outage in self.outages:
            if not (0 <= outage.at < math.inf and outage.away > 0):
                raise ValueError(
                    f"speeds: crash of worker {outage.worker} begins at {outage.at} and lasts {outage.away}: "
                    "must begin at 0 or later and last longer than 0"
                )
        if any(not times or not all(0 < t < math.inf for t in times) for times in self.measured):
            raise ValueError("speeds: measured times must be above 0, at least one per worker")

    @property
    def typical(self) -> float:
        """Mean time of a step without slow workers and stalls: the unit of reports."""
        return float(np.mean([np.mean(times) for times in self.measured])) if self.measured else self.mean

    def draws(self, workers: int, seed: int) -> list[Iterator[float]]:
        """Endless step times of a worker. They depend only on the seed and its number, so that modes can be compared on equal ones.

        Raises ValueError when a slow factor or outage names a worker that is not there.
        """
        for worker in [*self.slow, *(outage.worker for outage in self.outages)]:
            if not 0 <= worker < workers:
                raise ValueError(f"speeds: worker {worker} is not one of the {workers} workers (0 to {workers - 1})")
        return [chain.from_iterable(self._chunks(worker, np.random.SeedSequence([seed, worker]))) for worker in range(workers)]

    def _chunks(self, worker: int, seed: np.random.SeedSequence) -> Iterator[list[float]]:
        rng = np.random.default_rng(seed)
        factor = self.slow.get(worker, 1.0)
        if self.spread:
            factor *= rng.gamma(self.spread**-2, self.spread**2)
        while True:
            if self.measured:
                times = rng.choice(np.array(self.measured[worker % len(self.measured)]), CHUNK)
            elif math.isinf(self.shape):
                times = np.full(CHUNK, self.mean)
            else:
                times = rng.gamma(self.shape, self.mean / self.shape, CHUNK)
            times = times * factor
            if self.stall:
                stalled = rng.random(CHUNK) < self.stall.chance
                longer = times * self.stall.factor + rng.exponential(self.stall.extra * self.typical, CHUNK)
                times = np.where(stalled, longer, times)
            yield times.tolist()


class TraceRecord(NamedTuple):
    """A push at the time when it was decided on."""

    t: float
    clock: int
    worker: int
    staleness: int
    """Updates between the weights it was computed on and this one."""
    weight: float
    """Its part in the update; 0: it was dropped."""
    gap: float
    """Root mean square difference between the weights as they stand and those it was computed on; nan where none are simulated."""
    loss: float
    """Of its batch, on the weights it was computed on; nan where none are simulated."""


_ROW = "dqqqddd"
SEAL = "replay"
"""Begins the last line of a trace that can be played again; see `recording`."""
_SEALS = ("# {", f'{{"{SEAL}"')


class Trace:
    """Takes records, hashes them, and writes them to a file where one is given: CSV by its suffix, else JSON lines."""

    def __init__(self, path: Path | None = None) -> None:
        self.rows: list[tuple[float, int, int, int, float, float, float]] = []
        """Records that are not hashed yet; who adds to them calls `flush` now and then."""
        self.columns: tuple[str, ...] = ()
        """Names of what the file has beside each record. The SHA-256 is without them."""
        self.beside: list[tuple[int, ...]] = []
        """Of each of `trace_rows`, where there are such."""
        self._hash = hashlib.sha256()
        self._file: TextIO | None = path.open("w", encoding="utf-8", newline="") if path else None
        self._csv = csv.writer(self._file) if self._file and path and path.suffix == ".csv" else None
        self._begun = False

    def close(self) -> str:
        """Write what is left; the SHA-256 over all records as little-endian float64 and int64, in hex."""
        self.flush()
        if self._file:
            self._file.close()
        return self._hash.hexdigest()

    def flush(self) -> None:
        """Hash and write what was added."""
        rows, self.rows = self.rows, []
        beside, self.beside = self.beside, []
        self._hash.update(struct.pack("<" + _ROW * len(rows), *chain.from_iterable(rows)))
        both = zip(rows, beside, strict=True) if self.columns else zip(rows, repeat(()))
        if self._csv:
            if not self._begun:
                self._csv.writerow(TraceRecord._fields + self.columns)
            self._csv.writerows(row + more for row, more in both)
        elif self._file:
            self._file.writelines(
                json.dumps(_named(TraceRecord(*row)) | dict(zip(self.columns, more, strict=True))) + "\n" for row, more in both
            )
        self._begun = True


def read_trace(path: Path) -> Iterator[TraceRecord]:
    """The records of a trace file. Raises ValueError naming the line that is none, OSError where the file cannot be read."""
    return (_record(path, number, row) for number, row in enumerate(trace_rows(path), 1))


def trace_rows(path: Path) -> Iterator[dict[str, Any]]:
    """What stands in a trace file of each record, by column. Raises ValueError if it cannot be parsed, OSError."""
    number = 0
    try:
        with path.open(encoding="utf-8", newline="") as file:
            records = (line for line in file if not line.startswith(_SEALS))
            lines: Iterator[dict[str, Any]] = csv.DictReader(records) if path.suffix == ".csv" else map(_json, records)
            for number, row in enumerate(lines, 1):  # noqa: B007
                yield row
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: is no trace after record {number} ({error}); give a file that --trace wrote") from None


def _record(path: Path, number: int, row: dict[str, Any]) -> TraceRecord:
    absent = [name for name in TraceRecord._fields if name not in row]
    if absent:
        raise ValueError(
            f"{path}: record {number} is not one of a trace: it has no column {absent[0]}; give a file that --trace of this version wrote"
        )
    try:
        return TraceRecord(
            float(row["t"]), int(row["clock"]), int(row["worker"]), int(row["staleness"]), float(row["weight"]),
            _float(row["gap"]), _float(row["loss"]),
        )  # fmt: skip
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path}: record {number} is not one of a trace ({type(error).__name__}: {error})") from None


def _named(row: TraceRecord) -> dict[str, float | None]:
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row._asdict().items()}


def _float(value: float | str | None) -> float:
    return math.nan if value is None else float(value)


def _json(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    return row if isinstance(row, dict) else {}
