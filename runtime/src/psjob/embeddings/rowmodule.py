"""What `Embedding` and `EmbeddingBag` share: rows fetched for a forward pass, their gradients kept until the step.

The rows are not a parameter. In their place stands the `anchor`, one number in the optimizer's group that these rows follow. Its
gradient is the norm of the rows' gradient, so that clipping by norm, a GradScaler and `zero_grad` reach the rows too.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Self

import torch

from psjob.embeddings.inprocess import look_alone
from psjob.embeddings.lookup import Lookup, Road, RowOptions
from psjob.worker.rows import RowGrads, RowRequest


@dataclass
class _Landed:
    """Gradients since the last `zero_grad`; `norm` as the anchor was told."""

    ids: torch.Tensor
    grads: torch.Tensor
    counts: list[int]
    norm: torch.Tensor


class RowModule(Lookup):
    """A table of rows of `embedding_dim` numbers; see `Embedding`. `table` are `Options`, and hyperparameters of their rule."""

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
        if max_norm is not None:
            raise ValueError(
                "max_norm changes rows in the forward pass, which rows on shards cannot; use weight_decay, or normalise the output"
            )
        if num_embeddings is not None and padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ValueError(f"padding_idx is {padding_idx}, it must be within the {num_embeddings} rows")
            padding_idx %= num_embeddings
        super().__init__(num_embeddings, embedding_dim, *RowOptions.of(table), "float32", device)
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.scale_grad_by_freq = scale_grad_by_freq
        self._landed: _Landed | None = None

    @classmethod
    def from_pretrained(cls, embeddings: torch.Tensor, freeze: bool = True, padding_idx: int | None = None, **options: Any) -> Self:
        """Rows that begin as those of `embeddings` (float32 [rows, dim]); `options` as in the constructor."""
        made = cls(embeddings.shape[0], embeddings.shape[1], padding_idx=padding_idx, **options)
        made.begin_with(embeddings)
        made.requires_grad_(not freeze)
        return made

    def bind(self, road: Road, table: int) -> None:
        """Take rows of table number `table` from `road`."""
        super().bind(road, table)
        self._landed = None

    def begin_with(self, values: torch.Tensor) -> None:
        """Rows 0, 1, … begin as `values` (float32 [rows, dim]), the padding row among them. Raises ValueError for another shape."""
        if values.dtype != torch.float32 or values.shape != (self.num_embeddings, self.embedding_dim):
            wanted = f"float32 of shape [{self.num_embeddings}, {self.embedding_dim}]"
            raise ValueError(f"first values of rows are {wanted}, got {values.dtype} of {tuple(values.shape)}")
        self.first = values.detach().to("cpu", copy=True).contiguous()
        self.padding_given = True

    def gradients(self, scale: float) -> RowGrads | None:
        """The rows' gradients since the last `zero_grad`, times `scale` and what the anchor's was multiplied by."""
        landed = self._current()
        if landed is None:
            return None
        scale *= self._factor(landed)
        grads = landed.grads if scale == 1.0 else landed.grads * scale
        return RowGrads(landed.ids, grads, landed.counts)

    def _look_alone(self) -> None:
        look_alone(self)

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
        asked, position = self.rows_of(ids)
        rows = asked.rows
        padding = self._padding(asked, rows)
        rows = rows.to(self.anchor.device)
        if torch.is_grad_enabled() and self.anchor.requires_grad:
            if not self.steps:
                raise RuntimeError(
                    "rows of a ps.Embedding are updated by an attached optimizer: call ps.attach(model, opt) before training"
                )
            self.given = ids
            rows = rows.detach().requires_grad_()
            rows.register_post_accumulate_grad_hook(functools.partial(self._land, asked, padding))  # type: ignore[no-untyped-call]
        return position.view(ids.shape).to(rows.device), rows, padding

    # -- inside --------------------------------------------------------------------------------

    def _padding(self, asked: RowRequest, rows: torch.Tensor) -> int | None:
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

    def _land(self, asked: RowRequest, padding: int | None, rows: torch.Tensor) -> None:
        """A backward pass has made the gradient of `rows`."""
        assert rows.grad is not None
        grads, rows.grad = rows.grad.to("cpu"), None
        ids, counts = asked.ids, list(asked.counts)
        if padding is not None:
            keep = torch.arange(len(ids), device="cpu") != padding
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
            place[order] = torch.arange(len(order), device="cpu")
            inverse = place[inverse]
        total = torch.zeros(len(mine), grads.shape[1], dtype=torch.float32, device="cpu")
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
