"""What a shard's machine wants done. Actions are carried out in order; results come back as events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from psjob.layout.blocks import TensorSpec
from psjob.protocol.messages import Clip, Clocks, Decide, Incarnation, ShardMessage


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
class Exit:
    """End this process with a status and, unless it is empty, a sentence. `fenced`: the term of who took its place."""

    code: int
    text: str = ""
    fenced: int | None = None


@dataclass(frozen=True)
class Dial:
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
class HangUp:
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
class SetMost:
    """These clocks may have been acknowledged before: it replaces what SetFences said of them."""

    most: Clocks


@dataclass(frozen=True)
class Serve:
    """Workers may push."""

    term: int
    restore_id: int


@dataclass(frozen=True)
class CarryOut:
    """Make the updates of a decided order; Misfit where it does not fit."""

    order: Decide


@dataclass(frozen=True)
class MakeClipped:
    """Make the update that waits for the norm of all blocks, with the factor of the order."""

    order: Clip


@dataclass(frozen=True)
class LookUp:
    """Say how far these workers are, then LookedUp."""

    ask: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class MakeReady:
    """Make memory ready for the next snapshot, then Prepared."""

    number: int
    base: int | None


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
class Hold:
    """Hold every block and table at `step` (-1: now): Armed or TooLate, and Held."""

    snapshot: int
    step: int
    base: int | None
    clocks: Clocks | None


@dataclass(frozen=True)
class Write:
    """Write what is held, then Wrote, Failed or GaveUp. It waits for disk work that was asked for before."""

    snapshot: int


@dataclass(frozen=True)
class GiveUp:
    """Nothing is held for a snapshot any more, and its writer stops."""

    snapshot: int


@dataclass(frozen=True)
class Discard:
    """Delete the files of a snapshot, after disk work that was asked for before; then Discarded."""

    snapshot: int


@dataclass(frozen=True)
class Release:
    """Workers that marked for a snapshot may continue."""

    snapshot: int


@dataclass(frozen=True)
class TellFinished:
    """Tell every worker that the run is over."""


Action = (
    Log | TellCoordinator | Exit | Dial | Hello | HangUp | TellArrivals | Reset | TakeTerm | AdoptMode | LayOut | DropSessions | Read
    | SetFences | SetMost | Serve | CarryOut | MakeClipped | LookUp | MakeReady | NoteLeft | AskRecords | Hold | Write | GiveUp | Discard
    | Release | TellFinished
)  # fmt: skip
