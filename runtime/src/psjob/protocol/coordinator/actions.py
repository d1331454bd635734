"""What the coordinator wants done. A driver carries the actions of one event out in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from psjob.layout.blocks import Layout
from psjob.protocol import messages
from psjob.protocol.coordinator.events import WorkerFacts
from psjob.wire.frame import Kind


@dataclass(frozen=True)
class Log:
    """A line for the log; `level` is one of `logging`'s names."""

    level: str
    text: str


# -- to workers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tell:
    """A control frame to a worker."""

    stream: int
    kind: Kind
    body: Mapping[str, Any] | None = None
    clock: int = 0
    request: int = 0


@dataclass(frozen=True)
class HangUp:
    """Close a worker's stream once its messages have been sent."""

    stream: int


@dataclass(frozen=True)
class Welcome:
    """Let a worker in, and give it `record` (of `record_clock`; -1: the run's first values) where it is to put one back.

    `body` goes beside what shard 0 itself says of the worker. `acked` is the clock at which a fresh process continues (None: it knows its
    place). `init`: it is rank 0 and is to give the run's first values; it has not joined. A driver that cannot let it in says NotJoined.
    """

    stream: int
    body: Mapping[str, Any]
    acked: int | None = None
    init: bool = False
    record: bytes = b""
    record_clock: int = 0


@dataclass(frozen=True)
class Introduce:
    """Tell a worker of one that it shares micro-batches with: its rank, its start, and where it listens. The driver adds their key."""

    stream: int
    rank: int
    start: int
    host: str
    port: int


@dataclass(frozen=True)
class WishRecords:
    """In a decided mode: every answer of shard 0 asks for its worker's record, or none does."""

    on: bool


# -- to shards ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """An order to the shard at the end of `link`.

    `most_from_here`: its `most` is filled in when it is sent, with one more than the clocks that shard 0 has of each worker then.
    """

    link: int
    order: messages.Order
    most_from_here: bool = False

    @property
    def body(self) -> Mapping[str, Any]:
        """As it goes to the shard."""
        return messages.encode_order(self.order)

    def with_most(self, clocks: Callable[[], messages.Clocks]) -> Order:
        """The same with its `most` filled in, if that is wanted. `clocks` gives those that shard 0 has of each worker now."""
        if not self.most_from_here or not isinstance(self.order, messages.Restore | messages.Bound):
            return self
        return replace(self, order=replace(self.order, most={rank: clock + 1 for rank, clock in clocks().items()}))


# -- disk: each is answered by an event, first in, first out -----------------------------------------


@dataclass(frozen=True)
class ClaimTerm:
    """Answered by TermClaimed, TermUnclaimed or TermFenced."""

    term: int


@dataclass(frozen=True)
class LookForClaim:
    """Has anybody claimed a higher term? Answered by ClaimSeen or TermFenced."""

    term: int


@dataclass(frozen=True)
class ReadNewest:
    """Answered by NewestRead or TermFenced. `passed` are names of manifests that are not to be taken."""

    number: int
    term: int
    passed: frozenset[str] = frozenset()
    records: bool = False


@dataclass(frozen=True)
class CommitSnapshot:
    """Write the records, the buffers and the manifest of a snapshot. Answered by ManifestCommitted, ManifestUncommitted or TermFenced."""

    snapshot: int
    term: int
    step: int
    mode: str
    final: bool
    layout: Layout
    assignment: tuple[int, ...]
    rule: str
    tables: tuple[Mapping[str, Any], ...]
    workers: tuple[WorkerFacts, ...]
    parts: Mapping[int, Any]
    """By shard: the `content` of its SnapshotWritten."""
    records: Mapping[int, bytes] = field(default_factory=dict)
    """By rank."""
    initial: bytes = b""
    """What rank 0 gave at the beginning, where the manifest is to hold it."""
    buffers: tuple[bytes, ...] = ()
    """The records that have the model's buffers. What several have, the last one tells."""
    aliases: tuple[tuple[str, str], ...] = ()
    request: int | None = None
    """The checkpoint.request that it answers."""


@dataclass(frozen=True)
class SweepOrphans:
    """Delete what snapshots below number `before` have left and no manifest names. No answer."""

    term: int
    before: int


@dataclass(frozen=True)
class MeasureRoom:
    """Answered by RoomMeasured."""


@dataclass(frozen=True)
class ReadWish:
    """Answered by ModeWished."""


# -- this process ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leave:
    """End this process with `code`; `why` is said where its end is looked at, None where there is nothing to say."""

    code: int
    why: str | None = None


@dataclass(frozen=True)
class LeaveFenced:
    """End this process: term `term` is another's."""

    term: int
    why: str


Action = (
    Log | Tell | HangUp | Welcome | Introduce | WishRecords | Order
    | ClaimTerm | LookForClaim | ReadNewest | CommitSnapshot | SweepOrphans | MeasureRoom | ReadWish
    | Leave | LeaveFenced
)  # fmt: skip
