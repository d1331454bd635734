"""What the coordinator and the shards say to each other, as values, and the codec between them and JSON bodies.

The coordinator makes orders, and `encode_order` gives the body that goes to the shard. There `decode_order` makes the same value of it, or
refuses what is not in shape. A shard's messages go the other way by `encode_message` and `decode_message`. Their `shard` is who says it:
the body does not have it, because the stream tells it. Fields are written in their order and under their names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

from psjob.contract import MOST_NUMBER
from psjob.layout.blocks import TensorSpec
from psjob.wire.frame import WireError

MAX_WORD: Final = 64
MOST: Final = 1 << 63
MAX_SENTENCE: Final = 2000
Clocks = Mapping[int, int]
"""Clocks by rank."""
Incarnation = tuple[int, int]
"""Start and rewinds of a worker's process."""
Key = tuple[int, int]
"""Worker and clock of a push."""


@dataclass(frozen=True)
class Nothing:
    """The coordinator is alive."""


@dataclass(frozen=True)
class SetUp:
    """Lay out empty blocks for a new run. `tables` are specs as JSON objects."""

    setup: int
    table: tuple[TensorSpec, ...]
    rule: str
    term: int
    mode: str
    tables: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Restore:
    """Read this shard's part of a manifest."""

    term: int
    restore_id: int
    folder: str
    manifest: str
    mode: str
    fences: Mapping[int, Incarnation] = field(default_factory=dict)
    """By rank, the lowest process that may speak from now on."""
    most: Clocks = field(default_factory=dict)
    """By rank, the clocks that this shard can have acknowledged before."""


@dataclass(frozen=True)
class Bound:
    """What the coordinator knows now of the clocks that a process of this shard can have acknowledged. See `Restore.most`."""

    most: Clocks


@dataclass(frozen=True)
class Open:
    """Serve workers."""

    term: int
    restore_id: int


@dataclass(frozen=True)
class Adopt:
    """Take a term; serve on."""

    term: int


@dataclass(frozen=True)
class Prepare:
    """Make memory ready for the snapshot that comes next. `base` is the snapshot that the newest manifest holds."""

    number: int
    base: int | None


@dataclass(frozen=True)
class TakeSnapshot:
    """Hold blocks at `step` (-1: as they stand, with `marks` once every live worker has marked) and write them."""

    snapshot: int
    step: int
    marks: bool
    base: int | None
    clocks: Clocks | None = None
    """In a decided mode: how many pushes of each worker the blocks hold."""
    left: Clocks = field(default_factory=dict)
    """Workers that have left, whose own word may still be on its way."""


@dataclass(frozen=True)
class Void:
    """Give a snapshot up and delete what was written of it."""

    snapshot: int


@dataclass(frozen=True)
class Decision:
    """One update, or none if nothing is kept. `staleness` is that of the oldest kept push, `weights` (None: the mean) theirs in order."""

    kept: Sequence[Key]
    dropped: Sequence[Key]
    weights: Sequence[float] | None
    staleness: int | None


@dataclass(frozen=True)
class Decide:
    """In a decided mode: make updates, the first of them after `version`, then answer who may `go`: by worker, how many clocks.

    `number` counts the orders of this kind since a restore, from 1.
    """

    number: int
    version: int
    batches: tuple[Decision, ...]
    go: Clocks


@dataclass(frozen=True)
class Clip:
    """Make the update `version` with its gradient times `factor`, which may be NaN."""

    restore_id: int
    version: int
    factor: float


@dataclass(frozen=True)
class Where:
    """Tell how far these workers are."""

    ask: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Finish:
    """The final manifest is committed."""


@dataclass(frozen=True)
class Stop:
    """Leave, to be started again."""


@dataclass(frozen=True)
class Fence:
    """A newer process of this shard is here, in `term`."""

    term: int


@dataclass(frozen=True)
class Unknown:
    """An order that this version does not know."""

    word: str


