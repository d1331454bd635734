"""`offload_embeddings`: a model's own embeddings become rows on the shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from psjob.embeddings.embedding import Embedding, EmbeddingBag
from psjob.embeddings.rowmodule import RowModule


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
