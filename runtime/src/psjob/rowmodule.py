"""What `Embedding` and `EmbeddingBag` share: rows fetched for a forward pass, their gradients kept until the step.

The rows are not a parameter. In their place stands the `anchor`, one number in the optimizer's group that these rows follow: its
gradient is the norm of the rows' gradient, so that clipping by norm, a GradScaler and `zero_grad` reach the rows too.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields
from typing import Any, Protocol, Self

import torch

from psjob.worker.rows import Asked, RowGrads


class Road(Protocol):
    """Where the rows are: on the shards of a job, or in this process."""

    steps: bool
    """Steps of the optimizer reach the rows."""

    def ask(self, table: int, ids: torch.Tensor, ahead: int = 0) -> Asked: ...

    def collect(self, asked: Asked) -> torch.Tensor: ...

    def fits(self, asked: Asked) -> bool:
        """Are these the rows that a forward pass needs now?"""
        ...

    def split(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, list[int]]: ...


@dataclass(frozen=True)
class Options:
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
    def of(cls, given: dict[str, Any]) -> tuple[Options, dict[str, float | bool]]:
        """The options among a caller's keywords, and the rest: numbers of the rows' own rule."""
        names = {field.name for field in fields(cls)}
        return cls(**{k: v for k, v in given.items() if k in names}), {k: v for k, v in given.items() if k not in names}


@dataclass
class _Landed:
    """Gradients since the last `zero_grad`; `norm` as the anchor was told."""

    ids: torch.Tensor
    grads: torch.Tensor
    counts: list[int]
    norm: torch.Tensor


@dataclass(frozen=True)
class _Unique:
    """A batch's ids, each once and ascending, and for each of the batch's where it is among them."""

    source: torch.Tensor
    version: int
    ids: torch.Tensor
    inverse: torch.Tensor


class RowModule(torch.nn.Module):
    """A table of rows of `embedding_dim` numbers; see `Embedding`. `table` are `Options`, and numbers of the rule that they name."""

    num_embeddings: int | None
    embedding_dim: int
    padding_idx: int | None

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: None = None,
        scale_grad_by_freq: bool = False,
        device: Any = None,
        **table: Any,
    ) -> None:
        super().__init__()
        if max_norm is not None:
            raise ValueError(
                "max_norm changes rows in the forward pass, which rows on shards cannot; use weight_decay, or normalise the output"
            )
        if num_embeddings is not None and padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ValueError(f"padding_idx is {padding_idx}, it must be within the {num_embeddings} rows")
            padding_idx %= num_embeddings
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.scale_grad_by_freq = scale_grad_by_freq
        self.options, self.numbers = Options.of(table)
        self.first: torch.Tensor | None = None
        """Values with which rows 0, 1, … begin, until a table has taken them."""
        self.anchor = torch.nn.Parameter(torch.zeros(1, device=device))
        self._road: Road | None = None
        self._table = -1
        self._landed: _Landed | None = None
        self._early: tuple[torch.Tensor, Asked] | None = None
        self._unique: _Unique | None = None
        self.given: torch.Tensor | None = None
        """The ids of the last forward pass that trained."""

    @classmethod
    def from_pretrained(cls, embeddings: torch.Tensor, freeze: bool = True, padding_idx: int | None = None, **options: Any) -> Self:
        """Rows that begin as those of `embeddings` (float32 [rows, dim]); `options` as in the constructor."""
        made = cls(embeddings.shape[0], embeddings.shape[1], padding_idx=padding_idx, **options)
        made.begin_with(embeddings)
        made.requires_grad_(not freeze)
        return made

    def bind(self, road: Road, table: int) -> None:
        """Take rows of table number `table` from `road`."""
        self._road, self._table = road, table
        self._landed = self._early = None

    def begin_with(self, values: torch.Tensor) -> None:
        """Rows 0, 1, … begin as `values` (float32 [rows, dim]), the padding row among them. Raises ValueError for another shape."""
        if values.dtype != torch.float32 or values.shape != (self.num_embeddings, self.embedding_dim):
            wanted = f"float32 of shape [{self.num_embeddings}, {self.embedding_dim}]"
            raise ValueError(f"first values of rows are {wanted}, got {values.dtype} of {tuple(values.shape)}")
        self.first = values.detach().to("cpu", copy=True).contiguous()
        self.padding_given = True

    def prefetch(self, ids: torch.Tensor) -> None:
        """Ask early for the rows of the forward pass that follows the next `opt.step()`; it then waits for nothing, or for less.

        In sync the shards hold the answer until that step is applied, so that no stale row comes. An earlier request that was not
        used yet stands, and this one is left out; the forward pass then asks by itself.
        """
        road = self._road
        if road is None or not road.steps or (self._early is not None and self._early[1].left):
            return
        unique = self._dedupe(ids).ids
        self._early = (unique, road.ask(self._table, unique, 1))

    def gradients(self, scale: float) -> RowGrads | None:
        """The rows' gradients since the last `zero_grad`, times `scale` and what the anchor's was multiplied by."""
        landed = self._current()
        if landed is None:
            return None
        scale *= self._factor(landed)
        grads = landed.grads if scale == 1.0 else landed.grads * scale
        return RowGrads(landed.ids, grads, landed.counts)

    def extra_repr(self) -> str:
        """As torch's."""
        words = ["open ids" if self.num_embeddings is None else str(self.num_embeddings), str(self.embedding_dim)]
        return ", ".join(words + ([] if self.padding_idx is None else [f"padding_idx={self.padding_idx}"]))

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                "the rows of a ps.Embedding live on the shards, so it has no `weight`; give first values by from_pretrained"
            )
        return super().__getattr__(name)

    # -- for the modules -----------------------------------------------------------------------

    def look(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """(where each of `ids` stands in the small matrix, in the shape of `ids`; the matrix; its padding row).

        Raises IndexError for an id that is no row, RuntimeError where nothing would update the rows.
        """
        road = self._road if self._road is not None else self._alone()
        found = self._dedupe(ids)
        asked = self._fetch(road, found.ids)
        rows = road.collect(asked)
        position = found.inverse
        if asked.order is not None:
            place = torch.empty_like(asked.order)
            place[asked.order] = torch.arange(len(place))
            position = place[position]
        padding = self._padding(asked, rows)
        rows = rows.to(self.anchor.device)
        if torch.is_grad_enabled() and self.anchor.requires_grad:
            if not road.steps:
                raise RuntimeError(
                    "rows of a ps.Embedding are updated by an attached optimizer: call ps.attach(model, opt) before training"
                )
            self.given = ids
            rows = rows.detach().requires_grad_()
            rows.register_post_accumulate_grad_hook(functools.partial(self._land, asked, padding))  # type: ignore[no-untyped-call]
        return position.view(ids.shape).to(rows.device), rows, padding

    # -- inside --------------------------------------------------------------------------------

    def _alone(self) -> Road:
        """Before attach: rows of this process, to look at only."""
        from psjob.inprocess import look_alone  # that module knows this one

        look_alone(self)
        assert self._road is not None
        return self._road

    def _dedupe(self, ids: torch.Tensor) -> _Unique:
        known = self._unique
        if known is not None and known.source is ids and known.version == ids._version:
            return known
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise TypeError(f"ids of rows are whole numbers, got {ids.dtype}")
        unique, inverse = torch.unique(ids.detach().to("cpu", torch.int64).reshape(-1), return_inverse=True)
        count = self.num_embeddings
        if count is not None and len(unique) and not 0 <= int(unique[0]) <= int(unique[-1]) < count:
            raise IndexError(f"ids go from {int(unique[0])} to {int(unique[-1])}, this embedding has {count} rows")
        found = _Unique(ids, -1 if ids.is_inference() else ids._version, unique, inverse)
        self._unique = None if ids.is_inference() else found
        return found

    def _fetch(self, road: Road, unique: torch.Tensor) -> Asked:
        early, self._early = self._early, None
        if early is not None:
            if road.fits(early[1]) and torch.equal(early[0], unique):
                return early[1]
            if early[1].left:  # for a later step, or not needed: stay with it until it is answered
                self._early = early
        return road.ask(self._table, unique)

    def _padding(self, asked: Asked, rows: torch.Tensor) -> int | None:
        """Where the padding row is in the small matrix; its values are zeros unless they were given."""
        if self.padding_idx is None:
            return None
        found = (asked.ids == self.padding_idx).nonzero().flatten().tolist()
        if not found:
            return None
        if not self.padding_given:
            rows[found[0]] = 0
        return int(found[0])

    padding_given = False
    """The padding row's values came with the first values of all rows."""

    def _land(self, asked: Asked, padding: int | None, rows: torch.Tensor) -> None:
        """A backward pass has made the gradient of `rows`."""
        assert rows.grad is not None
        grads, rows.grad = rows.grad.to("cpu"), None
        ids, counts = asked.ids, list(asked.counts)
        if padding is not None:
            keep = torch.arange(len(ids)) != padding
            ids, grads = ids[keep], grads[keep]
            counts[next(s for s in range(len(counts)) if sum(counts[: s + 1]) > padding)] -= 1
        before = self._current()
        if before is not None and before.ids is not ids:
            ids, grads, counts = self._added(before, ids, grads)
        elif before is not None:
            grads = grads.add_(before.grads, alpha=self._factor(before))
        norm = torch.linalg.vector_norm(grads)
        self._landed = _Landed(ids, grads, counts, norm)
        self.anchor.grad = norm.to(self.anchor.device, copy=True).reshape(1)

    def _added(self, before: _Landed, ids: torch.Tensor, grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        assert self._road is not None
        union, inverse = torch.unique(torch.cat([before.ids, ids]), return_inverse=True)
        mine, order, counts = self._road.split(union)
        if order is not None:
            place = torch.empty_like(order)
            place[order] = torch.arange(len(order))
            inverse = place[inverse]
        total = torch.zeros(len(mine), grads.shape[1])
        total.index_add_(0, inverse[: len(before.ids)], before.grads, alpha=self._factor(before))
        total.index_add_(0, inverse[len(before.ids) :], grads)
        return mine, total, counts

    def _current(self) -> _Landed | None:
        """What has landed, unless `zero_grad` was called since (it sets the anchor's gradient to None or 0)."""
        grad = self.anchor.grad
        if grad is None or (self._landed is not None and float(grad) == 0.0 != float(self._landed.norm)):
            self._landed = None
        return self._landed

    def _factor(self, landed: _Landed) -> float:
        """By what clipping or unscaling has multiplied the gradients since they landed."""
        grad, norm = self.anchor.grad, float(landed.norm)
        if grad is None or norm == 0.0 or float(grad) == norm or not math.isfinite(norm):
            return 1.0
        return float(grad) / norm