Order = (
    Nothing | SetUp | Restore | Bound | Open | Adopt | Prepare | TakeSnapshot | Void | Decide | Clip | Where | Finish | Stop | Fence
    | Unknown
)  # fmt: skip


def encode_order(order: Order) -> Mapping[str, Any]:
    """The body of an order, in JSON's types."""
    body: dict[str, Any] = {"do": _ORDERS[type(order)]}
    for each in fields(order):
        value = getattr(order, each.name)
        if each.name in ("clocks", "go"):
            if value is not None:
                body[each.name] = sorted(value.items())
        elif each.name == "factor":
            body["factor"] = None if math.isnan(value) else value
        else:
            body[each.name] = _plain(value)
    return body


def _plain(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        return value.to_json()
    if isinstance(value, Decision):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): _plain(one) for key, one in value.items()}
    return value


def decode_order(body: Mapping[str, Any]) -> Order:
    """The order that a body holds. Raises WireError, naming the order, where it is not in shape."""
    word = str(body.get("do"))[:40]
    reader = _READERS.get(word)
    if reader is None:
        return Unknown(word)
    try:
        return reader(body)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise WireError(f"the coordinator's order {word} is not in shape: {type(error).__name__}: {str(error)[:200]}") from None


def _setup(body: Mapping[str, Any]) -> Order:
    table = tuple(_row(row) for row in body["table"])
    tables = tuple(dict(spec) for spec in body.get("tables", ()))
    return SetUp(_count(body["setup"]), table, str(body["rule"]), _term(body), _mode(body["mode"]), tables)


def _row(row: Mapping[str, Any]) -> TensorSpec:
    stages = tuple(map(_count, row.get("stages", ())))
    return TensorSpec(str(row["name"]), tuple(map(_count, row["shape"])), str(row["dtype"]), _count(row["group"]), stages)


def _restore(body: Mapping[str, Any]) -> Order:
    fences = {int(rank): (_count(pair[0]), _count(pair[1])) for rank, pair in dict(body.get("fences") or {}).items()}
    return Restore(
        _term(body), _count(body["restore_id"]), str(body["folder"]), str(body["manifest"]), _mode(body["mode"]),
        fences, _clocks(body.get("most") or {}),
    )  # fmt: skip


def _snapshot(body: Mapping[str, Any]) -> Order:
    pairs = body.get("clocks")
    clocks = None if pairs is None else {_count(rank): _count(clock) for rank, clock in pairs}
    return TakeSnapshot(
        _count(body["snapshot"]), int(body["step"]), bool(body["marks"]), _base(body), clocks, _clocks(body.get("left") or {})
    )


def _decide(body: Mapping[str, Any]) -> Order:
    number, version = _count(body["number"]), _count(body["version"])
    return Decide(number, version, tuple(map(_decision, _list(body["batches"]))), dict(_pairs(body["go"])))


def _decision(batch: Mapping[str, Any]) -> Decision:
    kept, dropped, weights, staleness = _pairs(batch["kept"]), _pairs(batch["dropped"]), batch["weights"], batch["staleness"]
    return Decision(kept, dropped, None if weights is None else _list(weights), None if staleness is None else int(staleness))


def _clip(body: Mapping[str, Any]) -> Order:
    restore_id, version, factor = _count(body["restore_id"]), _count(body["version"]), body["factor"]
    if factor is not None and not 0 <= float(factor) <= 1:
        raise ValueError(f"factor {factor} is not between 0 and 1")
    return Clip(restore_id, version, math.nan if factor is None else float(factor))


