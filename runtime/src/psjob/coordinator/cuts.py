"""When to checkpoint, and how far one cut has come. Pure: the caller tells the time and carries orders out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Cut:
    """One try. `step` None: blocks are copied as they stand, with `marks` once every worker has marked its own step edge.

    `ready` and `written` are shard indices.
    """

    number: int
    step: int | None
    marks: bool
    began: float
    final: bool = False
    stop: bool = False
    pins: dict[int, int] = field(default_factory=dict)
    """The clock at which each worker marked."""
    clocks: dict[int, int] | None = None
    """In a decided mode: how many pushes of each worker the blocks hold."""
    ready: set[int] = field(default_factory=set)
    written: dict[int, dict[str, Any]] = field(default_factory=dict)


VIEWS = 1 << 15
"""A cut's number has 32 bits on the wire."""


class Cuts:
    """Decides what to cut next. `interval` in seconds, `every` in steps; either may be absent (None). `ahead` is the mode's."""

    MARK_SECONDS = 10.0
    STUCK_SECONDS = 60.0
    WRITING_SECONDS = 0.2
    PREPARE_SECONDS = 20.0
    FIRST_LEAD = 2
    MAX_LEAD = 64

    def __init__(self, interval: float | None, every: int | None, marks: bool, view: int = 0, ahead: int | None = 0) -> None:
        self.interval, self.every = interval, every
        self.follow(marks, ahead)
        self.current: Cut | None = None
        # Above every number that an earlier coordinator gave: a worker that was released then must hold its pushes now.
        self.number = view % VIEWS << 16
        self.requested = False
        self._next_time: float | None = None
        self._next_step: int | None = None
        self._not_before = 0.0
        self._lead = self.FIRST_LEAD
        self.prepared: set[int] | None = None
        """The shards that have memory for the next cut; None: nobody was asked."""
        self._prepares_since = 0.0
        self._mark_seconds = self.MARK_SECONDS

    def follow(self, marks: bool, ahead: int | None) -> None:
        """The mode is another one."""
        self.marks, self._ahead = marks, ahead + 1 if ahead else 0

    def restart(self, step: int, now: float) -> None:
        """Count on from a manifest at `step`; whatever was in flight is void."""
        self.current = self.prepared = None
        self._schedule(step, now)

    def prepares(self, step: int, now: float) -> bool:
        """Should the shards make memory ready for a cut? Once a cut: when it is due, or half its distance in steps before."""
        if self.prepared is not None or not self.may_begin(now):
            return False
        half = self._next_step is not None and step + self._reach + (self.every or 0) // 2 >= self._next_step
        if not half and not self.due(step, now):
            return False
        self.prepared, self._prepares_since = set(), now
        return True

    def waits(self, step: int, shards: int, now: float) -> bool:
        """Should a cut that is due wait for memory? One that is to stand at a multiple never does, another not for long."""
        at_multiple = self._next_step is not None and step + self._reach >= self._next_step
        if self.prepared is None or at_multiple:
            return False
        return len(self.prepared) < shards and now - self._prepares_since < self.PREPARE_SECONDS

    def due(self, step: int, now: float) -> bool:
        """Should a cut begin now?"""
        if self.current is not None or now < self._not_before:
            return False
        if self.requested:
            return True
        by_time = self._next_time is not None and now >= self._next_time
        lead = 0 if self.marks else self._reach
        return by_time or (self._next_step is not None and step + lead >= self._next_step)

    def begin(self, step: int, now: float, final: bool = False, stop: bool = False, still: bool = False) -> Cut:
        """Name the next cut, where the furthest worker is at `step`; `still`: nobody moves any more, so blocks are copied as they stand."""
        self.number += 1
        named: int | None = None
        if not still and not self.marks:
            named = step + self._lead
            if self.every and not (final or stop or self.requested):
                named = -(-named // self.every) * self.every if self._next_step is not None else named
        self.requested = False
        self.prepared = None
        self.current = Cut(self.number, named, self.marks and not still, now, final, stop)
        return self.current

    def late(self, now: float) -> None:
        """A shard was already beyond the step: name one further ahead. Without a step it is still writing: wait for that."""
        if self.current is not None and self.current.step is None:
            self._again(now, self.WRITING_SECONDS)
            return
        self._lead = min(self._lead * 2, self.MAX_LEAD)
        self._again(now, 0.0)

    def failed(self, now: float) -> None:
        """Writing failed (disk full, no permission): try again after a while."""
        self._again(now, 5.0)

    def expired(self, now: float) -> bool:
        """Workers hold their pushes for a marked cut; not longer than this."""
        cut = self.current
        return cut is not None and cut.marks and not cut.written and now - cut.began > self._mark_seconds

    def stuck(self, step: int, now: float) -> bool:
        """Training has passed the cut's step for long, and something of the cut was lost on the way."""
        cut = self.current
        return cut is not None and cut.step is not None and step > cut.step and now - cut.began > self.STUCK_SECONDS

    def may_begin(self, now: float) -> bool:
        """Nothing is in flight, and a failed try is long enough ago."""
        return self.current is None and now >= self._not_before

    def timed_out(self, now: float) -> None:
        self._mark_seconds = min(self._mark_seconds * 2, 60.0)
        self._again(now, self._mark_seconds)

    def committed(self, step: int, now: float) -> None:
        self.current = None
        self._mark_seconds = self.MARK_SECONDS
        self._lead = max(self.FIRST_LEAD, self._lead // 2)
        self._schedule(step, now)

    @property
    def _reach(self) -> int:
        """How far ahead of the slowest worker a cut is named."""
        return self._lead + self._ahead

    def _again(self, now: float, delay: float) -> None:
        self.current = None
        self.requested = True
        self._not_before = now + delay

    def _schedule(self, step: int, now: float) -> None:
        self._next_time = None if self.interval is None else now + self.interval
        self._next_step = None if self.every is None else (step // self.every + 1) * self.every
