"""Who the workers are, where each one stands, and from which record it could continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from psjob.protocol.coordinator.events import StreamFacts, WorkerFacts

KEPT_RECORDS = 2
"""A worker's open clock and the one before: all that it can be placed at. A snapshot in flight keeps one more; a decided mode keeps
those from the decided clock on, which are as many as a worker may be ahead of its decisions."""


MOST_KEPT = 256 << 20
"""Bytes of a worker's records in a decided mode: with more, of those between its oldest and its two newest the newest go."""


class State(Enum):
    """What a rank is doing."""

    ABSENT = "absent"
    JOINED = "joined"
    LEFT = "left"
    LOST = "lost"


@dataclass
class Member:
    """A rank. `records` holds the newest resume records by the clock they belong to."""

    rank: int
    state: State = State.ABSENT
    incarnation: tuple[int, int] = (0, 0)
    clock: int = 0
    left_at: int | None = None
    idle: float | None = None
    """The part of its time in which its script has waited, as it last told; None: not known."""
    passes_again: int = 0
    """Passes over its data that its scripts have run through again."""
    records: dict[int, bytes] = field(default_factory=dict)
    stream: StreamFacts | None = None
    """The newest one that it said hello on."""
    here: bool = False
    """Is that stream there?"""
    welcomed: bool = False
    """Was its process let in on that stream?"""
    joined_in: int = -1
    """How often shard 0 was restored before that; -1: it was not let in yet."""

    def keep(self, clock: int, record: bytes, pinned: int | None, since: int | None = None, under_way: int = 0) -> None:
        """Remember the record of `clock`; older ones go, but the one of the snapshot in flight, and those from `since` on.

        `under_way`: pushes that the worker may have made and that no shard has, in a mode with a delay.
        """
        self.records[clock] = record
        self.clock = max(self.clock, clock)
        for old in sorted(self.records)[: -KEPT_RECORDS - under_way]:
            if old != pinned and (since is None or old < since):
                del self.records[old]
        size = sum(map(len, self.records.values()))
        for later in sorted(self.records)[-KEPT_RECORDS - 1 : 0 : -1]:  # decisions come in order of clocks: the oldest are needed first
            if size > MOST_KEPT and later != pinned:
                size -= len(self.records.pop(later))

    def newest(self, clock: int) -> int | None:
        """The clock of the newest record that is not beyond `clock`."""
        return max((known for known in self.records if known <= clock), default=None)


class Members:
    """All ranks of a job. States change through its methods, which count."""

    def __init__(self, workers: int) -> None:
        self.all = {rank: Member(rank) for rank in range(workers)}
        self.alive = workers
        """Ranks that have not left."""
        self.missing = set(self.all)
        """Ranks that have not left and have no stream."""
        self._by_stream: dict[int, Member] = {}

    def __getitem__(self, rank: int) -> Member:
        return self.all[rank]

    def live(self) -> list[Member]:
        """Ranks that have not left. Looks at all: ask `alive` for their number."""
        return [m for m in self.all.values() if m.state is not State.LEFT]

    def of(self, stream: int) -> Member | None:
        """Whose newest stream that is."""
        return self._by_stream.get(stream)

    def came(self, stream: StreamFacts) -> Member:
        """A process says hello on a new stream, which takes the place of the one before."""
        member = self.all[stream.rank]
        if member.stream is not None:
            self._by_stream.pop(member.stream.id, None)
        member.incarnation, member.stream, member.here = stream.incarnation, stream, True
        member.welcomed, member.joined_in = False, -1
        self._by_stream[stream.id] = member
        if member.state in (State.ABSENT, State.LOST):
            member.state = State.JOINED
        self.missing.discard(member.rank)
        return member

    def ended(self, stream: int) -> Member | None:
        """A stream is gone; returns whose it was, None where that rank has another one."""
        member = self._by_stream.pop(stream, None)
        if member is not None:
            member.here = False
            if member.state is not State.LEFT:
                self.missing.add(member.rank)
        return member

    def left(self, rank: int, clock: int) -> None:
        """A worker is through."""
        member = self.all[rank]
        self.alive -= member.state is not State.LEFT
        member.state, member.left_at, member.clock = State.LEFT, clock, max(member.clock, clock)
        self.missing.discard(rank)

    def newest_start(self) -> int:
        """The highest start of those that are here; 0 of nobody. Looks at all."""
        return max((m.incarnation[0] for m in self.all.values() if m.here), default=0)

    def finished(self, policy: str) -> bool:
        """Is the success policy met by those who left?"""
        if policy == "FirstWorker":
            return self.all[0].state is State.LEFT
        return not self.alive

    def missing_records(self, step: int | None, pins: Mapping[int, int]) -> set[int]:
        """Live ranks whose record for a snapshot has not come: of `step`, or (None) of the clock each one marked or stands at."""
        return {m.rank for m in self.live() if (pins.get(m.rank, m.clock) if step is None else step) not in m.records}

    def rewound(self, saved: Sequence[WorkerFacts], records: Mapping[int, bytes]) -> None:
        """Everyone is back at a checkpoint: its clocks, its leavers, its records; incarnations only rise."""
        for rank, member in self.all.items():
            entry = saved[rank]
            member.clock, member.left_at = entry.clock, entry.left
            member.state = State.LEFT if entry.left is not None else (State.LOST if member.state is State.LEFT else member.state)
            member.incarnation = max(member.incarnation, (entry.start, entry.rewinds))
            at = entry.clock if entry.record is None else entry.record
            member.records = {at: records[rank]} if rank in records else {}
        self.alive = len(self.live())
        self.missing = {m.rank for m in self.live() if not m.here}

    def took_up(self, workers: Sequence[WorkerFacts]) -> None:
        """Another process of shard 0 continues. Who speaks for a rank, how far it is and whether it has left: the shard's memory says it.

        Each that has not left hands in its newest record when it comes.
        """
        for member, entry in zip(self.all.values(), workers, strict=True):
            member.clock, member.left_at = entry.clock, entry.left
            member.incarnation = max(member.incarnation, (entry.start, entry.rewinds))
            if entry.left is not None:
                member.state = State.LEFT
        self.alive = len(self.live())
        self.missing = {m.rank for m in self.live() if not m.here}

    def fences(self, waiting: Set[int] = frozenset()) -> dict[int, tuple[int, int]]:
        """Lowest incarnations that may speak after all now known have rewound; those `waiting` to be placed come as they are."""
        return {m.rank: (m.incarnation[0], m.incarnation[1] + (m.rank not in waiting)) for m in self.all.values() if m.incarnation > (0, 0)}

    def met(self) -> str:
        """The ranks whose processes have said hello, by their newest start: `1:0-2,5 2:3-4`."""
        starts: dict[int, list[list[int]]] = {}
        for rank, member in sorted(self.all.items()):
            spans = starts.setdefault(member.incarnation[0], [])
            if spans and spans[-1][1] == rank - 1:
                spans[-1][1] = rank
            else:
                spans.append([rank, rank])
        texts = {start: ",".join(f"{low}-{high}" if low < high else f"{low}" for low, high in spans) for start, spans in starts.items()}
        return " ".join(f"{start}:{texts[start]}" for start in sorted(texts) if start)

    def status(self) -> list[dict[str, Any]]:
        """For the status port."""
        return [
            {"rank": m.rank, "clock": m.clock, "state": m.state.value, "start": m.incarnation[0], "rewinds": m.incarnation[1]}
            | {"idle": m.idle, "here": m.here, "passesAgain": m.passes_again}
            for m in self.all.values()
        ]
