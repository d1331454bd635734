"""`Embedding` and `EmbeddingBag`: torch's, with rows that live on the shards.

`offload_embeddings` makes a model's own embeddings rows on the shards. Rows are in a file of a model's weights by the names that a plain
module has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from psjob.checkpoint.files import Entry, PartedTensor
from psjob.embeddings.lookup import Lookup
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


def offload_embeddings(model: nn.Module, min_rows: int = 0, **options: Any) -> list[str]:
    """Swap large nn.Embedding and nn.EmbeddingBag modules of `model` for tables on the shards.

    Call it before the optimizer is made. Their weights (rank 0's in a job) become the rows' first values.

    Args:
        model: changed in place.
        min_rows: smaller ones stay.
        options: `table` of `Embedding`, such as optimizer="rowwise_adagrad", lr=0.1.

    Returns:
        The names of the modules that were swapped.

    Raises:
        ValueError: one cannot be swapped, by its name: its weight is used elsewhere too, is not float32, or has a max_norm.

    Example:
        >>> import torch, psjob as ps
        >>> model = torch.nn.Sequential(torch.nn.Embedding(50_000, 4), torch.nn.Linear(4, 1))
        >>> ps.offload_embeddings(model, min_rows=10_000)
        ['0']
    """
    users: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for name, p in module.named_parameters(recurse=False):
            users.setdefault(id(p), []).append(f"{path}.{name}".lstrip("."))
    made: dict[int, RowModule] = {}
    swapped = []
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if type(child) not in (nn.Embedding, nn.EmbeddingBag) or child.num_embeddings < min_rows:
                continue
            where = f"{path}.{name}".lstrip(".")
            if id(child) not in made:
                made[id(child)] = _swap(where, child, users[id(child.weight)], options)
            setattr(parent, name, made[id(child)])
            swapped.append(where)
    return swapped


def _swap(where: str, child: Any, users: list[str], options: dict[str, Any]) -> RowModule:
    if child.max_norm is not None:
        raise ValueError(f"{where} has max_norm, which rows on shards cannot have; build it without, or raise min_rows")
    if child.weight.dtype != torch.float32:
        raise ValueError(f"{where} is {child.weight.dtype}; rows on shards are float32")
    if len(users) > 1:
        raise ValueError(f"the weight of {where} is used elsewhere too ({', '.join(users[:3])}), so it stays; raise min_rows")
    common = {"scale_grad_by_freq": child.scale_grad_by_freq, "padding_idx": child.padding_idx, "device": child.weight.device, **options}
    rows, dim = child.weight.shape
    made: RowModule
    if type(child) is nn.Embedding:
        made = Embedding(rows, dim, **common)
    else:
        made = EmbeddingBag(rows, dim, mode=child.mode, include_last_offset=child.include_last_offset, **common)
    made.begin_with(child.weight)
    made.requires_grad_(child.weight.requires_grad)
    made.train(child.training)
    return made


def exported(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> list[Entry]:
    """The tensors of `state`, which is the model's, with the rows of its modules in place of their anchors.

    Rows are read when they are written, part by part. A module that the model has twice is written twice, as a plain one is. Raises
    ValueError for a module that is not attached.
    """
    held = {path: module for path, module in model.named_modules(remove_duplicate=False) if isinstance(module, Lookup)}
    anchors = {_name(path, "anchor") for path in held}
    entries: list[Entry] = [(name, tensor) for name, tensor in state.items() if name not in anchors]
    for path, module in held.items():
        if not module.steps:
            raise ValueError(f"the rows of {path or 'the model'} begin with ps.attach: call it before ps.export")
        ids = module.ids() if module.num_rows is None else None
        if ids is not None:
            entries.append((_name(path, "ids"), ids))
        count = module.num_rows if ids is None else len(ids)
        assert count is not None
        entries.append((_name(path, "weight"), PartedTensor(module.dtype, (count, module.dim), functools.partial(module.parts, ids))))
    return entries


def unwinding(model: torch.nn.Module, call: Callable[[], None]) -> None:
    """Make a call that reads rows of `model`, if it has any: where the job ends or begins again meanwhile, the call is left first."""
    held = next((module for module in model.modules() if isinstance(module, Lookup)), None)
    if held is None:
        call()
    else:
        held.unwinding(call)


def _name(path: str, what: str) -> str:
    return f"{path}.{what}" if path else what
