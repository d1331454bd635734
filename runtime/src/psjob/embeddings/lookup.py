"""A module that looks rows of one table up by id, wherever they are; what it pushes at a step is for its subclasses to say.

Which rows the next batch needs is learned from where this one's ids lay in its batch, and asked for before this step is through.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, Protocol

import torch

from psjob.layout import devices
from psjob.process.errors import refuse
from psjob.worker.rows import RowGrads, RowRequest

PART_BYTES: Final = 32 << 20
"""Of rows that are read to be written to a file: so much at a time."""


class Road(Protocol):
    """Where the rows are: on the shards of a job, or in this process."""

    steps: bool
    """Steps of the optimizer reach the rows."""

    def ask(self, table: int, ids: torch.Tensor, ahead: int = 0) -> RowRequest: ...

    def collect(self, asked: RowRequest) -> torch.Tensor: ...

    def fits(self, asked: RowRequest) -> bool:
        """Are these the rows that a forward pass needs now?"""
        ...

    def split(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, list[int]]: ...

    def ids(self, table: int) -> torch.Tensor:
        """The ids of all rows that are there, ascending."""
        ...

    def unwinding(self, call: Callable[[], None]) -> None:
        """Make a call that reads rows; an ending of the job that comes meanwhile leaves it before it is carried out."""
        ...


@dataclass(frozen=True)
class RowOptions:
    """What a table is beside its shape."""

    init: str = "normal"
    """How a row begins: normal (standard deviation `scale`), uniform (-scale to scale) or zeros. It follows from (seed, table, id)."""
    scale: float = 1.0
    seed: int | None = None
    """None: training.seed."""
    admit_after: int = 1
    """A row of open ids is kept from so many-th step that names it."""
    evict_after: int | None = None
    """It is dropped when so many steps did not name it."""
    optimizer: str | None = None
    """A rule of the rows' own: sgd, adagrad, rowwise_adagrad, adam or ftrl. None: they follow the attached optimizer."""

    @classmethod
    def of(cls, given: dict[str, Any]) -> tuple[RowOptions, dict[str, float | bool]]:
        """The options among a caller's keywords, and the rest: hyperparameters of the rows' own rule."""
        names = {field.name for field in fields(cls)}
        return cls(**{k: v for k, v in given.items() if k in names}), {k: v for k, v in given.items() if k not in names}


@dataclass(frozen=True)
class _Unique:
    """A batch's ids, each once and ascending, and for each of the batch's where it is among them."""

    source: torch.Tensor
    version: int
    ids: torch.Tensor
    inverse: torch.Tensor


