"""What a worker's data look like to the others: all must read the same, since `ps.shard` gives each its part of them.

Values of a sample are no measure: they may be drawn anew each time that it is read. Compared are what the data are made of (tensors,
arrays, lists), and samples that come out the same twice.

What a script without `ps.shard` trains on: a sum over each of its first inputs, so that workers with the same data can be told of.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import Any, Final

import torch
from torch.utils import data as torch_data

from psjob.api import values
from psjob.api.orders import attributes, seeded
from psjob.layout import memory
from psjob.worker.overlap import Hook, before_forward

MOST_ITEMS: Final = 64
"""Items of a list that are looked at."""
DEEP: Final = 4
"""Things within things."""
LONGEST: Final = 256
"""Characters of a text."""


def facts(loader: Any, seed: int, first: int | None, ordered: bool = False) -> dict[str, Any]:
    """What tells a loader from others; `first` is a checksum of what was read of it first, or of its order where it is `ordered`."""
    data, stream = loader.dataset, isinstance(loader.dataset, torch_data.IterableDataset)
    length = None if stream else _length(data)
    return {
        "loader": type(loader).__name__,
        "data": type(data).__name__,
        "length": length,
        "batch": _batch_size(loader),
        "processes": max(1, loader.num_workers) if stream else None,
        "content": _content(data, length),
        "samples": None if stream or loader.num_workers else _samples(data, length or 0, seed),
        "traits": _traits(data),
        "first": first,
        "ordered": ordered,
    }


def digest(value: Any, before: int = 0, deep: int = 0) -> int:
    """A checksum of some numbers and texts of a batch or sample."""
    if isinstance(value, torch.Tensor) or hasattr(value, "dtype"):
        if tensors := values.tensors_of(value):
            return values.sample(tensors, few=False) ^ zlib.crc32(str(tuple(value.shape)).encode(), before)
        value = value.item() if getattr(value, "ndim", 1) == 0 else value
    if isinstance(value, str | PurePath):
        return zlib.crc32(str(value)[-LONGEST:].rpartition("/")[2].encode(), before)  # the folder may be each machine's own
    if isinstance(value, int | float | bytes | None):
        return zlib.crc32(repr(value)[:LONGEST].encode(), before)
    if deep < DEEP and isinstance(value, Mapping):
        value = [thing for pair in list(value.items())[:MOST_ITEMS] for thing in pair]
    if deep < DEEP and isinstance(value, Sequence):
        before = zlib.crc32(str(len(value)).encode(), before)
        for item in value[:: 1 + len(value) // MOST_ITEMS]:
            before = digest(item, before, deep + 1)
        return before
    return zlib.crc32(type(value).__name__.encode(), before)


def _content(data: Any, length: int | None, deep: int = 0) -> int:
    """A checksum of what holds as much as there are samples."""
    if _is_data(data):
        return digest(data)
    told = 0
    for name, value in sorted(attributes(data).items()):
        several = list(value) if type(value) in (list, tuple) and len(value) <= MOST_ITEMS else [value]
        for one in several:
            if _is_data(one) and length is not None and _length(one) >= length:
                told = digest(one, zlib.crc32(name.encode(), told))
            elif isinstance(one, torch_data.Dataset) and deep < DEEP:
                within = None if isinstance(one, torch_data.IterableDataset) else _length(one)
                told = zlib.crc32(f"{name} {type(one).__name__} {within} {_content(one, within, deep + 1)}".encode(), told)
    return told


def _samples(data: Any, length: int, seed: int) -> int | None:
    """A checksum of three samples; None where they are other ones when they are read again, with the same seeds too."""
    found = []
    with suppress(Exception):  # indices may be no numbers, and what a sample needs may be there in loader processes only
        for _ in range(2):
            with seeded((seed, "look")):
                found.append(digest([data[index] for index in sorted({0, length // 2, length - 1}) if length]))
    return found[0] if len(found) == 2 and found[0] == found[1] else None


def _traits(thing: Any, deep: int = 0) -> int:
    """A checksum of numbers and texts that the data keep, such as a rank; and of objects in them."""
    told = 0
    for name, value in sorted(attributes(thing).items()):
        if isinstance(value, int | float | str | None):
            told = zlib.crc32(f"{name} {value!r}".encode()[:LONGEST], told)
        elif deep < DEEP - 1 and not isinstance(value, torch.nn.Module | torch.Tensor) and attributes(value):
            told = zlib.crc32(f"{name} {_traits(value, deep + 1)}".encode(), told)
    return told


def _is_data(value: Any) -> bool:
    """May it be what samples are made of?"""
    if isinstance(value, torch.Tensor):
        return value.dim() > 0
    return isinstance(value, list | tuple | range | dict) or (
        hasattr(value, "dtype") and hasattr(value, "__array__") and hasattr(value, "__len__")
    )


def _batch_size(loader: Any) -> int | None:
    size = loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None)
    return size if type(size) is int else None


def _length(data: Any) -> int:
    try:
        return len(data)
    except Exception:  # a class that raises what it likes; a tensor without a dimension
        return -1


STEPS = 16
"""So many steps are looked at."""
BYTES = 1 << 16
"""Of an input."""


class FirstInputs:
    """Looks at the first tensor that the model is given in each of the first steps, until `done` has them.

    Where the model itself is not called, as a LightningModule, it is the module that runs first.
    """

    def __init__(self, model: torch.nn.Module, done: Callable[[list[int]], None]) -> None:
        self._done = done
        self._sums: list[int] = []
        self._open = 0
        self._first: torch.nn.Module | None = None
        inside = getattr(model, "_orig_mod", model)  # torch.compile cannot trace a hook of the module that it returns
        self._hooks = [before_forward(module, Hook(self._look)) for module in inside.modules()]

    def step(self) -> None:
        """A step was made of what was looked at since the last."""
        if not self._hooks:
            return
        self._sums.append(self._open)
        self._open = 0
        if len(self._sums) == STEPS:
            self.stop()
            self._done(self._sums)

    def stop(self) -> None:
        """Look no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _look(self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if torch.is_grad_enabled() and self._first in (None, module):
            first = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
            if first is not None and (values := memory.underneath(first)) is not None and values.numel():
                self._first = module
                with torch._C._DisableFuncTorch():
                    self._open = sum_of(values, self._open)


def sum_of(tensor: torch.Tensor, before: int = 0) -> int:
    """A crc32 of the first BYTES of a dense tensor, after that of what came before."""
    part = tensor.detach().reshape(-1)[: BYTES // tensor.element_size()]
    return zlib.crc32(memory.view(memory.plain(part)), before)
