"""What is said while nothing goes on, and when that has an end: a job that stands still is never silent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FIRST, LONGEST = 30.0, 300.0
"""Seconds without a step before the first word; it comes again after twice as long, up to the longest. Where nobody is waited for, a step
may just be long: the first word comes then after the longest."""
FULL_PATIENCE = 300.0
"""Seconds without a step on a volume without room after which the job is given up."""
FULL = "is full"


@dataclass
class Standing:
    """Of one run. Time is an argument, so that it can be tested."""

    unit: str = "step"
    """What the job counts."""
    step: int = -1
    since: float | None = None
    """When the last step was seen."""
    again: float = FIRST
    problem: bool = False
    """Was a problem with checkpoints said, that is not over yet?"""

    def see(self, step: int, told: Mapping[str, Any], now: float) -> list[str]:
        """Lines to say now: checkpoints that cannot be written, and a job that makes no step."""
        if self.since is None or step != self.step:
            self.step, self.since, self.again = step, now, FIRST
        lines = self._checkpoints(told)
        seconds = now - self.since
        if seconds >= self.again and (_reason(told) or seconds >= LONGEST):
            lines.append(self._standstill(told, seconds))
            while self.again <= seconds:
                self.again += min(self.again, LONGEST)
        return lines

    def verdict(self, told: Mapping[str, Any], now: float) -> str | None:
        """Why the run ends: without room nobody can go on, and nobody makes any."""
        if self.since is None or now - self.since < FULL_PATIENCE or FULL not in _problem(told):
            return None
        return f"DiskFull: no {self.unit} for {now - self.since:.0f} s at {self.unit} {max(0, self.step)}: {_problem(told)}"

    def _checkpoints(self, told: Mapping[str, Any]) -> list[str]:
        problem = _problem(told)
        if bool(problem) == self.problem:
            return []
        self.problem = bool(problem)
        return [f"warning: {problem}" if problem else "checkpoints are written again"]

    def _standstill(self, told: Mapping[str, Any], seconds: float) -> str:
        why = _reason(told) or "nobody waits for anybody, so workers compute or load; their logs say more"
        remedy = "spec.workers.stepTimeoutSeconds has such a worker started again; " if told.get("hung") else ""
        return f"no {self.unit} for {seconds:.0f} s, at {self.unit} {max(0, self.step)}: {why}; {remedy}Ctrl-C stops the job"


def _reason(told: Mapping[str, Any]) -> str:
    """Why nothing goes on; empty where no process says that it waits."""
    hung = ", ".join(f"worker {one.get('rank')} for {one.get('seconds')} s" for one in _rows(told.get("hung")))
    return f"they wait for {hung}" if hung else str(told.get("waiting") or "") or _problem(told)


def _problem(told: Mapping[str, Any]) -> str:
    return str(told.get("checkpointProblem") or "")


def _rows(value: object) -> list[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []
