"""What a shard's machine hears: orders of the coordinator, and what becomes of its own actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from psjob.protocol.messages import Order, ShardPosition, SnapshotWritten


@dataclass(frozen=True)
class Begin:
    """The process serves from now on: a shard with a link dials the coordinator."""


@dataclass(frozen=True)
class TookUp:
    """Before Begin: this process continues from the memory of one of the same attempt, which served. `left`: ranks that have left."""

    term: int
    restore_id: int
    restored_by: int
    mode: str
    left: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Tick:
    """At least each 250 ms, once every event before it was handled. Bytes `done` of `total` of the transfer that is under way."""

    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class Ordered:
    """The coordinator ordered something, by stream `stream` (None: in this process)."""

    order: Order
    stream: int | None = None


@dataclass(frozen=True)
class Connected:
    """A stream to the coordinator is open. `carried` is the last decided order that was carried out by now (None: one broke off)."""

    stream: int
    carried: int | None = 0


@dataclass(frozen=True)
class Unreached:
    """A dial came to no stream."""


@dataclass(frozen=True)
class Lost:
    """The stream to the coordinator ended."""

    stream: int
    why: str = ""


@dataclass(frozen=True)
class Misfit:
    """A decided order does not fit the blocks."""

    why: str


@dataclass(frozen=True)
class AllInitialised:
    """Every block and table of this set-up has its first values."""


@dataclass(frozen=True)
class Marked:
    """A worker stands at its step boundary and holds its pushes for `snapshot`."""

    rank: int
    snapshot: int


@dataclass(frozen=True)
class Left:
    """A worker has left."""

    rank: int


@dataclass(frozen=True)
class Prepared:
    """Memory for the snapshot after `number` is ready."""

    number: int


@dataclass(frozen=True)
class Armed:
    """Every block and table knows at which step it is to be held."""

    snapshot: int


@dataclass(frozen=True)
class TooLate:
    """A block was beyond the step already; nothing is armed any more."""

    snapshot: int
    furthest: int


@dataclass(frozen=True)
class Held:
    """Every block and table is held."""

    snapshot: int


@dataclass(frozen=True)
class Wrote:
    """The files of a snapshot are durable."""

    written: SnapshotWritten

    @property
    def snapshot(self) -> int:
        """The snapshot's number."""
        return self.written.snapshot


@dataclass(frozen=True)
class Failed:
    """The files of a snapshot could not be written, and are deleted. `full`: for want of room."""

    snapshot: int
    why: str
    full: bool = False


@dataclass(frozen=True)
class GaveUp:
    """The writer of a snapshot that was given up has stopped."""

    snapshot: int


@dataclass(frozen=True)
class Discarded:
    """Nothing of a snapshot is left on this shard's disk."""

    snapshot: int


@dataclass(frozen=True)
class Placed:
    """What `Read` asked for is in its place. `complete` are clocks by rank, `left` the ranks that have left."""

    reading: int
    position: ShardPosition
    complete: tuple[int, ...]
    left: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Unread:
    """What `Read` asked for could not be read. `damaged`: a file is not what was written, so that no retry can help."""

    reading: int
    why: str
    damaged: bool = False


@dataclass(frozen=True)
class LookedUp:
    """The answer to `LookUp`: by rank, complete clocks and blocks of the open clock."""

    ask: int
    position: ShardPosition
    rows: Mapping[int, tuple[int, int]]


@dataclass(frozen=True)
class RunIsOver:
    """The run's folder holds a final manifest."""


@dataclass(frozen=True)
class Terminated:
    """This process was asked to end (SIGTERM)."""


Event = (
    Begin | TookUp | Tick | Ordered | Connected | Unreached | Lost | Misfit | AllInitialised | Marked | Left | Prepared | Armed | TooLate
    | Held | Wrote | Failed | GaveUp | Discarded | Placed | Unread | LookedUp | RunIsOver | Terminated
)  # fmt: skip
