"""What happens to a worker's session, and what it wants done.

What is malformed is refused by `of` before it becomes an event. A driver carries the actions of one event out in their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from psjob.protocol.records import RecordId
from psjob.wire.frame import Header, Kind, WireError

# -- the script --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JoinAsked:
    """The script wants to enter the job."""


@dataclass(frozen=True)
class FirstValues:
    """Rank 0 has sent the run's first values to every shard; `record` is what it was made of."""

    record: bytes


@dataclass(frozen=True)
class Pulled:
    """All weights have come, of versions `lowest` to `highest`."""

    lowest: int
    highest: int


@dataclass(frozen=True)
class AtStepBoundary:
    """The script stands between two steps. `record` is None where `WorkerMachine.needs_record` says that none is needed.

    `settled`: every request was answered before that was asked; a mark or a stop waits for a step boundary at which that is so. `idle` are
    milliseconds, and how many IDLE_PARTS of them the script has waited.
    """

    record: bytes | None
    settled: bool = True
    idle: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class SnapshotToldLate:
    """A checkpoint is made of the boundary before step `clock`, which the script has passed. `record` and `idle` are those of then."""

    clock: int
    record: bytes
    idle: tuple[int, int]


@dataclass(frozen=True)
class InsideRound:
    """The script stands between two steps that push nothing."""


@dataclass(frozen=True)
class Through:
    """The script has come to its end; `record` is its last one."""

    record: bytes
    idle: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Said:
    """The script reports numbers (REPORT) or asks for a checkpoint (CHECKPOINT)."""

    kind: Kind
    body: Mapping[str, Any]


@dataclass(frozen=True)
class Tick:
    """Look at the time."""


# -- streams -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NotFound:
    """Nobody answered at a shard's name."""

    link: int


@dataclass(frozen=True)
class ShardStreamEnded:
    """A stream broke, or was closed. `broken_rule`: the shard said what no shard says."""

    link: int
    broken_rule: bool = False


@dataclass(frozen=True)
class Welcomed:
    """A shard has let this worker in. `complete` clocks of it are there whole, and of the next one the blocks in `opened`."""

    link: int
    attempt: int
    term: int
    serving: bool
    complete: int = 0
    opened: frozenset[int] = frozenset()
    init: bool = False
    """The shard waits for the run's first values."""
    restore_id: int = 0
    clock: int = 0
    record: bool = False
    """Of shard 0: a record follows, and the worker has joined once it is here."""
    residual: bool = True
    """The residual in that record was not sent yet. That of an older record was, by pushes that count."""

    @classmethod
    def of(cls, link: int, body: Mapping[str, Any]) -> Welcomed:
        """From a WELCOME. Raises WireError."""
        try:
            return cls(
                link, int(body["attempt"]), int(body["term"]), bool(body["serving"]), int(body["complete"]),
                frozenset(int(block) for block in body["open"]), bool(body.get("init")), int(body.get("restore_id", 0)),
                int(body.get("clock", 0)), bool(body.get("record")), bool(body.get("residual", True)),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"WELCOME of shard {link} is not in shape: {error!r}") from None


# -- frames ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardWaits:
    """A shard holds an answer, or does not serve yet; the text says why."""

    link: int
    text: str

    @classmethod
    def of(cls, link: int, body: Mapping[str, Any]) -> ShardWaits:
        """From a WAITING."""
        if "workers" in body:
            more = f" and {body['more']} more" if body.get("more") else ""
            # A mode that leaves gradients out has nobody to name when all are here: the shards agree first.
            what = f"for workers {body['workers']}{more}" if body["workers"] else "until all shards can choose which gradients count"
            return cls(link, f"shard {link} waits {what} ({body.get('for')}, {body.get('seconds')} s)")
        return cls(link, str(body.get("reason") or f"shard {link} is {body.get('state', 'not ready')}"))


@dataclass(frozen=True)
class RecordReturned:
    """The coordinator gives a record back; `clock` -1: what rank 0 gave when the run began."""

    clock: int
    record: bytes


@dataclass(frozen=True)
class RecordHas:
    """The coordinator's process has the first `count` bytes of a record."""

    record: RecordId
    count: int


@dataclass(frozen=True)
class SnapshotTold:
    """An answer of shard 0 tells of a snapshot before step `clock`. `stores`: this worker gives the shards its weights there."""

    clock: int
    stores: bool


@dataclass(frozen=True)
class MarkWanted:
    """The worker is to mark its next step boundary for a snapshot."""

    snapshot: int


@dataclass(frozen=True)
class Released:
    """A shard has copied what a snapshot needs, or the snapshot is void."""

    link: int
    snapshot: int


@dataclass(frozen=True)
class StopSet:
    """All workers stop before step `clock`."""

    clock: int


@dataclass(frozen=True)
class Rewound:
    """All begin again, in `mode` where one is named."""

    mode: str


@dataclass(frozen=True)
class TurnOver:
    """The job is complete (finished), holds this worker's end (left), or has stopped (stopped)."""

    how: str


@dataclass(frozen=True)
class WorkerRefused:
    """A shard will not have this worker: `code` is refused or fenced."""

    code: str
    why: str


Event = (
    JoinAsked | FirstValues | Pulled | AtStepBoundary | SnapshotToldLate | InsideRound | Through | Said | Tick
    | NotFound | ShardStreamEnded | Welcomed
    | ShardWaits | RecordReturned | RecordHas | SnapshotTold | MarkWanted | Released | StopSet | Rewound | TurnOver | WorkerRefused
)  # fmt: skip


# -- what it wants done ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Log:
    """A line for the log; `level` is one of `logging`'s names."""

    level: str
    text: str


@dataclass(frozen=True)
class DialShard:
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
class StoreWeights:
    """Give a shard the weights of the clock in hand, which the worker has made by steps of its own."""

    link: int


Action = Log | DialShard | Send | SendRecord | SendPieces | SendHyperparameters | Resend | AskRows | StoreWeights
