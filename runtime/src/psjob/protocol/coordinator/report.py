"""What the job tells of itself: steps passed and rates, reported numbers and their history, the last recovery, how each stage stands.

A history has a bounded length: where it is full, every second entry goes, and entries come half as often.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, pairwise
from statistics import fmean, median
from typing import Any

from psjob.protocol.coordinator.consistency import Alike, Drift
from psjob.protocol.coordinator.events import CheckpointFacts, JobFacts, Measured
from psjob.protocol.coordinator.members import Member, Members, State
from psjob.protocol.coordinator.step_times import StepTimes

MAX_METRICS = 256
LOSS = "loss"
RECENT, APART = 60.0, 0.25
"""A rate is that of so many seconds, from steps that are so many seconds apart or more."""
PAUSE, PAUSES = 2.0, 20
"""A step that took longer than so many seconds, and so many times the usual one, was a pause: a restart, a wait for a worker."""


class JobProgress:
    """Numbers for the status port."""

    def __init__(self) -> None:
        self.step = 0
        self.history: deque[tuple[int, float]] = deque(maxlen=64)
        self._marks: deque[tuple[int, float]] = deque(maxlen=int(2 * RECENT / APART))
        """Of the history those that a rate is made from; both ends of a pause are among them."""
        self.past = MetricHistory()
        self.comeback = RecoveryTimer()
        self.metrics: dict[str, float] = {}
        self.reported: dict[str, int] = {}
        """By name of a metric: the step at which it was last given."""
        self.total: int | None = None
        self.checkpoint: dict[str, Any] | None = None
        self.checkpoint_problem: str | None = None
        self.committed = 0
        self.weights_sha256: str | None = None
        self.failure: str | None = None
        self.data_problem: str | None = None
        """What says that workers train on the same data, or read other data than they should."""
        self.data = Alike()
        self._inputs: dict[int, Sequence[int]] = {}
        self._looked = False
        self.drift = Drift()
        self.times = StepTimes()
        self.diverged: str | None = None
        """What says that the loss is no number any more."""

    def passed(self, step: int, now: float) -> None:
        """All workers that are there have passed `step` steps, at unix time `now`."""
        self.step = step
        last, marked = self.history[-1] if self.history else None, self._marks[-1] if self._marks else None
        if marked is None or now - marked[1] >= APART:
            if last is not None and last != marked and now - last[1] >= APART:
                self._marks.append(last)
            self._marks.append((step, now))
        self.history.append((step, now))
        if self.past.due(self.metrics, now):
            self.past.note(step, self.metrics, self.rate(now), now, self.reported, self.times.mean())

    def rewound(self, step: int) -> None:
        self.comeback.undone(self.step, step)
        self.drift.rewound()
        self.step = step

    def adopt(self, made: CheckpointFacts) -> None:
        """This manifest is the newest: show it."""
        self.checkpoint = {
            "step": made.step, "term": made.term, "time": made.created, "bytes": made.bytes,
            "path": made.name, "final": made.final, "observedRequest": made.request,
        }  # fmt: skip
        if made.final:
            self.weights_sha256 = made.weights_sha256

    def report(self, rank: int, body: Mapping[str, float]) -> None:
        """Numbers of `report()`: rank 0's hold; another rank's fill what rank 0 does not name. The MAX_METRICS named last are kept."""
        for name, value in list(body.items())[:MAX_METRICS]:
            if not isinstance(value, int | float):
                continue
            if name == LOSS and (rank == 0 or not math.isfinite(value)):
                first = self.diverged or f"worker {rank} reported loss {value} after step {self.step}"
                self.diverged = None if math.isfinite(value) else first
            if not math.isfinite(value):
                self.metrics.pop(name, None)  # the last finite one says nothing any more
                continue
            if name == "total":
                self.total = int(value)
            elif rank == 0 or name not in self.metrics:
                self.metrics.pop(str(name)[:64], None)  # told again, it is the newest
                self._hold(str(name)[:64], float(value))
        for name in list(self.metrics)[:-MAX_METRICS]:
            del self.metrics[name]
        self.reported = {name: self.reported[name] for name in self.metrics}

    def _hold(self, name: str, value: float) -> None:
        self.metrics[name], self.reported[name] = value, self.step

    def see_inputs(self, rank: int, sums: Sequence[int], workers: int) -> str | None:
        """What a worker's first steps were made of. Once all have told theirs: a sentence for the log."""
        self._inputs[rank] = sums
        if len(self._inputs) < workers or self._looked:
            return None
        self._looked = True
        seen = [[value for value in sums if value] for sums in self._inputs.values()]  # 0: no tensor was found in a step
        every = Counter(value for sums in seen for value in set(sums))
        total = sum(map(len, seen))
        same = sum(every[value] > 1 for sums in seen for value in sums)
        said = f"the script does not use psjob.shard: of {total} batches that were looked at, {same} went to several workers"
        if same:
            self.data_problem = f"{said}; let the loop go over psjob.shard(loader), so that each worker has its part of the data"
        return said

    def note_norm(self, norm: float) -> None:
        """The norm of the last mean gradient that was measured."""
        if math.isfinite(norm):
            self._hold("grad_norm", norm)

    def rate(self, now: float) -> float | None:
        """Steps per second over the history's last minute, without pauses such as a restart."""
        recent = [(s, t) for s, t in (*self._marks.copy(), *list(self.history)[-1:]) if now - t < RECENT]
        parts = [(s2 - s1, t2 - t1) for (s1, t1), (s2, t2) in pairwise(recent) if s2 > s1 and t2 > t1]
        if not parts:
            return None
        usual = median(seconds / steps for steps, seconds in parts)
        steady = [(steps, seconds) for steps, seconds in parts if seconds / steps <= max(PAUSE, PAUSES * usual)]
        return sum(steps for steps, _ in steady) / sum(seconds for _, seconds in steady) if steady else None

    def status(self, now: float, clock: int | None = None) -> dict[str, Any]:
        """`clock`: the step of the slowest worker, in a mode whose updates are not the workers' steps."""
        rate, metrics = self.rate(now), dict(self.metrics)  # another thread asks
        total = self.total
        if total is not None and clock is not None:
            total = round(self.step * total / clock) if clock else None  # as many updates for each step of a worker as so far
        left = None if total is None or not rate else max(0, total - self.step) / rate
        return {
            "step": self.step,
            "loss": self.metrics.get("loss"),
            "rate": rate,
            "eta": left,
            "totalSteps": total,
            "stepParts": self.times.mean(),
            "metrics": metrics,
            "reported": [self.reported.get(name, self.step) for name in metrics],
            "checkpoint": self.checkpoint and {**self.checkpoint, "age": round(max(0.0, now - self.checkpoint["time"]), 1)},
            "checkpointProblem": self.checkpoint_problem,
            "committed": self.committed,
            "weightsSha256": self.weights_sha256,
            "failure": self.failure,
            "diverged": self.diverged,
            "drift": self.drift.weights,
            "buffersDiffer": self.drift.buffers,
            "dataProblem": self.data_problem,
            "passed": [list(entry) for entry in self.history.copy()],
            **self.comeback.told(now),
        }


