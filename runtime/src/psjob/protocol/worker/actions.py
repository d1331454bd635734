"""What a worker's session wants done. A driver carries the actions of one event out in their order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from psjob.wire.frame import Header, Kind


@dataclass(frozen=True)
class Log:
    """A line for the log; `level` is one of `logging`'s names."""

    level: str
    text: str


@dataclass(frozen=True)
class Dial:
    """Look for a shard in so many seconds, and say hello to whom `newest` names; answered by NotFound, Welcomed or StreamEnded."""

    link: int
    seconds: float = 0.0


@dataclass(frozen=True)
class Send:
    """A control frame to a shard, if its stream is up."""

    link: int
    kind: Kind
    body: Mapping[str, Any] | None = None
    clock: int = 0
    request: int = 0


@dataclass(frozen=True)
class SendRecord:
    """A record of at most one piece to the coordinator; `idle` as in AtStepBoundary. `rides`: it may go with the next push."""

    clock: int
    record: bytes
    idle: tuple[int, int]
    rides: bool = False


@dataclass(frozen=True)
class SendPieces:
    """There are pieces of records to send: `WorkerMachine.next_piece` names them one by one."""


@dataclass(frozen=True)
class SendHyperparameters:
    """Tell a shard the hyperparameters that pushes name, before what follows."""

    link: int


@dataclass(frozen=True)
class Resend:
    """A request that was not answered goes out again: a push or pull of a block, a ROW_PUSH, or a LOOKUP without ids."""

    link: int
    header: Header


@dataclass(frozen=True)
class AskRows:
    """Ask a shard again for the rows that it owes."""

    link: int


@dataclass(frozen=True)
class Store:
    """Give a shard the weights of the clock in hand, which the worker has made by steps of its own."""

    link: int


Action = Log | Dial | Send | SendRecord | SendPieces | SendHyperparameters | Resend | AskRows | Store
