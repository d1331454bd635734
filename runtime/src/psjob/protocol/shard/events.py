"""What a shard's machine hears, which is orders of the coordinator and what becomes of its own actions; and what it wants done.

Actions are carried out in order; results come back as events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from psjob.layout.blocks import TensorSpec
from psjob.protocol.messages import (
    Bound,
    Clip,
    Clocks,
    Decide,
    Incarnation,
    MemoryReady,
    Order,
    Prepare,
    ShardMessage,
    ShardPosition,
    SnapshotVoided,
    SnapshotWritten,
    Where,
    WorkerPositions,
)


@dataclass(frozen=True)
class Begin:
    """The process serves from now on: a shard with a link dials the coordinator."""


@dataclass(frozen=True)
class RestartedFromKeeper:
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
class RunIsOver:
    """The run's folder holds a final manifest."""


@dataclass(frozen=True)
class Terminated:
    """This process was asked to end (SIGTERM)."""


Event = (
    Begin | RestartedFromKeeper | Tick | Ordered | Connected | Unreached | Lost | Misfit | AllInitialised | Marked | Left | MemoryReady
    | Armed | TooLate
    | Held | SnapshotWritten | Failed | GaveUp | SnapshotVoided | Placed | Unread | WorkerPositions | RunIsOver | Terminated
)  # fmt: skip
"""The machine passes an order on; its result is what the coordinator hears."""


# -- what it wants done ------------------------------------------------------------------------------


class Phase(Enum):
    """How far this shard is from serving."""

    BLANK = "blank"
    """No layout yet: a new run, or a shard that waits to hear what to restore."""
    INIT = "initialising"
    HELD = "restored"
    SERVING = "serving"


@dataclass(frozen=True)
class Log:
    """A line for the process's log."""

    level: Literal["debug", "info", "warning"]
    text: str


@dataclass(frozen=True)
class TellCoordinator:
    """Tell the coordinator. What cannot be sent is lost, as on a stream that breaks."""

    message: ShardMessage


@dataclass(frozen=True)
class ExitProcess:
    """End this process with a status and, unless it is empty, a sentence. `fenced`: the term of who took its place."""

    code: int
    text: str = ""
    fenced: int | None = None


@dataclass(frozen=True)
class DialCoordinator:
    """Open a stream to the coordinator after so many seconds; then Connected or Unreached."""

    after: float


@dataclass(frozen=True)
class Hello:
    """Say hello on a stream."""

    stream: int
    serving: bool
    term: int
    restore_id: int
    mode: str
    carried: int | None


@dataclass(frozen=True)
class CloseStream:
    """Close a stream."""

    stream: int


@dataclass(frozen=True)
class TellArrivals:
    """Tell the coordinator again what no order has named: in a decided mode every whole push, else the squares of the update that waits."""


@dataclass(frozen=True)
class Reset:
    """The shard is in `phase` and `term`; a stream from before restore `restored_by` may not push any more."""

    phase: Phase
    term: int
    restored_by: int


@dataclass(frozen=True)
class TakeTerm:
    """The shard's term is this one."""

    term: int


@dataclass(frozen=True)
class AdoptMode:
    """Serve in another mode; blocks are laid out anew."""

    mode: str


@dataclass(frozen=True)
class LayOut:
    """Empty blocks and tables of a new run; Initialised when each has its first values."""

    table: tuple[TensorSpec, ...]
    rule: str
    tables: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class DropSessions:
    """End every worker's stream; with `rewind` the workers begin again from the checkpoint."""

    rewind: bool


@dataclass(frozen=True)
class Read:
    """Read this shard's part of a manifest and put it in place, then Placed or Unread. An earlier reading is given up."""

    reading: int
    folder: str
    manifest: str


@dataclass(frozen=True)
class SetFences:
    """Processes of workers below these may not speak; `most` are the clocks that may have been acknowledged before."""

    fences: Mapping[int, Incarnation]
    most: Clocks


@dataclass(frozen=True)
class Serve:
    """Workers may push."""

    term: int
    restore_id: int


@dataclass(frozen=True)
class NoteLeft:
    """A worker has left at a clock, as the coordinator knows."""

    rank: int
    clock: int


@dataclass(frozen=True)
class AskRecords:
    """Answers of version `step` ask their worker for its resume record; -1: none does."""

    step: int


@dataclass(frozen=True)
class HoldBlocks:
    """Hold every block and table at `step` (-1: now): Armed or TooLate, and Held."""

    snapshot: int
    step: int
    base: int | None
    clocks: Clocks | None


@dataclass(frozen=True)
class Write:
    """Write what is held, then SnapshotWritten, Failed or GaveUp. It waits for disk work that was asked for before."""

    snapshot: int


@dataclass(frozen=True)
class GiveUp:
    """Nothing is held for a snapshot any more, and its writer stops."""

    snapshot: int


@dataclass(frozen=True)
class Discard:
    """Delete the files of a snapshot, after disk work that was asked for before; then SnapshotVoided."""

    snapshot: int


@dataclass(frozen=True)
class Release:
    """Workers that marked for a snapshot may continue."""

    snapshot: int


@dataclass(frozen=True)
class TellFinished:
    """Tell every worker that the run is over."""


Action = (
    Log | TellCoordinator | ExitProcess | DialCoordinator | Hello | CloseStream | TellArrivals | Reset | TakeTerm | AdoptMode | LayOut
    | DropSessions | Read
    | SetFences | Bound | Serve | Decide | Clip | Where | Prepare | NoteLeft | AskRecords | HoldBlocks | Write | GiveUp | Discard | Release
    | TellFinished
)  # fmt: skip
"""Of the coordinator's orders these are carried out as they are: Bound; Decide, with Misfit where it does not fit; Clip; Where, with
WorkerPositions; Prepare, with MemoryReady."""