_ORDERS: Final[dict[type, str]] = {
    Nothing: "nothing", SetUp: "setup", Restore: "restore", Bound: "bound", Open: "open", Adopt: "adopt", Prepare: "prepare",
    TakeSnapshot: "snapshot", Void: "void", Decide: "decide", Clip: "clip", Where: "where", Finish: "finish", Stop: "stop", Fence: "fenced",
}  # fmt: skip
_READERS: Final[dict[str, Callable[[Mapping[str, Any]], Order]]] = {
    "nothing": lambda body: Nothing(),
    "setup": _setup,
    "restore": _restore,
    "bound": lambda body: Bound(_clocks(body["most"])),
    "open": lambda body: Open(_term(body), _count(body["restore_id"])),
    "adopt": lambda body: Adopt(_term(body)),
    "prepare": lambda body: Prepare(_count(body["number"]), _base(body)),
    "snapshot": _snapshot,
    "void": lambda body: Void(_count(body["snapshot"])),
    "decide": _decide,
    "clip": _clip,
    "where": lambda body: Where(_count(body["ask"]), tuple(map(_count, _list(body["ranks"])))),
    "finish": lambda body: Finish(),
    "stop": lambda body: Stop(),
    "fenced": lambda body: Fence(_term(body)),
}


def _base(body: Mapping[str, Any]) -> int | None:
    return None if body.get("base") is None else int(body["base"])


def _mode(word: Any) -> str:
    """A mode's word as it is: one that a shard serves already need not be among those to which it can change."""
    if not isinstance(word, str) or len(word) > MAX_WORD:
        raise ValueError(f"{str(word)[:40]!r} is no mode")
    return word


def _clocks(found: Mapping[Any, Any]) -> Clocks:
    return {int(rank): _count(clock) for rank, clock in found.items()}


def _term(body: Mapping[str, Any]) -> int:
    term = _count(body["term"])
    if term > MOST_NUMBER:
        raise ValueError(f"term {term}, the largest is {MOST_NUMBER}")
    return term


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{str(value)[:40]!r} is not a whole number from 0")
    return value


def _list(value: Any) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{str(value)[:40]!r} is not a list")
    return value


def _pairs(value: Any) -> list[Key]:
    return [(_count(first), _count(second)) for first, second in map(_list, _list(value))]


# -- what a shard says -------------------------------------------------------------------------------


class Malformed(ValueError):
    """A message is not in shape; the text names what was read."""


@dataclass(frozen=True)
class ShardPosition:
    """Where a shard is: its lowest and highest version, blocks it owns, the lowest version that workers have stored there."""

    lo: int
    hi: int
    owned: int
    stored: int
    stages: tuple[tuple[int, int, int], ...] = ()
    """By stage of the model: lowest and highest version of its blocks there, and how many these are."""

    def of(self, stage: int | None) -> ShardPosition:
        """The same, with the blocks of one stage. Raises IndexError for a stage that it does not tell."""
        if stage is None:
            return self
        lo, hi, owned = self.stages[stage]
        return ShardPosition(lo, hi, owned, self.stored)


@dataclass(frozen=True)
class Initialised:
    """A shard has all first values of set-up `setup`."""

    shard: int
    setup: int


@dataclass(frozen=True)
class ShardRestored:
    """A shard has read what it was ordered to. `position` and `complete` (clocks by rank) are None where it does not tell them."""

    shard: int
    restore_id: int
    position: ShardPosition | None = None
    complete: tuple[int, ...] | None = None


@dataclass(frozen=True)
class AckedDoubted:
    """A worker says that a shard has acknowledged more of its clocks than the shard knows of."""

    shard: int


@dataclass(frozen=True)
class Unrestored:
    """A shard could not read a checkpoint. `damaged`: a file is not what was written, so no retry can help."""

    shard: int
    restore_id: int
    why: str
    damaged: bool


@dataclass(frozen=True)
class WorkerPositions:
    """The answer to `Where`: by rank that was asked for, its complete clocks and how many blocks of the next one are here."""

    shard: int
    ask: int
    position: ShardPosition
    rows: Mapping[int, tuple[int, int]]


@dataclass(frozen=True)
class MemoryReady:
    """A shard has memory for the copies of snapshots; `number` is the order's."""

    shard: int
    number: int


@dataclass(frozen=True)
class SnapshotReady:
    """A shard knows of the snapshot: marks for it are kept from here on."""

    shard: int
    snapshot: int


