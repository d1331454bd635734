"""What the job tells of itself: steps passed, rates, reported numbers, the last checkpoint."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from psjob.protocol.coordinator.alike import Alike
from psjob.protocol.coordinator.comeback import Comeback
from psjob.protocol.coordinator.drift import Drift
from psjob.protocol.coordinator.past import Past

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
        self.past = Past()
        self.comeback = Comeback()
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
            self.past.note(step, self.metrics, self.rate(now), now, self.reported)

    def rewound(self, step: int) -> None:
        self.comeback.undone(self.step, step)
        self.drift.rewound()
        self.step = step

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
