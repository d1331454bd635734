"""What the coordinator orders a shard to do, as values, and the codec between them and JSON bodies.

The coordinator makes orders, and `encode_order` gives the body that goes to the shard. There `decode_order` makes the same value of it, or
refuses what is not in shape. Fields are written in their order and under their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
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
    table: tuple[TensorSpec, ...]
    rule: str
    view: int
    mode: str
    tables: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Restore:
    """Read this shard's part of a manifest."""

    view: int
    recovery: int
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
    clocks: Clocks | None = None
    """In a decided mode: how many pushes of each worker the blocks hold."""
    left: Clocks = field(default_factory=dict)
    """Workers that have left, whose own word may still be on its way."""


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


def encode_order(order: Order) -> Mapping[str, Any]:
    """The body of an order, in JSON's types."""
    if isinstance(order, Decide | Clip):
        return order.body
    body: dict[str, Any] = {"do": _WORDS[type(order)]}
    for each in fields(order):
        value = getattr(order, each.name)
        if each.name != "clocks":
            body[each.name] = _plain(value)
        elif value is not None:
            body["clocks"] = sorted(value.items())
    return body


def _plain(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        return value.to_json()
    if isinstance(value, tuple):
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
    return SetUp(_count(body["setup"]), table, str(body["rule"]), _view(body), _mode(body["mode"]), tables)


def _row(row: Mapping[str, Any]) -> TensorSpec:
    stages = tuple(map(_count, row.get("stages", ())))
    return TensorSpec(str(row["name"]), tuple(map(_count, row["shape"])), str(row["dtype"]), _count(row["group"]), stages)


def _restore(body: Mapping[str, Any]) -> Order:
    fences = {int(rank): (_count(pair[0]), _count(pair[1])) for rank, pair in dict(body.get("fences") or {}).items()}
    return Restore(
        _view(body), _count(body["recovery"]), str(body["folder"]), str(body["manifest"]), _mode(body["mode"]),
        fences, _clocks(body.get("most") or {}),
    )  # fmt: skip


def _cut(body: Mapping[str, Any]) -> Order:
    pairs = body.get("clocks")
    clocks = None if pairs is None else {_count(rank): _count(clock) for rank, clock in pairs}
    step = int(body["step"])
    return TakeCut(_count(body["cut"]), step, bool(body["marks"]), _base(body), clocks, _clocks(body.get("left") or {}))


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


_WORDS: Final[dict[type, str]] = {
    Nothing: "nothing", SetUp: "setup", Restore: "restore", Bound: "bound", Open: "open", Adopt: "adopt", Prepare: "prepare",
    TakeCut: "cut", Void: "void", Where: "where", Finish: "finish", Stop: "stop", Fence: "fenced",
}  # fmt: skip
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