@dataclass(frozen=True)
class SnapshotLate:
    """A shard is beyond the snapshot's step, or still writes the snapshot before."""

    shard: int
    snapshot: int
    why: str


@dataclass(frozen=True)
class SnapshotHeld:
    """Every block and table of a shard is held for the snapshot; workers that marked were released."""

    shard: int
    snapshot: int


@dataclass(frozen=True)
class SnapshotWritten:
    """A shard's part of a snapshot is on disk.

    `content` is what the manifest says of it, for who commits. `furthest` is the highest version in it, `complete` the clocks of
    workers by rank, `left` the clocks from which on workers have left.
    """

    shard: int
    snapshot: int
    content: Any
    furthest: int
    complete: tuple[int, ...]
    left: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SnapshotUnwritten:
    """A shard could not write its part and has deleted it. `full`: the volume has no room."""

    shard: int
    snapshot: int
    why: str
    full: bool


@dataclass(frozen=True)
class SnapshotVoided:
    """Nothing of a void snapshot is left on a shard's disk."""

    shard: int
    snapshot: int


@dataclass(frozen=True)
class BytesMoved:
    """A shard has written, or read, `done` of `total` bytes of snapshot or restore `number`."""

    shard: int
    doing: Literal["writing", "reading"]
    number: int
    done: int
    total: int


@dataclass(frozen=True)
class PushArrived:
    """In a decided mode: a shard has a worker's whole push, computed on version `base` at least (None: not known)."""

    shard: int
    restore_id: int
    worker: int
    clock: int
    base: int | None
    carried: int


@dataclass(frozen=True)
class NormMeasured:
    """A shard has the mean gradient of all its blocks, holds the update and tells the sum of its squares (inf and NaN too).

    `limit` is the largest norm that the gradient of all shards may have.
    """

    shard: int
    restore_id: int
    version: int
    squares: float
    limit: float


@dataclass(frozen=True)
class WorkersAwaited:
    """Answers of a shard wait for a push of these workers, so many seconds already. `clocks`: complete clocks by rank, of only shard 0."""

    shard: int
    seconds: Mapping[int, float]
    clocks: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Terminating:
    """A shard's process was asked to end (SIGTERM): its pod goes, and with it the job as it is."""

    shard: int


ShardMessage = (
    Terminating | Initialised | ShardRestored | Unrestored | AckedDoubted | WorkerPositions | MemoryReady | SnapshotReady | SnapshotLate
    | SnapshotHeld | SnapshotWritten | SnapshotUnwritten | SnapshotVoided | BytesMoved | PushArrived | NormMeasured | WorkersAwaited
)  # fmt: skip


def encode_message(message: ShardMessage) -> dict[str, Any]:
    """The body of a shard's message, in JSON's types."""
    body: dict[str, Any] = {"did": _MESSAGES[type(message)]}
    match message:
        case ShardRestored(_, restore_id, position, complete):
            body |= {"restore_id": restore_id} | ({} if position is None else {**_spans(position), "complete": _plain(complete)})
        case WorkerPositions(_, ask, position, rows):
            body |= {"ask": ask, **_spans(position), "rows": [[rank, *row] for rank, row in rows.items()]}
        case SnapshotWritten(_, snapshot, content, _, complete, left):
            body |= {"snapshot": snapshot, **content, "table": {**content["table"], "complete": _plain(complete), "left": _plain(left)}}
        case BytesMoved(_, doing, number, done, total):
            body |= {"doing": doing, "snapshot" if doing == "writing" else "restore_id": number, "done": done, "total": total}
        case PushArrived(_, restore_id, worker, clock, base, carried):
            body |= {"restore_id": restore_id, "push": [worker, clock], "base": base, "carried": carried}
        case NormMeasured(_, restore_id, version, squares, limit):
            body |= {"restore_id": restore_id, "version": version, "limit": limit}
            body |= {"squares": squares if math.isfinite(squares) else None, "nan": math.isnan(squares)}
        case WorkersAwaited(_, seconds, clocks):
            body |= {"seconds": _plain(seconds)} | ({"clocks": _plain(clocks)} if clocks else {})
        case _:
            body |= {each.name: _plain(getattr(message, each.name)) for each in fields(message) if each.name != "shard"}
    return body


