"""Who the workers are, where each one stands, and from which record it could go on. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

KEPT_RECORDS = 4


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
    records: dict[int, bytes] = field(default_factory=dict)

    def keep(self, clock: int, record: bytes, pinned: int | None, since: int | None = None) -> None:
        """Remember the record of `clock`; older ones go, but the one of the cut in flight, and those from `since` on."""
        self.records[clock] = record
        self.clock = max(self.clock, clock)
        for old in sorted(self.records)[:-KEPT_RECORDS]:
            if old != pinned and (since is None or old < since):
                del self.records[old]

    def newest(self, clock: int) -> bytes | None:
        """The record of `clock`, or the newest before it."""
        return self.records.get(max((known for known in self.records if known <= clock), default=-1))


class Members:
    """All ranks of a job."""

    def __init__(self, workers: int) -> None:
        self.all = {rank: Member(rank) for rank in range(workers)}

    def __getitem__(self, rank: int) -> Member:
        return self.all[rank]

    def live(self) -> list[Member]:
        """Ranks that have not left."""
        return [m for m in self.all.values() if m.state is not State.LEFT]

    def left(self, rank: int, clock: int) -> None:
        member = self.all[rank]
        member.state, member.left_at, member.clock = State.LEFT, clock, max(member.clock, clock)

    def finished(self, policy: str) -> bool:
        """Is the success policy met by those who left?"""
        if policy == "FirstWorker":
            return self.all[0].state is State.LEFT
        return not self.live()

    def missing_records(self, step: int | None, pins: Mapping[int, int]) -> list[int]:
        """Live ranks whose record for a cut has not come: of `step`, or (None) of the clock each one marked or stands at."""
        return [m.rank for m in self.live() if (pins.get(m.rank, m.clock) if step is None else step) not in m.records]

    def rewound(self, step: int, saved: Mapping[str, Any], records: Mapping[int, bytes]) -> None:
        """Everyone is back at a manifest: its clocks, its leavers, its records; incarnations only rise."""
        for rank, member in self.all.items():
            entry = saved.get(str(rank), {})
            left = entry.get("leftAt")
            member.clock = int(entry.get("clock", step))
            member.left_at = None if left is None else int(left)
            member.state = State.LEFT if left is not None else (State.LOST if member.state is State.LEFT else member.state)
            member.incarnation = max(member.incarnation, (int(entry.get("start", 0)), int(entry.get("rewinds", 0))))
            member.records = {member.clock: records[rank]} if rank in records else {}

    def fences(self, waiting: Set[int] = frozenset()) -> dict[int, list[int]]:
        """Lowest incarnations that may speak after all now known have rewound; those `waiting` to be placed come as they are."""
        return {m.rank: [m.incarnation[0], m.incarnation[1] + (m.rank not in waiting)] for m in self.all.values() if m.incarnation > (0, 0)}

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
        return [
            {"rank": m.rank, "clock": m.clock, "state": m.state.value, "start": m.incarnation[0], "rewinds": m.incarnation[1]}
            | {"idle": m.idle}
            for m in self.all.values()
        ]
