"""`Embedding` and `EmbeddingBag`: torch's, with rows that live on the shards."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from psjob.embeddings.rowmodule import RowModule


class Embedding(RowModule):
    """torch.nn.Embedding with rows on the shards; outside a job they are in this process.

    Without an `optimizer` of their own rows follow the attached optimizer where that is SGD without momentum, Adagrad or Adam. With one,
    their `lr` follows its schedule: where a scheduler halves the lr of the group that has `anchor`, that of the rows is halved too.

    Args:
        num_embeddings: rows; None takes any int64 as an id.
        embedding_dim: float32 numbers of a row.
        padding_idx: id whose row stays 0 and takes no gradient.
        max_norm: None; it would change rows in the forward pass.
        norm_type: not used; there for torch's signature.
        scale_grad_by_freq: divide a row's gradient by how often the batch names it.
        sparse: changes nothing; only rows that a batch names are ever pushed.
        device: of what `forward` gives.
        table: what else a table is. First values: `init` ("normal", "uniform" or "zeros"), `scale`, `seed`. Open ids: `admit_after`, the
            steps that must name a row before it is kept, and `evict_after`, the steps without it after which it goes. `optimizer`
            ("sgd", "adagrad", "rowwise_adagrad", "adam" or "ftrl") with its hyperparameters, such as lr=0.1.

    Raises:
        ValueError: a value that no table can have, by the name of its field.

    Example:
        >>> import torch, psjob as ps
        >>> users = ps.Embedding(None, 16, admit_after=2, optimizer="rowwise_adagrad", lr=0.1)
        >>> users, optimizer = ps.attach(users, torch.optim.SGD(users.parameters(), lr=0.1))
        >>> users(torch.tensor([7, 2**40])).shape
        torch.Size([2, 16])
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
        """Look rows up.

        Args:
            ids: int64 or int32, of any shape.

        Returns:
            Their rows, float32 of shape [*ids.shape, embedding_dim].

        Raises:
            IndexError: an id that is no row.
        """
        position, rows, padding = self.look(ids)
        return functional.embedding(position, rows, padding, scale_grad_by_freq=self.scale_grad_by_freq)


class EmbeddingBag(RowModule):
    """torch.nn.EmbeddingBag with rows on the shards: sums, means or maxima of rows.

    Args:
        num_embeddings: rows; None takes any int64 as an id.
        embedding_dim: float32 numbers of a row.
        max_norm: None; it would change rows in the forward pass.
        norm_type: not used; there for torch's signature.
        scale_grad_by_freq: divide a row's gradient by how often the batch names it.
        mode: "sum", "mean" or "max".
        sparse: changes nothing; only rows that a batch names are ever pushed.
        include_last_offset: the last of `offsets` is the number of ids.
        padding_idx: id whose row stays 0, takes no gradient and counts in no bag.
        device: of what `forward` gives.
        table: as of `Embedding`.

    Raises:
        ValueError: a value that no table can have, by the name of its field.

    Example:
        >>> import torch, psjob as ps
        >>> words = ps.EmbeddingBag(1000, 8, mode="sum", init="zeros")
        >>> words, optimizer = ps.attach(words, torch.optim.SGD(words.parameters(), lr=0.1))
        >>> words(torch.tensor([1, 2, 4, 5]), offsets=torch.tensor([0, 3])).shape
        torch.Size([2, 8])
    """

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
        """Join the rows of each bag.

        Args:
            ids: int64 or int32; a bag is a row of 2-D ids, or begins at one of `offsets` in 1-D ids.
            offsets: where bags begin, for 1-D ids alone.
            per_sample_weights: float32 factors in the shape of `ids`, for mode "sum" alone.

        Returns:
            One row a bag, float32 of shape [bags, embedding_dim].

        Raises:
            IndexError: an id that is no row.
        """
        position, rows, padding = self.look(ids)
        if len(rows) == 0:  # torch wants a row to look at, also for empty bags only
            rows = torch.zeros(1, self.embedding_dim, dtype=rows.dtype, device=rows.device)
        return functional.embedding_bag(
            position, rows, offsets, scale_grad_by_freq=self.scale_grad_by_freq, mode=self.mode, per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset, padding_idx=padding,
        )  # fmt: skip