class Lookup(torch.nn.Module, abc.ABC):
    """Rows of `dim` numbers, `num_rows` of them or, where that is None, one for any int64.

    `anchor` is its one parameter: it stands for the rows in the optimizer's group that they follow.
    """

    counts: ClassVar[bool] = False
    """What is pushed are counts, sets or distances, not gradients of an optimizer."""

    def __init__(
        self, num_rows: int | None, dim: int, options: RowOptions, hyperparameters: dict[str, float | bool], dtype: str, device: Any
    ) -> None:
        super().__init__()
        self.num_rows, self.dim, self.dtype = num_rows, dim, dtype
        self.options, self.hyperparameters = options, hyperparameters
        self.first: torch.Tensor | None = None
        """Values with which rows 0, 1, … begin, until a table has taken them."""
        self.anchor = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device=device))
        self._road: Road | None = None
        self._table = -1
        self._early: tuple[torch.Tensor, RowRequest] | None = None
        self._unique: _Unique | None = None
        self.given: torch.Tensor | None = None
        """The ids of the last forward pass that trained."""

    def bind(self, road: Road, table: int) -> None:
        """Take rows of table number `table` from `road`."""
        self._road, self._table = road, table
        self._early = None

    def prefetch(self, ids: torch.Tensor) -> None:
        """Ask early for the rows that are needed after the next `opt.step()`; what needs them then waits for nothing, or for less.

        In sync the shards hold the answer until that step is applied, so that no stale row comes. An earlier request that was not
        used yet stands, and this one is left out; the rows are then asked for when they are needed.
        """
        road = self._road
        if road is None or not road.steps or (self._early is not None and self._early[1].left):
            return
        unique = self._dedupe(ids).ids
        self._early = (unique, road.ask(self._table, unique, 1))

    def ids(self) -> torch.Tensor:
        """The ids of the rows that were made, ascending. Only of an attached module."""
        assert self._road is not None
        return self._road.ids(self._table)

    def unwinding(self, call: Callable[[], None]) -> None:
        """As of the road, of an attached module."""
        assert self._road is not None
        self._road.unwinding(call)

    def parts(self, ids: torch.Tensor | None) -> Iterator[torch.Tensor]:
        """The rows of `ids` (ascending; None: all of a table that knows their number) as they lie in the table, some MB at a time.

        A row that was not made has its first values. Only of an attached module.
        """
        road, count = self._road, self.num_rows if ids is None else len(ids)
        assert road is not None and count is not None
        most = max(1, PART_BYTES // (4 * self.dim))
        for begin in range(0, count, most):
            end = min(begin + most, count)
            asked = road.ask(self._table, torch.arange(begin, end, device="cpu") if ids is None else ids[begin:end])
            rows = road.collect(asked)
            if asked.order is not None:
                rows = torch.empty_like(rows).index_copy_(0, asked.order, rows)
            yield rows

    @abc.abstractmethod
    def gradients(self, scale: float) -> RowGrads | None:
        """What the step in hand pushes, gradients times `scale`; None where that is nothing."""

    def forget(self) -> None:
        """The step in hand has no effect: it was made before."""

    # -- for subclasses ------------------------------------------------------------------------

    def rows_of(self, ids: torch.Tensor) -> tuple[RowRequest, torch.Tensor]:
        """(the distinct rows of `ids`, where each of `ids`, flattened, stands among them). Raises IndexError for an id that is no row."""
        road = self._road if self._road is not None else self._alone()
        found = self._dedupe(ids)
        asked = self._fetch(road, found.ids)
        road.collect(asked)
        position = found.inverse
        if asked.order is not None:
            place = torch.empty_like(asked.order)
            place[asked.order] = torch.arange(len(place), device="cpu")
            position = place[position]
        return asked, position

    def flat(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids as a vector of int64 in this process's memory. Raises TypeError if they are no whole numbers."""
        if devices.capturing():
            refuse(devices.in_capture("a look-up of rows that lie on the shards", "leave what looks up rows outside of it"))
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise TypeError(f"ids of rows are whole numbers, got {ids.dtype}")
        return ids.detach().to("cpu", torch.int64).reshape(-1)

    def check(self, ids: torch.Tensor) -> None:
        """Raise IndexError if one of `ids`, which are in ascending order, is no row."""
        count = self.num_rows
        if count is not None and len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < count:
            raise IndexError(f"ids go from {int(ids[0])} to {int(ids[-1])}, there are {count} rows")

    @property
    def steps(self) -> bool:
        """Do steps of an attached optimizer reach the rows?"""
        return self._road is not None and self._road.steps

    # -- inside --------------------------------------------------------------------------------

    def _alone(self) -> Road:
        self._look_alone()
        assert self._road is not None
        return self._road

    @abc.abstractmethod
    def _look_alone(self) -> None:
        """Before attach: bind to rows of this process, which can be read and not trained."""

    def _dedupe(self, ids: torch.Tensor) -> _Unique:
        known = self._unique
        if known is not None and known.source is ids and known.version == ids._version:
            return known
        unique, inverse = torch.unique(self.flat(ids), return_inverse=True)
        self.check(unique)
        found = _Unique(ids, -1 if ids.is_inference() else ids._version, unique, inverse)
        self._unique = None if ids.is_inference() else found
        return found

    def _fetch(self, road: Road, unique: torch.Tensor) -> RowRequest:
        early, self._early = self._early, None
        if early is not None:
            if road.fits(early[1]) and torch.equal(early[0], unique):
                return early[1]
            if early[1].left:  # for a later step, or not needed: stay with it until it is answered
                self._early = early
        return road.ask(self._table, unique)


Path = tuple[Any, ...]


@dataclass(frozen=True)
class _Place:
    """Ids are the tensor at `path` of a batch, or this view of it."""

    path: Path
    whole: bool
    of: tuple[tuple[int, ...], tuple[int, ...]]
    """Shape and strides that the tensor at `path` must have, where the ids are a part of it."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Ahead:
    """Told of each batch before the script has it. `extract` gives [(module, ids), …] of a batch; without it places are learned."""

    def __init__(self, modules: Sequence[Lookup], extract: Callable[[Any], Any] | None) -> None:
        self._modules, self._extract = modules, extract
        self._batch: Any = None

    def handing(self, batch: Any, following: Any | None) -> None:
        """The script is about to get `batch`; `following` is the one after it (None: there is none)."""
        if not torch.is_grad_enabled() or following is None:
            self._batch = batch
            return
        if self._extract is not None:
            for module, ids in self._extract(following):
                module.prefetch(ids)
        elif self._batch is not None:
            for module in self._modules:
                ids = self._found(module, following)
                if ids is not None:
                    module.prefetch(ids)
        self._batch = batch

    def _found(self, module: Lookup, following: Any) -> torch.Tensor | None:
        """The ids that `module` will be given, if they lie where they lay in the batch before."""
        if not module.training or module.given is None:
            return None
        place = _place(module.given, self._batch)
        if place is None:
            return None
        tensor = following
        try:
            for step in place.path:
                tensor = tensor[step]
        except (LookupError, TypeError):
            return None
        if not isinstance(tensor, torch.Tensor):
            return None
        if place.whole:
            return tensor
        if (tuple(tensor.shape), tensor.stride()) != place.of:
            return None
        return tensor.as_strided(place.size, place.stride, tensor.storage_offset() + place.offset)


def _place(ids: torch.Tensor, batch: Any) -> _Place | None:
    for path, tensor in _tensors(batch, ()):
        if tensor is ids:
            return _Place(path, True, ((), ()), (), (), 0)
        if tensor.device == ids.device and tensor.dtype == ids.dtype and tensor.numel() and _storage(tensor) == _storage(ids):
            of = (tuple(tensor.shape), tensor.stride())
            return _Place(path, False, of, tuple(ids.shape), ids.stride(), int(ids.storage_offset() - tensor.storage_offset()))
    return None


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(batch: Any, path: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(batch, torch.Tensor):
        yield path, batch
    elif isinstance(batch, dict):
        for key, value in batch.items():
            yield from _tensors(value, (*path, key))
    elif isinstance(batch, (list, tuple)):
        for number, value in enumerate(batch):
            yield from _tensors(value, (*path, number))
