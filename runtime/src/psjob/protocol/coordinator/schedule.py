"""When to checkpoint, and how far one snapshot has come. The caller tells the time and carries orders out.

A snapshot is given up for what is known, not for how long it takes. A shard says so, a stream ends, a worker can no longer hand in what is
needed, or a shard reports nothing of its writing for SILENCE_SECONDS. One wait has an end of its own: workers hold their pushes for a
marked snapshot, and no longer than that is worth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from psjob.protocol.messages import SnapshotWritten

SILENCE_SECONDS = 20.0
"""A shard that holds a snapshot tells how far it has written once a second. After so long without a word the snapshot is void."""


@dataclass
class Snapshot:
    """One try. `step` None: blocks are copied as they stand, with `marks` once every worker has marked its own step boundary.

    `ready`, `held` and `written` are of shard indices.
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
    held: dict[int, float] = field(default_factory=dict)
    """When each shard that holds all of it last told of it."""
    written: dict[int, SnapshotWritten] = field(default_factory=dict)
    asked: float | None = None
    """When workers were asked for their marks."""
    lacking: set[int] | None = None
    """Once all is written: workers whose record is still to come."""
    requested: bool = False
    """Someone asked for it."""
    request: int | None = None
    """The checkpoint.request that it answers: what the config was seen to name when it began."""
    committing: bool = False
    """Its manifest is being written: only the disk can say what becomes of it."""

    def silent(self, now: float) -> int | None:
        """A shard that holds the snapshot and has told nothing of its writing for too long."""
        return next((i for i, told in self.held.items() if i not in self.written and now - told > SILENCE_SECONDS), None)


VIEWS = 1 << 15
"""A snapshot's number has 32 bits on the wire."""