MOST_ENTRIES = 340
MOST_NAMES = 24
"""Numbers of an entry; as many as fit an answer of contract.STATUS_BYTES when all names are at their longest."""
LEAST_SECONDS = 1.0
"""Between two entries, at first."""


class MetricHistory:
    """Entries as contract.HISTORY_PATH has them. Read by another thread: the list is replaced, never shortened in place."""

    def __init__(self, most: int = MOST_ENTRIES) -> None:
        self._most = most
        self._every = LEAST_SECONDS
        self._entries: list[dict[str, Any]] = []
        self._next = 0.0
        self._names: set[str] = set()
        """What has a curve already: the first value of a number waits for nobody. At most MOST_NAMES."""

    def note(
        self, step: int, metrics: Mapping[str, float], rate: float | None, now: float, reported: Mapping[str, int],
        parts: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        """`step` has passed at unix time `now`, where an entry is due. A rewind brings lower steps after higher ones."""
        if not self.due(metrics, now):
            return
        told = dict(islice(metrics.items(), MOST_NAMES))
        self._next = now + self._every
        self._names.update(islice(told, MOST_NAMES - len(self._names)))
        made = {"time": now, "step": step, "rate": rate, "metrics": told, "reported": [reported[name] for name in told]}
        self._entries.append(made | {"stepParts": None if parts is None else [round(seconds, 6) for seconds in parts.values()]})
        if len(self._entries) >= self._most:
            self._entries = self._entries[1::2]
            self._every *= 2

    def due(self, metrics: Mapping[str, float], now: float) -> bool:
        """Would `note` take an entry now? It does where its time has come, or where a number is there for the first time."""
        return now >= self._next or (len(self._names) < MOST_NAMES and not self._names.issuperset(islice(metrics, MOST_NAMES)))

    def told(self) -> list[dict[str, Any]]:
        """All of them, the oldest first."""
        return list(self._entries)


class RecoveryTimer:
    """An interruption begins when a process joins or shards are restored; the next step that all pass ends it."""

    def __init__(self) -> None:
        self.steps_lost = 0
        """Steps undone in all interruptions that have ended."""
        self.waits = True
        """An interruption is not over yet."""
        self._floor = self._reached = 0
        self._first: tuple[int, int, int, int, float] | None = None
        """Of the last one: term, highest start of a worker, step continued from, first step passed, and when (unix time)."""

    def interrupted(self, step: int) -> None:
        """A process has joined, or shards are back; all have passed `step`."""
        if not self.waits:
            self.waits, self._floor, self._reached = True, step, step

    def undone(self, before: int, step: int) -> None:
        """All go back from one step to another."""
        self.interrupted(step)
        self._floor, self._reached = step, max(self._reached, before)

    def heard(self, acknowledged: int) -> None:
        """A worker that must go back says how many of its steps were acknowledged: a coordinator that is new itself cannot know."""
        if self.waits:
            self._reached = max(self._reached, acknowledged)

    def passed(self, step: int, term: int, start: int, wall: float) -> None:
        """All have passed `step`, at unix time `wall`."""
        if self.waits and step > self._floor:
            self.steps_lost += max(0, self._reached - self._floor)
            self._first = (term, start, self._floor, step, wall)
            self.waits = False

    def told(self, wall: float) -> dict[str, Any]:
        """As contract.STATUS_KEYS has it."""
        if self._first is None:
            return {"stepsLost": self.steps_lost, "resumed": None}
        term, start, floor, step, at = self._first
        first = {"term": term, "start": start, "from": floor, "step": step, "age": round(max(0.0, wall - at), 3)}
        return {"stepsLost": self.steps_lost, "resumed": first}


class StageReport:
    """Of a job; without stages it tells nothing. It is read while another thread writes."""

    def __init__(self, job: JobFacts, members: Members) -> None:
        self._job, self._members = job, members
        self._told: dict[int, tuple[tuple[int, int], float, Measured]] = {}
        """By rank: which process told it, and when."""

    def measured(self, member: Member, told: Measured, now: float) -> None:
        """A worker tells of itself."""
        self._told[member.rank] = member.incarnation, now, told

    def told(self, now: float) -> list[dict[str, Any]] | None:
        """For the status port (contract.STATUS_KEYS); None without stages."""
        if not self._job.stages:
            return None
        names = self._job.stage_names
        return [
            {"index": stage, "name": names[stage] if names else str(stage)} | self._stage([self._members[rank] for rank in ranks], now)
            for stage, ranks in enumerate(self._job.stages.all())
        ]

    def waiting(self, now: float) -> str | None:
        """A sentence on the worker that the others wait for: of several waits the longest whose worker does not wait itself."""
        if not self._job.stages:
            return None
        waits = {rank: wait for rank in self._members.all if (wait := self._wait(self._members[rank], now)) is not None}
        if not waits:
            return None
        rank = max(waits, key=lambda one: (waits[one][0].awaited not in waits, waits[one][1]))
        return f"worker {rank} (stage {self._job.stages.of(rank)}) waits for {_sentence(*waits[rank])}"

    def _stage(self, members: list[Member], now: float) -> dict[str, Any]:
        known = [(member, told) for member in members if (told := self._of(member)) is not None]
        waits = [wait for member in members if (wait := self._wait(member, now)) is not None]
        longest = max(waits, key=lambda wait: wait[1], default=None)
        idle = [told.idle for _, (_, told) in known if told.idle is not None]
        return {
            "desired": len(members),
            "ready": sum(member.state is State.LEFT or (member.state is State.JOINED and member.here) for member in members),
            "step": min(member.clock for member in members),
            "delay": self._delay([told.delay for _, (_, told) in known if told.delay is not None]),
            "idle": fmean(idle) if idle else None,
            "rssBytes": _most(told.resident for _, (_, told) in known),
            "peakBytes": _most(told.peak for _, (_, told) in known),
            "devicePeakBytes": _most(told.device_peak for _, (_, told) in known),
            "waiting": None if longest is None else _sentence(*longest),
        }

    def _delay(self, told: list[float]) -> float | None:
        """Of what a stage's workers have measured. In a flush an update counts gradients of only one version, the one that it changes."""
        if self._job.flushes and self._job.mode.ahead == 0:
            return 0.0
        return fmean(told) if told else None

    def _of(self, member: Member) -> tuple[float, Measured] | None:
        """What the process that a worker has now told last, and when."""
        found = self._told.get(member.rank)
        return None if found is None or found[0] != member.incarnation else found[1:]

    def _wait(self, member: Member, now: float) -> tuple[Measured, float] | None:
        """What a worker waits for, and how long already."""
        found = self._of(member)
        if found is None or found[1].waits is None or not member.here or member.state is not State.JOINED:
            return None
        return found[1], found[1].seconds + max(0.0, now - found[0])


def _sentence(told: Measured, seconds: float) -> str:
    return f"{told.waits}, for {seconds:.0f} s"


def _most(sizes: Iterable[int | None]) -> int | None:
    return max((size for size in sizes if size is not None), default=None)
