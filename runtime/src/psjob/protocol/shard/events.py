"""What a shard's machine hears: the coordinator's orders, with the reader that makes them of JSON bodies, and events of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from psjob.contract import MOST_NUMBER
from psjob.layout.blocks import TensorSpec
from psjob.wire.frame import WireError

MAX_WORD: Final = 64
Clocks = Mapping[int, int]
"""Clocks by rank."""
Incarnation = tuple[int, int]
"""Start and rewinds of a worker's process."""


@dataclass(frozen=True)
class Nothing:
    """The coordinator is alive."""


@dataclass(frozen=True)
class SetUp:
    """Lay out empty blocks for a new run. `tables` are specs as JSON objects."""

    setup: int
    view: int
    mode: str
    rule: str
    table: tuple[TensorSpec, ...]
    tables: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Restore:
    """Read this shard's part of a manifest."""

    view: int
    recovery: int
    mode: str
    folder: str
    manifest: str
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

    view: int
    recovery: int


@dataclass(frozen=True)
class Adopt:
    """Take a view; serve on."""

    view: int


@dataclass(frozen=True)
class Prepare:
    """Make memory ready for the cut that comes next. `base` is the cut that the newest manifest holds."""

    number: int
    base: int | None


@dataclass(frozen=True)
class TakeCut:
    """Hold blocks at `step` (-1: as they stand, with `marks` once every live worker has marked) and write them."""

    cut: int
    step: int
    marks: bool
    base: int | None
    left: Clocks = field(default_factory=dict)
    """Workers that have left, whose own word may still be on its way."""
    clocks: Clocks | None = None
    """In a decided mode: how many pushes of each worker the blocks hold."""


@dataclass(frozen=True)
class Void:
    """Give a cut up and delete what was written of it."""

    cut: int


@dataclass(frozen=True)
class Committed:
    """The newest cut is in a manifest."""

    step: int


@dataclass(frozen=True)
class Decide:
    """In a decided mode: make updates. `body` is checked again where it is carried out, block by block."""

    body: Mapping[str, Any]


@dataclass(frozen=True)
class Clip:
    """Make the update `version` with its gradient times `factor` (None: NaN)."""

    body: Mapping[str, Any]


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
    """A newer process of this shard is here, in `view`."""

    view: int


@dataclass(frozen=True)
class Unknown:
    """An order that this version does not know."""

    word: str


Order = (
    Nothing | SetUp | Restore | Bound | Open | Adopt | Prepare | TakeCut | Void | Committed | Decide | Clip | Where | Finish | Stop | Fence
    | Unknown
)  # fmt: skip


def read_order(body: Mapping[str, Any]) -> Order:
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
    return SetUp(_count(body["setup"]), _view(body), _mode(body["mode"]), str(body["rule"]), table, tables)


def _row(row: Mapping[str, Any]) -> TensorSpec:
    stages = tuple(map(_count, row.get("stages", ())))
    return TensorSpec(str(row["name"]), tuple(map(_count, row["shape"])), str(row["dtype"]), _count(row["group"]), stages)


def _restore(body: Mapping[str, Any]) -> Order:
    fences = {int(rank): (_count(pair[0]), _count(pair[1])) for rank, pair in dict(body.get("fences") or {}).items()}
    return Restore(
        _view(body), _count(body["recovery"]), _mode(body["mode"]), str(body["folder"]), str(body["manifest"]),
        fences, _clocks(body.get("most") or {}),
    )  # fmt: skip


def _cut(body: Mapping[str, Any]) -> Order:
    pairs = body.get("clocks")
    clocks = None if pairs is None else {_count(rank): _count(clock) for rank, clock in pairs}
    step = int(body["step"])
    return TakeCut(_count(body["cut"]), step, bool(body["marks"]), _base(body), _clocks(body.get("left") or {}), clocks)


def _decide(body: Mapping[str, Any]) -> Order:
    _count(body["number"])
    _count(body["version"])
    for batch in _list(body["batches"]):
        for pair in (*_list(batch["kept"]), *_list(batch["dropped"])):
            _pair(pair)
        if batch["weights"] is not None:
            _list(batch["weights"])
        if batch["lag"] is not None:
            int(batch["lag"])
    for pair in _list(body["go"]):
        _pair(pair)
    return Decide(body)


def _clip(body: Mapping[str, Any]) -> Order:
    _count(body["recovery"])
    _count(body["version"])
    factor = body["factor"]
    if factor is not None and not 0 <= float(factor) <= 1:
        raise ValueError(f"factor {factor} is not between 0 and 1")
    return Clip(body)


def _where(body: Mapping[str, Any]) -> Order:
    return Where(_count(body["ask"]), tuple(_count(rank) for rank in _list(body["ranks"])))


