"""Workers that hang: without a step for too long, while others wait for it.

A worker that is only slow, or that nobody waits for, is left alone. One that is named here first gets a message, so that it writes down
the stacks of its threads. If it is still there a moment later, the status names it, for the planner to end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from psjob.protocol.coordinator.events import WorkersAwaited
from psjob.wire.frame import Kind

if TYPE_CHECKING:
    from psjob.protocol.coordinator.machine import Coordinator

TOLD_SECONDS = 0.5
"""A worker that was told has so long to write its stacks and end."""
REPORT_SECONDS = 3.0
"""What a shard has told of holds so long: it tells once a second."""
LOOK_SECONDS = 0.25


class Hanging:
    """`job.step_timeout` None: nobody is ever named."""

    def __init__(self, c: Coordinator) -> None:
        self.c = c
        self._awaited: dict[int, tuple[float, Mapping[int, float]]] = {}
        """By shard: when it told, and since when answers wait for each rank."""
        self._clocks: dict[int, int] = {}
        self._stirred: dict[int, float] = {}
        """By rank: when its script was last seen to go on."""
        self._told: dict[int, tuple[tuple[int, int], float]] = {}
        """By rank: which of its processes was told, and when."""
        self._kept_since: float | None = None
        """Since when a worker that is through waits for a checkpoint that holds its end."""
        self._looked = float("-inf")

    def awaited(self, event: WorkersAwaited) -> None:
        """A shard tells for whom its answers wait."""
        now = self.c.now
        self._awaited[event.shard] = now, {rank: now - seconds for rank, seconds in event.seconds.items()}
        for rank, clock in event.clocks.items():
            if self._clocks.get(rank) != clock:
                self._clocks[rank] = clock
                self.stirred(rank)

    def stirred(self, rank: int) -> None:
        """The script of a worker goes on, or its process is new."""
        self._stirred[rank] = self.c.now
        self._told.pop(rank, None)

    def tick(self, now: float) -> None:
        """Tell each worker that hangs, once."""
        limit = self.c.job.step_timeout
        if limit is None or now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        members = self.c.members
        keeps = members.alive < len(members.all) and any(m.left_at is not None and m.here for m in members.all.values())
        self._kept_since = (self._kept_since or now) if keeps else None
        for rank, since in self._waits(now):
            member = self.c.members[rank]
            if now - since < limit or not member.welcomed or rank in self._told:
                continue
            self._told[rank] = member.incarnation, now
            self.c.log("warning", f"worker {rank} has made no step for {now - since:.0f} s while others wait for it: it is ended")
            self.c.tell(rank, Kind.HUNG)

    def status(self, now: float) -> list[dict[str, Any]]:
        """Workers that were told and are still there, for the planner. May be called while another thread is in `tick`."""
        since = dict(self._waits(now))
        return [
            {"rank": rank, "start": incarnation[0], "seconds": round(now - since[rank], 1)}
            for rank, (incarnation, told) in sorted(self._told.copy().items())
            if rank in since and now - told >= TOLD_SECONDS and self.c.members[rank].incarnation == incarnation
        ]

    def _waits(self, now: float) -> Iterator[tuple[int, float]]:
        """Ranks for which somebody waits, and since when each has kept them waiting."""
        since: dict[int, float] = {}
        for told, waits in list(self._awaited.values()):
            for rank, at in waits.items() if now - told <= REPORT_SECONDS else ():
                since[rank] = min(at, since.get(rank, at))
        for rank, at in (*self._unmarked(), *self._kept()):
            since[rank] = min(at, since.get(rank, at))
        for rank, at in since.items():
            if self.c.members[rank].left_at is None:
                yield rank, max(at, self._stirred.get(rank, at))

    def _kept(self) -> Iterator[tuple[int, float]]:
        """Workers that still train while one that is through waits for a checkpoint that holds its end."""
        if self._kept_since is not None:
            for member in self.c.members.live():
                yield member.rank, self._kept_since

    def _unmarked(self) -> Iterator[tuple[int, float]]:
        """Workers whose mark for a cut is still to come: the others hold their pushes for it."""
        cut = self.c.cutting.cuts.current
        if cut is not None and cut.marks and cut.asked is not None and not cut.committing:
            for member in self.c.members.live():
                if member.rank not in cut.pins:
                    yield member.rank, cut.asked