def _spans(position: ShardPosition) -> dict[str, Any]:
    body = {"lo": position.lo, "hi": position.hi, "owned": position.owned, "stored": position.stored}
    return body | ({"stages": _plain(position.stages)} if position.stages else {})


def decode_message(shard: int, body: Mapping[str, Any], workers: int, content: Callable[[Mapping[str, Any]], Any]) -> ShardMessage | None:
    """What a shard says; None for a word that this version does not know. `content` reads what a manifest says of a shard's part.

    Raises Malformed.
    """
    word = str(body.get("did"))
    read = _MESSAGE_READERS.get(word)
    if read is None:
        return None
    try:
        return read(shard, body, workers, content)
    except Malformed:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise Malformed(f"shard {shard}: {word[:40]} is not in shape: {type(error).__name__}: {str(error)[:200]}") from None


Content = Callable[[Mapping[str, Any]], Any]
Reader = Callable[[int, Mapping[str, Any], int, Content], ShardMessage]


def _restored(shard: int, body: Mapping[str, Any], workers: int, content: Content) -> ShardMessage:
    position, complete = (_position(body), _clocks_of(body["complete"], workers)) if "complete" in body else (None, None)
    return ShardRestored(shard, number_of(body, "restore_id"), position, complete)


def _positions(shard: int, body: Mapping[str, Any], workers: int, content: Content) -> ShardMessage:
    rows = {rank_of(row[0], workers): (whole(row[1], "complete"), whole(row[2], "open")) for row in body["rows"]}
    return WorkerPositions(shard, number_of(body, "ask"), _position(body), rows)


def _written(shard: int, body: Mapping[str, Any], workers: int, content: Content) -> ShardMessage:
    table = body["table"]
    left = {rank_of(int(rank), workers): whole(clock, "left") for rank, clock in table["left"].items()}
    complete = _clocks_of(table["complete"], workers)
    return SnapshotWritten(shard, number_of(body, "snapshot"), content(body), furthest_of(body), complete, left)


def furthest_of(content: Mapping[str, Any]) -> int:
    """The highest version in a shard's part of a snapshot. Raises Malformed."""
    versions = [whole(block["n"], "n") for block in content["blocks"]]
    versions += [whole(n, "versions") for n in (content["rows"]["versions"] if content.get("rows") is not None else ())]
    return max(versions, default=0)


def _moved(shard: int, body: Mapping[str, Any], workers: int, content: Content) -> ShardMessage:
    doing = body["doing"]
    if doing not in ("writing", "reading"):
        raise Malformed(f"shard {shard} reports progress of {str(doing)[:40]!r}, expected writing or reading")
    number = number_of(body, "snapshot" if doing == "writing" else "restore_id")
    return BytesMoved(shard, doing, number, number_of(body, "done"), number_of(body, "total"))


def _arrived(shard: int, body: Mapping[str, Any], workers: int, content: Content) -> ShardMessage:
    worker, clock = body["push"]
    base = None if body["base"] is None else whole(body["base"], "base")
    clock, carried = whole(clock, "clock"), whole(body["carried"], "carried")
    return PushArrived(shard, number_of(body, "restore_id"), rank_of(worker, workers), clock, base, carried)


def _measured(shard: int, body: Mapping[str, Any], workers: int, content: Content) -> ShardMessage:
    squares = float(body["squares"]) if body["squares"] is not None else math.nan if body["nan"] is True else math.inf
    limit = float(body["limit"])
    if squares < 0 or not 0 < limit < math.inf:
        raise Malformed(f"shard {shard} reports squares of {squares} with limit {limit}, expected 0 or more and a limit above 0")
    return NormMeasured(shard, number_of(body, "restore_id"), number_of(body, "version"), squares, limit)


