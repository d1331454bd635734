"""Which rows the next batch needs: learned from where this one's ids lay in its batch, and asked for before this step is through."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from psjob.embeddings.lookup import Lookup

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
