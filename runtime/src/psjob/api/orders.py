"""Which order a DataLoader takes samples in: what gives them, how batches are cut from it, and whether it comes to an end."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import torch
from torch.utils import data as torch_data
from torch.utils.data.dataloader import _BaseDataLoaderIter

from psjob.api import drawing, foreign
from psjob.process.errors import Refused

Indices = list[Any]
MOST: Final = 1 << 22
"""Samples, or batches, of an order that is drawn whole; a longer one is drawn as it is needed."""
TOGETHER: Final = 16
"""So many batches of a longer one are drawn at a time."""
_LONGER: Final = 4
"""An order may give so many times as many as its length says: some lengths are estimates."""
_NUMBER_BYTES: Final = 8


class Shuffled:
    """Each sample once, in an order of its own each epoch."""

    def __init__(self, count: int) -> None:
        self._count = count

    def order(self, seed: int, epoch: int) -> torch.Tensor:
        """Raises Refused where it does not fit in memory."""
        problem = (
            f"an order of {self._count} samples does not fit in memory; give the DataLoader RandomSampler(data, replacement=True, "
            "num_samples=…), which is drawn as it is needed"
        )
        if self._count * _NUMBER_BYTES > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
            raise Refused(problem)
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % (1 << 63))
        try:
            return torch.randperm(self._count, generator=generator, device="cpu")
        except (RuntimeError, MemoryError):
            raise Refused(problem) from None


@dataclass(frozen=True)
class Order:
    """Of the batches of all ranks."""

    source: Any
    """A range or `Shuffled`: each sample once; else what is asked for samples, or for whole batches."""
    whole: bool
    """It gives batches."""
    size: int | None
    """Samples of a batch that is cut from it; None: one, which is a batch as it is."""
    drop_last: bool = False
    most: int | None = None
    """A pass ends after so many batches; None: with the order."""

    @property
    def known(self) -> bool:
        """Is it each sample once?"""
        return isinstance(self.source, range | Shuffled)

    @property
    def name(self) -> str:
        """Of its class."""
        return type(self.source).__name__

    def values(self, seed: int, epoch: int) -> list[Any] | None:
        """All samples, or batches, of an epoch that were drawn; None where it has no end, or is long."""
        if self.most is not None or (length := _length(self.source)) is None or length > MOST:
            return None
        most = _LONGER * length + TOGETHER
        parts = drawing.parts_of(self.source)
        drawing.begin_epoch(parts, epoch)
        with drawing.drawing((seed, epoch), parts):
            found = list(islice(self.source, most + 1))
        return None if len(found) > most else found

    def endless(self, seed: int, epoch: int) -> Iterator[Indices]:
        """Its batches from the first, drawn as they are asked for, some at a time."""
        parts = drawing.parts_of(self.source)
        drawing.begin_epoch(parts, epoch)
        batches = islice(self._cut(), self.most)
        number = 0
        while True:
            with drawing.drawing((seed, epoch, number), parts):
                several = list(islice(batches, TOGETHER))
            if not several:
                return
            yield from several
            number += 1

    def _cut(self) -> Iterator[Indices]:
        given = iter(self.source)
        if self.whole:
            yield from map(list, given)
            return
        size = self.size or 1
        while (batch := list(islice(given, size))) and not (len(batch) < size and self.drop_last):
            yield batch


def find(loader: Any) -> Order:
    """The order of a DataLoader over a dataset with `__getitem__`. Raises Refused for one that is a rank's already."""
    given, most = loader.batch_sampler, _passed_on(loader)
    own = given is not None and (loader.batch_size is None or type(given) is not torch_data.BatchSampler)
    if own and type(given).__iter__ is not torch_data.BatchSampler.__iter__:
        order = Order(given, whole=True, size=None, most=most)
    else:
        cuts = given if own else loader
        samples = _plain(cuts.sampler)
        size = None if cuts.batch_size is None else int(cuts.batch_size)
        order = Order(_known(samples) or samples, whole=False, size=size, drop_last=size is not None and bool(cuts.drop_last), most=most)
    if not order.known:
        drawing.check_whole(drawing.parts_of(order.source))
    return order


def keeps_iterator(loader: Any) -> str | None:
    """The attribute in which a loader keeps an iterator that goes on from pass to pass, if it only hands on what that gives."""
    name = next((name for name, value in vars(loader).items() if name != "_iterator" and isinstance(value, _BaseDataLoaderIter)), None)
    return name if name is not None and _hands_on(loader, name) else None


def _hands_on(loader: Any, name: str) -> bool:
    """Does its `__iter__` give what it takes from there, untouched?"""
    marks = [object() for _ in range(2)]
    try:
        tried = copy.copy(loader)
        object.__setattr__(tried, name, iter(marks))
        found = list(islice(iter(tried), min(len(loader), len(marks))))
    except Exception:  # whatever its class makes of what is no batch
        return False
    return bool(found) and all(one is mark for one, mark in zip(found, marks, strict=False))


def _passed_on(loader: Any) -> int | None:
    """Batches of a pass of a loader whose iterator never ends, as those that keep their processes alive have."""
    return drawing.length(loader) if type(loader) is not torch_data.DataLoader and keeps_iterator(loader) else None


def _plain(sampler: Any) -> Any:
    """Torch's sampler for one of a library."""
    knows = foreign.home(sampler)
    return sampler if knows is None else knows.plain_sampler(sampler)


def _known(sampler: Any) -> Shuffled | range | None:
    """The order of a sampler of torch's that covers each sample once; None for any other."""
    if type(sampler) is torch_data.SequentialSampler:
        return range(len(sampler))
    if type(sampler) is torch_data.RandomSampler and not sampler.replacement:
        data: Any = sampler.data_source
        return Shuffled(len(data)) if sampler.num_samples == len(data) else None
    if type(sampler) is torch_data.DistributedSampler:  # left in from DDP: all of the data, in slices
        data = sampler.dataset
        count = len(data)
        return Shuffled(count) if sampler.shuffle else range(count)
    return None


def _length(source: Any) -> int | None:
    try:
        return drawing.length(source) if isinstance(source, Sized) else None
    except (TypeError, RuntimeError):  # its class may say so only as it is asked
        return None