def _awaited(shard: int, body: Mapping[str, Any], workers: int, content: Content) -> ShardMessage:
    seconds = {rank_of(int(rank), workers): float(told) for rank, told in body["seconds"].items()}
    return WorkersAwaited(shard, seconds, {rank_of(int(rank), workers): int(clock) for rank, clock in body.get("clocks", {}).items()})


_MESSAGES: Final[dict[type, str]] = {
    Initialised: "initialised", ShardRestored: "restored", Unrestored: "unrestored", AckedDoubted: "doubts", WorkerPositions: "where",
    MemoryReady: "prepared", SnapshotReady: "ready", SnapshotLate: "late", SnapshotHeld: "held", SnapshotWritten: "written",
    SnapshotUnwritten: "unwritten", SnapshotVoided: "voided", BytesMoved: "progress", PushArrived: "arrived", NormMeasured: "measured",
    WorkersAwaited: "awaited", Terminating: "stopping",
}  # fmt: skip
_OWN_READERS: Final[dict[type, Reader]] = {
    ShardRestored: _restored, WorkerPositions: _positions, SnapshotWritten: _written, BytesMoved: _moved, PushArrived: _arrived,
    NormMeasured: _measured, WorkersAwaited: _awaited,
}  # fmt: skip


def _reader_of(kind: type[ShardMessage]) -> Reader:
    """Most messages are numbers, sentences and marks, each under the name of its field."""
    if kind in _OWN_READERS:
        return _OWN_READERS[kind]
    named = [(each.name, _PLAIN_FIELDS[str(each.type)]) for each in fields(kind) if each.name != "shard"]
    return lambda shard, body, workers, content: kind(shard, *(read(body, name) for name, read in named))


def _position(body: Mapping[str, Any]) -> ShardPosition:
    stages = tuple((whole(lo, "lo"), whole(hi, "hi"), whole(owned, "owned")) for lo, hi, owned in body.get("stages", ()))
    return ShardPosition(number_of(body, "lo"), number_of(body, "hi"), number_of(body, "owned"), number_of(body, "stored"), stages)


def _clocks_of(told: Any, workers: int) -> tuple[int, ...]:
    """Clocks of all workers, by rank. Raises Malformed."""
    if not isinstance(told, list) or len(told) != workers:
        raise Malformed(f"steps of {workers} workers are {str(told)[:80]}, expected a list of one for each")
    return tuple(whole(clock, "complete") for clock in told)


def rank_of(value: Any, workers: int) -> int:
    """A worker's rank. Raises Malformed."""
    if not 0 <= whole(value, "rank") < workers:
        raise Malformed(f"worker {value} is not one of this job's {workers}")
    return int(value)


def number_of(body: Mapping[str, Any], key: str, low: int = 0, high: int = MOST) -> int:
    """The whole number of a field. Raises Malformed."""
    value = whole(body.get(key), key)
    if not low <= value <= high:
        raise Malformed(f"{key} is {value}, expected {low} to {high}")
    return value


def whole(value: Any, what: str) -> int:
    """A whole number from 0. Raises Malformed, which names it `what`."""
    if type(value) is not int or not 0 <= value <= MOST:
        raise Malformed(f"{what} is {str(value)[:40]!r}, expected a whole number from 0")
    return value


def _text(body: Mapping[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str):
        raise Malformed(f"{key} is {str(value)[:40]!r}, expected a sentence")
    return value[:MAX_SENTENCE]


_PLAIN_FIELDS: Final[dict[str, Callable[[Mapping[str, Any], str], Any]]] = {
    "int": number_of, "str": _text, "bool": lambda body, key: body.get(key) is True,
}  # fmt: skip
_MESSAGE_READERS: Final[dict[str, Reader]] = {word: _reader_of(kind) for kind, word in _MESSAGES.items()}
