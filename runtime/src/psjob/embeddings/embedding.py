"""`Embedding` and `EmbeddingBag`: torch's, with rows that live on the shards."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from psjob.embeddings.rowmodule import RowModule


class Embedding(RowModule):
    """torch.nn.Embedding with rows on the shards; outside a job they are in this process.

    `num_embeddings` None takes any int64 as an id. `table` says what else a table is: `init`, `scale` and `seed` of first values,
    `admit_after`, `evict_after`, and `optimizer`, a rule of the rows' own with its hyperparameters (lr=0.1, …);
    psjob.embeddings.rowmodule.Options has them with their defaults.
    Without a rule rows follow the attached optimizer where that is SGD without momentum, Adagrad or Adam.
    `sparse` changes nothing: only rows that a batch names are ever pushed.

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
        **table: Any,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, max_norm, scale_grad_by_freq, device, **table)

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
        **table: Any,
    ) -> None:
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"mode of an EmbeddingBag is sum, mean or max, got {mode!r}")
        super().__init__(num_embeddings, embedding_dim, padding_idx, max_norm, scale_grad_by_freq, device, **table)
        self.mode, self.include_last_offset = mode, include_last_offset

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
