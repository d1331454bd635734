"""The last interruption of training, and the first step after it: how long a recovery took, and how many steps it undid. Pure."""

from __future__ import annotations

from typing import Any


class Comeback:
    """An interruption begins when a process joins or shards are restored; the next step that all pass ends it."""

    def __init__(self) -> None:
        self.steps_lost = 0
        """Steps undone in all interruptions that have ended."""
        self.waits = True
        """An interruption is not over yet."""
        self._floor = self._reached = 0
        self._first: tuple[int, int, int, int, float] | None = None
        """Of the last one: view, highest start of a worker, step gone on from, first step passed, and when (unix time)."""

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

    def passed(self, step: int, view: int, start: int, wall: float) -> None:
        """All have passed `step`, at unix time `wall`."""
        if self.waits and step > self._floor:
            self.steps_lost += max(0, self._reached - self._floor)
            self._first = (view, start, self._floor, step, wall)
            self.waits = False

    def told(self, wall: float) -> dict[str, Any]:
        """As contract.STATUS_KEYS has it."""
        if self._first is None:
            return {"stepsLost": self.steps_lost, "resumed": None}
        view, start, floor, step, at = self._first
        first = {"view": view, "start": start, "from": floor, "step": step, "age": round(max(0.0, wall - at), 3)}
        return {"stepsLost": self.steps_lost, "resumed": first}
