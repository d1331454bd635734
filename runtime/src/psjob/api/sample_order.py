"""Which order a DataLoader takes samples in: what gives them, how batches are cut from it, and whether it comes to an end.

What a sampler draws, the same on every rank and again after a restart: all that it may draw from is seeded while it does.

A sampler may hold others, generators of its own, and a number of its epoch. They are found in its attributes. The script's
generators are afterwards as they were.
"""

from __future__ import annotations

import copy
import os
import random
import sys
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import torch
from torch.utils import data as torch_data
from torch.utils.data.dataloader import _BaseDataLoaderIter

from psjob.api import values
from psjob.process.errors import Refused
from psjob.process.startup import integration_of
from psjob.resume.record import generator_states, put_generators

_HELD: Final = ("sampler", "batch_sampler", "samplers", "batch_samplers")
"""Attributes in which samplers hold others, that may be of any class."""
_MOST_PARTS: Final = 64


def nested_samplers(sampler: Any) -> list[Any]:
    """It and the samplers that it holds, the outer before the inner."""
    found: list[Any] = []
    waiting = [sampler]
    while waiting and len(found) < _MOST_PARTS:
        part = waiting.pop(0)
        if any(part is one for one in found):
            continue
        found.append(part)
        for name, value in attributes(part).items():
            several = list(value)[:_MOST_PARTS] if type(value) in (list, tuple) else [value]
            waiting += [one for one in several if isinstance(one, torch_data.Sampler) or (name in _HELD and hasattr(one, "__iter__"))]
    return found


def check_whole(parts: Iterable[Any]) -> None:
    """Raises Refused if one of these samplers gives a rank its part. One that was made for a single rank gives all."""
    for part in parts:
        if hasattr(part, "rank") and getattr(part, "num_replicas", 1) != 1 and not _is_torchs(part):
            raise Refused(
                f"{type(part).__name__} gives each rank its part, and ps.shard does so too. Let it give all of the samples, as with rank=0 "
                "and num_replicas=1; or loop over the loader without ps.shard"
            )


def _is_torchs(part: Any) -> bool:
    """Is it a DistributedSampler that slices as torch's does?"""
    return isinstance(part, torch_data.DistributedSampler) and type(part).__iter__ is torch_data.DistributedSampler.__iter__


def begin_epoch(parts: Iterable[Any], epoch: int) -> None:
    """Tell samplers their epoch, before each time that they are asked: some count it themselves."""
    for part in parts:
        begin = getattr(part, "set_epoch", None)
        if callable(begin):
            begin(epoch)
        elif type(attributes(part).get("epoch")) is int:
            part.epoch = epoch


@contextmanager
def seeded_draws(seed: tuple[int, ...], parts: Iterable[Any]) -> Iterator[None]:
    """Inside, everything that these samplers may draw from begins from `seed`, and torch's DistributedSamplers give all samples."""
    parts = list(parts)
    own = [value for part in parts for value in attributes(part).values() if values.generates(value)]
    with seeded(seed, own), _whole([part for part in parts if _is_torchs(part)]):
        yield


def length(thing: Any) -> int:
    """`len` of a loader or a sampler whose samplers of torch give all samples, not a rank's. Raises TypeError if there is none."""
    with _whole([part for part in nested_samplers(thing) if _is_torchs(part)]):
        return len(thing)


@contextmanager
def seeded(parts: tuple[Any, ...], own: Sequence[Any] = ()) -> Iterator[None]:
    """Inside, Python's, numpy's and torch's generators and `own` begin from `parts`; afterwards they are as before."""
    kept, states = generator_states(), [values.plain_state(generator) for generator in own]
    value = seed_all(parts)
    for generator in own:
        _seed(generator, value)
    try:
        yield
    finally:
        put_generators(kept)
        for generator, state in zip(own, states, strict=True):
            if state is not None:
                values.load_state(generator, state)


def seed_all(parts: tuple[Any, ...]) -> int:
    """Seed Python's, numpy's and torch's generators from `parts`; with which number."""
    value = random.Random(repr(parts)).getrandbits(63)  # noqa: S311 - a seed of the data's order, no key
    random.seed(value)
    torch.manual_seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value % (1 << 32))
    return value


def _seed(generator: Any, value: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(value)
    elif hasattr(generator, "bit_generator"):  # numpy's
        generator.bit_generator.state = type(generator.bit_generator)(value).state
    else:
        generator.seed(value if isinstance(generator, random.Random) else value % (1 << 32))


@contextmanager
def _whole(samplers: Sequence[Any]) -> Iterator[None]:
    kept = [(sampler.num_replicas, sampler.rank, sampler.num_samples, sampler.total_size) for sampler in samplers]
    for sampler in samplers:
        count = len(sampler.dataset)
        sampler.num_replicas, sampler.rank, sampler.num_samples, sampler.total_size = 1, 0, count, count
    try:
        yield
    finally:
        for sampler, before in zip(samplers, kept, strict=True):
            sampler.num_replicas, sampler.rank, sampler.num_samples, sampler.total_size = before


def attributes(thing: Any) -> dict[str, Any]:
    """What an object holds by name; empty of one that holds nothing so."""
    found = getattr(thing, "__dict__", None)
    return found if isinstance(found, dict) else {}


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
        """Raises Refused if it does not fit in memory."""
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
class SampleOrder:
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
        parts = nested_samplers(self.source)
        begin_epoch(parts, epoch)
        with seeded_draws((seed, epoch), parts):
            found = list(islice(self.source, most + 1))
        return None if len(found) > most else found

    def endless(self, seed: int, epoch: int) -> Iterator[Indices]:
        """Its batches from the first, drawn as they are asked for, some at a time."""
        parts = nested_samplers(self.source)
        begin_epoch(parts, epoch)
        batches = islice(self._cut(), self.most)
        number = 0
        while True:
            with seeded_draws((seed, epoch, number), parts):
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


def find(loader: Any) -> SampleOrder:
    """The order of a DataLoader over a dataset with `__getitem__`. Raises Refused for one that is a rank's already."""
    given, most = loader.batch_sampler, _passed_on(loader)
    own = given is not None and (loader.batch_size is None or type(given) is not torch_data.BatchSampler)
    if own and type(given).__iter__ is not torch_data.BatchSampler.__iter__:
        order = SampleOrder(given, whole=True, size=None, most=most)
    else:
        cuts = given if own else loader
        samples = _plain(cuts.sampler)
        size = None if cuts.batch_size is None else int(cuts.batch_size)
        order = SampleOrder(
            _known(samples) or samples, whole=False, size=size, drop_last=size is not None and bool(cuts.drop_last), most=most
        )
    if not order.known:
        check_whole(nested_samplers(order.source))
    return order


def keeps_iterator(loader: Any) -> str | None:
    """The attribute in which a loader keeps an iterator that continues from pass to pass, if it only hands on what that gives."""
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
    return length(loader) if type(loader) is not torch_data.DataLoader and keeps_iterator(loader) else None


def _plain(sampler: Any) -> Any:
    """Torch's sampler for one of a library."""
    knows = integration_of(sampler)
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
        return length(source) if isinstance(source, Sized) else None
    except (TypeError, RuntimeError):  # its class may say so only as it is asked
        return None