class SnapshotSchedule:
    """Decides when the next is taken. `interval` in seconds, `every` in steps; either may be absent (None). `ahead` is the mode's."""

    MARK_SECONDS = 10.0
    WRITING_SECONDS = 0.2
    PREPARE_SECONDS = 20.0
    FAILED_SECONDS = 5.0
    FULL_SECONDS = 30.0
    """Between two tries on a full volume, where checkpoints are not made by time."""
    FIRST_LEAD = 2
    MAX_LEAD = 64
    MAX_MARK_SECONDS = 60.0

    def __init__(self, interval: float | None, every: int | None, marks: bool, term: int = 0, ahead: int | None = 0) -> None:
        self.interval, self.every = interval, every
        self.follow(marks, ahead)
        self.current: Snapshot | None = None
        # Above every number that an earlier coordinator gave: a worker that was released then must hold its pushes now.
        self.number = term % VIEWS << 16
        self.requested = False
        self._next_time: float | None = None
        self._next_step: int | None = None
        self._not_before = 0.0
        self._lead = self.FIRST_LEAD
        self.prepared: set[int] | None = None
        """The shards that have memory for snapshots; None: nobody was asked since the last restore."""
        self._waited = False
        """A snapshot was made since: memory is there, or is not worth another wait."""
        self._prepares_since = 0.0
        self._mark_seconds = self.MARK_SECONDS
        self._full = 0
        """Tries in a row that ended for want of room."""

    def follow(self, marks: bool, ahead: int | None) -> None:
        """The mode is another one."""
        self.marks, self._ahead = marks, ahead + 1 if ahead else 0

    def restart(self, step: int, now: float) -> None:
        """Count on from a manifest at `step`; whatever was in flight is void."""
        self.current = self.prepared = None
        self._waited = False
        self._schedule(step, now)

    def ask(self, now: float) -> None:
        """Someone wants a checkpoint; on a full volume that is a reason to try at once."""
        self.requested = True
        if self._full:
            self._not_before = min(self._not_before, now)

    def prepares(self, step: int, now: float) -> bool:
        """Should the shards make memory ready? Once after a restore: when a snapshot is due, or half its distance in steps before."""
        if self.prepared is not None or not self.may_begin(now):
            return False
        half = self._next_step is not None and step + self._reach + (self.every or 0) // 2 >= self._next_step
        if not half and not self.due(step, now):
            return False
        self.prepared, self._prepares_since = set(), now
        return True

    def waits(self, step: int, shards: int, now: float) -> bool:
        """Should a snapshot that is due wait for memory? One that is to stand at a multiple never does, another not for long."""
        at_multiple = self._next_step is not None and step + self._reach >= self._next_step
        if self.prepared is None or self._waited or at_multiple:
            return False
        return len(self.prepared) < shards and now - self._prepares_since < self.PREPARE_SECONDS

    def due(self, step: int, now: float) -> bool:
        """Should a snapshot begin now?"""
        if self.current is not None or now < self._not_before:
            return False
        if self.requested:
            return True
        by_time = self._next_time is not None and now >= self._next_time
        lead = 0 if self.marks else self._reach
        return by_time or (self._next_step is not None and step + lead >= self._next_step)

    def begin(
        self, step: int, now: float, final: bool = False, stop: bool = False, still: bool = False, most: float = math.inf
    ) -> Snapshot:
        """Name the next snapshot, where the furthest worker is at `step`, at `most` at most.

        `still`: nobody moves any more, so blocks are copied as they stand.
        """
        self.number += 1
        named: int | None = None
        if not still and not self.marks:
            named = step + self._lead
            if self.every and not (final or stop or self.requested):
                named = -(-named // self.every) * self.every if self._next_step is not None else named
            named = int(min(named, most))
        self._waited = True
        self.current = Snapshot(self.number, named, self.marks and not still, now, final, stop, requested=self.requested)
        self.requested = False
        return self.current

    def expired(self, now: float) -> bool:
        """Have workers held their pushes for too long, since another one computes a long step? Never once all shards have copied."""
        taken = self.current
        return (
            taken is not None and taken.asked is not None and len(taken.held) < len(taken.ready) and now - taken.asked > self._mark_seconds
        )

    def drop(self) -> None:
        """The snapshot in flight is void; when the next one is due stays as it was."""
        if self.current is not None:
            self.requested = self.requested or self.current.requested
        self.current = None

    # -- how a try ended ------------------------------------------------------------------------------

    def late(self, now: float) -> None:
        """A shard was already beyond the step: name one further ahead. Without a step it is still writing: wait for that."""
        if self.current is not None and self.current.step is None:
            self._again(now, self.WRITING_SECONDS)
            return
        self._lead = min(self._lead * 2, self.MAX_LEAD)
        # At a stop the step may be bounded: the same one is tried again, once what is under way has come.
        self._again(now, self.WRITING_SECONDS if self.current is not None and self.current.stop else 0.0)

    def failed(self, now: float) -> None:
        """Writing failed (no permission, a silent shard): try again after a while."""
        self._again(now, self.FAILED_SECONDS)

    def full(self, now: float) -> float:
        """There was no room: try again after a short while, then once an interval. Returns the seconds until then."""
        patient = self._full and self.current is not None and not (self.current.final or self.current.stop)
        self._full += 1
        delay = (self.interval or self.FULL_SECONDS) if patient else self.FAILED_SECONDS
        self._again(now, delay)
        return delay

    def timed_out(self, now: float) -> None:
        """Others have waited for a worker's mark for too long: later, and longer."""
        self._mark_seconds = min(self._mark_seconds * 2, self.MAX_MARK_SECONDS)
        self._again(now, self._mark_seconds)

    def committed(self, step: int, now: float) -> None:
        """The snapshot is a checkpoint."""
        self.current = None
        self._full = 0
        self._mark_seconds = self.MARK_SECONDS
        self._lead = max(self.FIRST_LEAD, self._lead // 2)
        self._schedule(step, now)

    def may_begin(self, now: float) -> bool:
        """Nothing is in flight, and a failed try is long enough ago."""
        return self.current is None and now >= self._not_before

    @property
    def _reach(self) -> int:
        """How far ahead of the slowest worker a snapshot is named."""
        return self._lead + self._ahead

    def _again(self, now: float, delay: float) -> None:
        self.current = None
        self.requested = True
        self._not_before = now + delay

    def _schedule(self, step: int, now: float) -> None:
        self._next_time = None if self.interval is None else now + self.interval
        self._next_step = None if self.every is None else (step // self.every + 1) * self.every
