"""`Embedding` and `EmbeddingBag`: torch's, with rows that live on the shards.

`offload_embeddings` makes a model's own embeddings rows on the shards. Rows are in a file of a model's weights by the names that a plain
module has.

Both are a `RowModule`: rows are fetched for a forward pass, and their gradients are kept until the step.

The rows are not a parameter. In their place stands the `anchor`, one number in the optimizer's group that these rows follow. Its
gradient is the norm of the rows' gradient, so that clipping by norm, a GradScaler and `zero_grad` reach the rows too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional

from psjob.checkpoint.files import Entry, PartedTensor
from psjob.embeddings.lookup import Lookup, Road, RowOptions
from psjob.embeddings.row_tables import look_alone
from psjob.worker.rows import RowGrads, RowRequest


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
            offsets: where bags begin, for only 1-D ids.
            per_sample_weights: float32 factors in the shape of `ids`, only for mode "sum".

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


@dataclass
class _Landed:
    """Gradients since the last `zero_grad`; `norm` as the anchor was told."""

    ids: torch.Tensor
    grads: torch.Tensor
    counts: list[int]
    norm: torch.Tensor
