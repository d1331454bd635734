"""`Embedding` and `EmbeddingBag`: torch's, with rows that live on the shards."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from psjob.rowmodule import Options, RowModule


def _options(optimizer: str | None, init: str, scale: float, seed: int | None, admit_after: int, evict_after: int | None,
             numbers: dict[str, float | bool]) -> Options:  # fmt: skip
    return Options(init, scale, seed, admit_after, evict_after, optimizer, numbers)


class Embedding(RowModule):
    """torch.nn.Embedding with rows on the shards; outside a job they are in this process.

    `num_embeddings` None takes any int64 as an id. A row begins with values that follow from (seed, table, id): `init` is normal
    (standard deviation `scale`), uniform (-scale to scale) or zeros. A row of open ids is kept from the `admit_after`-th step that
    names it, and dropped when `evict_after` steps did not name it. Rows follow the attached optimizer where that is SGD
    without momentum, Adagrad or Adam; `optimizer` gives them a rule of their own (sgd, adagrad, rowwise_adagrad, adam, ftrl) with
    `numbers` (lr=0.1, …). `sparse` changes nothing: only rows that a batch names are ever pushed.

    Raises ValueError, naming the field, for what cannot be; `max_norm` is refused, since it changes rows in the forward pass.
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        device: Any = None,
        *,
        init: str = "normal",
        scale: float = 1.0,
        seed: int | None = None,
        admit_after: int = 1,
        evict_after: int | None = None,
        optimizer: str | None = None,
        **numbers: float | bool,
    ) -> None:
        _refuse_norm(max_norm)
        options = _options(optimizer, init, scale, seed, admit_after, evict_after, numbers)
        super().__init__(num_embeddings, embedding_dim, padding_idx, options, device)
        self.scale_grad_by_freq = scale_grad_by_freq

    @classmethod
    def from_pretrained(cls, embeddings: torch.Tensor, freeze: bool = True, padding_idx: int | None = None, **options: Any) -> Embedding:
        """Rows that begin as those of `embeddings` (float32 [rows, dim]); `options` as in the constructor."""
        made = cls(embeddings.shape[0], embeddings.shape[1], padding_idx, **options)
        made.begin_with(embeddings)
        made.requires_grad_(not freeze)
        return made

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of `ids`: shape [*ids.shape, embedding_dim]. Raises IndexError for an id that is no row."""
        position, rows, padding = self.look(ids)
        return functional.embedding(position, rows, padding, scale_grad_by_freq=self.scale_grad_by_freq)


class EmbeddingBag(RowModule):
    """torch.nn.EmbeddingBag with rows on the shards: sums, means or maxima of rows; see `Embedding` for the rest."""

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        max_norm: None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: Any = None,
        *,
        init: str = "normal",
        scale: float = 1.0,
        seed: int | None = None,
        admit_after: int = 1,
        evict_after: int | None = None,
        optimizer: str | None = None,
        **numbers: float | bool,
    ) -> None:
        _refuse_norm(max_norm)
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"mode of an EmbeddingBag is sum, mean or max, got {mode!r}")
        options = _options(optimizer, init, scale, seed, admit_after, evict_after, numbers)
        super().__init__(num_embeddings, embedding_dim, padding_idx, options, device)
        self.scale_grad_by_freq, self.mode, self.include_last_offset = scale_grad_by_freq, mode, include_last_offset

    @classmethod
    def from_pretrained(cls, embeddings: torch.Tensor, freeze: bool = True, **options: Any) -> EmbeddingBag:
        """Rows that begin as those of `embeddings` (float32 [rows, dim]); `options` as in the constructor."""
        made = cls(embeddings.shape[0], embeddings.shape[1], **options)
        made.begin_with(embeddings)
        made.requires_grad_(not freeze)
        return made

    def forward(
        self, ids: torch.Tensor, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One row a bag, shape [bags, embedding_dim]: bags are rows of a 2-D `ids`, or begin at `offsets` in a 1-D one."""
        position, rows, padding = self.look(ids)
        if len(rows) == 0:  # torch wants a row to look at, also for empty bags only
            rows = torch.zeros(1, self.embedding_dim, device=rows.device)
        return functional.embedding_bag(
            position, rows, offsets, scale_grad_by_freq=self.scale_grad_by_freq, mode=self.mode, per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset, padding_idx=padding,
        )  # fmt: skip


def _refuse_norm(max_norm: Any) -> None:
    if max_norm is not None:
        raise ValueError(
            "max_norm changes rows in the forward pass, which rows on shards cannot; use weight_decay, or normalise the output"
        )