_READERS: Final[dict[str, Callable[[Mapping[str, Any]], Order]]] = {
    "nothing": lambda body: Nothing(),
    "setup": _setup,
    "restore": _restore,
    "bound": lambda body: Bound(_clocks(body["most"])),
    "open": lambda body: Open(_view(body), _count(body["recovery"])),
    "adopt": lambda body: Adopt(_view(body)),
    "prepare": lambda body: Prepare(_count(body["number"]), _base(body)),
    "cut": _cut,
    "void": lambda body: Void(_count(body["cut"])),
    "committed": lambda body: Committed(int(body.get("step", 0))),
    "decide": _decide,
    "clip": _clip,
    "where": _where,
    "finish": lambda body: Finish(),
    "stop": lambda body: Stop(),
    "fenced": lambda body: Fence(_view(body)),
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


def _view(body: Mapping[str, Any]) -> int:
    view = _count(body["view"])
    if view > MOST_NUMBER:
        raise ValueError(f"view {view}, the largest is {MOST_NUMBER}")
    return view


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{str(value)[:40]!r} is not a whole number from 0")
    return value


def _list(value: Any) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{str(value)[:40]!r} is not a list")
    return value


def _pair(value: Any) -> None:
    first, second = _list(value)
    _count(first)
    _count(second)


@dataclass(frozen=True)
class Begin:
    """The process serves from now on: a shard with a link dials the coordinator."""


@dataclass(frozen=True)
class TookUp:
    """Before Begin: this process goes on from the memory of one of the same attempt, which served. `left`: ranks that have left."""

    view: int
    recovery: int
    generation: int
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
class Initialised:
    """Every block and table of this set-up has its first values."""


@dataclass(frozen=True)
class Marked:
    """A worker stands at its step edge and holds its pushes for `cut`."""

    rank: int
    cut: int


@dataclass(frozen=True)
class Left:
    """A worker has left."""

    rank: int


@dataclass(frozen=True)
class Prepared:
    """Memory for the cut after `number` is ready."""

    number: int


@dataclass(frozen=True)
class Armed:
    """Every block and table knows at which step it is to be held."""

    cut: int


@dataclass(frozen=True)
class TooLate:
    """A block was beyond the step already; nothing is armed any more."""

    cut: int
    furthest: int


@dataclass(frozen=True)
class Held:
    """Every block and table is held."""

    cut: int


@dataclass(frozen=True)
class Wrote:
    """The files of a cut are durable. `body` is what goes to the coordinator about them."""

    cut: int
    body: Mapping[str, Any]


@dataclass(frozen=True)
class Failed:
    """The files of a cut could not be written, and are deleted. `full`: for want of room."""

    cut: int
    why: str
    full: bool = False


@dataclass(frozen=True)
class GaveUp:
    """The writer of a cut that was given up has stopped."""

    cut: int


@dataclass(frozen=True)
class Discarded:
    """Nothing of a cut is left on this shard's disk."""

    cut: int


@dataclass(frozen=True)
class StageStanding:
    """How far the blocks are that one stage's workers push: lowest and highest version, and how many there are."""

    lo: int
    hi: int
    owned: int


@dataclass(frozen=True)
class Standing:
    """How far a shard's blocks are: lowest and highest version, blocks that it owns, lowest clock of weights that workers stored."""

    lo: int
    hi: int
    owned: int
    stored: int
    stages: tuple[StageStanding, ...] = ()
    """The same by stage, where the model has some."""


@dataclass(frozen=True)
class Placed:
    """What `Read` asked for is in its place. `complete` are clocks by rank, `left` the ranks that have left."""

    reading: int
    standing: Standing
    complete: Sequence[int]
    left: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Unread:
    """What `Read` asked for could not be read. `damaged`: a file is not what was written, so that no retry can help."""

    reading: int
    why: str
    damaged: bool = False


@dataclass(frozen=True)
class Stands:
    """The answer to `LookUp`: `rows` are (rank, complete clocks, blocks of the open clock)."""

    ask: int
    standing: Standing
    rows: Sequence[tuple[int, int, int]]


@dataclass(frozen=True)
class RunIsOver:
    """The run's folder holds a final manifest."""


@dataclass(frozen=True)
class Terminated:
    """This process was asked to end (SIGTERM)."""


Event = (
    Begin | TookUp | Tick | Ordered | Connected | Unreached | Lost | Misfit | Initialised | Marked | Left | Prepared | Armed | TooLate
    | Held | Wrote | Failed | GaveUp | Discarded | Placed | Unread | Stands | RunIsOver | Terminated
)  # fmt: skip
