"""What the job tells of itself: steps passed, rates, reported numbers, the last checkpoint."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

MAX_METRICS = 256


class JobProgress:
    """Numbers for the status port."""

    def __init__(self) -> None:
        self.step = 0
        self.history: deque[tuple[int, float]] = deque(maxlen=64)
        self.metrics: dict[str, float] = {}
        self.total: int | None = None
        self.checkpoint: dict[str, Any] | None = None
        self.checkpoint_problem: str | None = None
        self.committed = 0
        self.weights_sha256: str | None = None
        self.failure: str | None = None

    def passed(self, step: int, now: float) -> None:
        """All workers that are there have passed `step` steps, at unix time `now`."""
        self.step = step
        self.history.append((step, now))

    def rewound(self, step: int) -> None:
        self.step = step

    def report(self, rank: int, body: Mapping[str, float]) -> None:
        """Numbers of `report()`: rank 0's hold; another rank's fill what rank 0 does not name. The MAX_METRICS named last are kept."""
        for name, value in list(body.items())[:MAX_METRICS]:
            if not isinstance(value, int | float) or not math.isfinite(value):
                continue
            if name == "total":
                self.total = int(value)
            elif rank == 0 or name not in self.metrics:
                self.metrics.pop(str(name)[:64], None)  # told again, it is the newest
                self.metrics[str(name)[:64]] = float(value)
        for name in list(self.metrics)[:-MAX_METRICS]:
            del self.metrics[name]

    def rate(self, now: float) -> float | None:
        """Steps per second over the history's last minute."""
        recent = [(s, t) for s, t in self.history if now - t < 60]
        if len(recent) < 2 or recent[-1][1] <= recent[0][1] or recent[-1][0] <= recent[0][0]:
            return None
        return (recent[-1][0] - recent[0][0]) / (recent[-1][1] - recent[0][1])

    def status(self, now: float) -> dict[str, Any]:
        rate = self.rate(now)
        left = None if self.total is None or not rate else max(0, self.total - self.step) / rate
        return {
            "step": self.step,
            "loss": self.metrics.get("loss"),
            "rate": rate,
            "eta": left,
            "totalSteps": self.total,
            "metrics": dict(self.metrics),
            "checkpoint": self.checkpoint,
            "checkpointProblem": self.checkpoint_problem,
            "committed": self.committed,
            "weightsSha256": self.weights_sha256,
            "failure": self.failure,
            "passed": [list(entry) for entry in self.history],
        }
