"""Slices of a dataset with `__getitem__`: which samples make which batch, and which batch goes to which worker.

Of an epoch there is one order of samples, from (seed, epoch). The loader's batches are cut from it. Batch j goes to rank j mod W
of W workers, so every sample is seen once an epoch whatever W is. Where the last round has too few batches, the ranks without one
are given a batch of that epoch again, which counts for nothing (see `data.py`).
"""

from __future__ import annotations

import random
import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import data as torch_data

from psjob.api import values
from psjob.process.errors import Refused
from psjob.resume.generators import generators, put_generators

Indices = list[Any]


class Slices:
    """Of one rank. `loader` is a torch DataLoader over a dataset with `__getitem__`.

    Raises Refused for an order that could not be found again, or that is one rank's already.
    """

    def __init__(self, loader: Any, seed: int, rank: int, world: int) -> None:
        self._loader, self._seed, self._rank, self._world = loader, seed, rank, world
        self._batches, self._samples = _orders(loader)
        self._size = None if self._batches is not None or loader.batch_size is None else int(loader.batch_size)
        self._checked = False
        self.order = 0

    def batches(self, epoch: int) -> Sequence[Indices]:
        """The batches of an epoch, those of all ranks. `order` tells them from others then."""
        order = self._order(epoch)
        told = _checksum(order) if isinstance(order, list) else len(order)
        self.order = zlib.crc32(str(_content(self._loader.dataset)).encode(), told)
        if self._batches is not None:
            return [list(batch) for batch in order]
        return _Cut(order, self._size or 1, self._size is not None and bool(self._loader.drop_last))

    def turns(self, batches: int, begin: int) -> list[tuple[int, bool]]:
        """Of each round from `begin` on: number of this rank's batch of so many, and is it another rank's that is given again?"""
        mine = (turn * self._world + self._rank for turn in range(begin, rounds_of(batches, self._world)))
        return [(number % batches, number >= batches) for number in mine]

    def feed(self, epoch: int, begin: int, apart: bool = False) -> Iterator[tuple[Any, bool]]:
        """This rank's batches from round `begin` on, and of each whether it is another rank's that is given again.

        `apart`: what is drawn as a batch is made does not show in the script's generators. What the loader draws from them as it begins,
        it has drawn when this returns.
        """
        batches = self.batches(epoch)
        turns = self.turns(len(batches), begin)
        chosen = _Given(batches, [number for number, _ in turns], (self._seed, epoch))
        return zip(self._like(chosen, apart), (again for _, again in turns), strict=True)

    def _like(self, chosen: _Given, apart: bool) -> Any:
        """A DataLoader of these batches, otherwise like the user's."""
        # Where the user's loader makes no batches, what the dataset gives for one index is one.
        dataset = _Seeded(self._loader.dataset, apart, whole=self._size is None and self._batches is None)
        return torch_data.DataLoader(dataset, batch_sampler=chosen, **options_of(self._loader))

    def _order(self, epoch: int) -> Any:
        source = self._batches if self._batches is not None else self._samples
        if isinstance(source, range):
            return source
        if isinstance(source, _Shuffled):
            return source.order(self._seed, epoch)
        for thing in (source, getattr(source, "sampler", None)):
            begin = getattr(thing, "set_epoch", None)
            if callable(begin):
                begin(epoch)
        order = drawn(source, (self._seed, epoch))
        if not self._checked:
            if drawn(source, (self._seed, epoch)) != order:
                raise Refused(
                    f"{type(source).__name__} gives another order each time it is asked, with the same seeds too, so a restart could not "
                    "find its place again. Draw from torch's, numpy's or Python's own generator, or from set_epoch(epoch)"
                )
            self._checked = True
        return order


def _checksum(order: list[Any]) -> int:
    """Of indices, or of batches of them."""
    try:
        return zlib.crc32(array("q", order))
    except (TypeError, OverflowError):
        return zlib.crc32(repr(order).encode())


def _content(dataset: Any) -> list[int]:
    """Checksums of some numbers of the tensors that a dataset gives, and of which parts; of other datasets nothing."""
    if isinstance(dataset, torch_data.Subset):
        return [_checksum(list(dataset.indices)), *_content(dataset.dataset)]
    if isinstance(dataset, torch_data.ConcatDataset):
        return [each for part in dataset.datasets for each in _content(part)]
    tensors = dataset.tensors if isinstance(dataset, torch_data.TensorDataset) else [dataset] if isinstance(dataset, torch.Tensor) else []
    return [values.sample(tensors, few=False)] if tensors else []


def options_of(loader: Any) -> dict[str, Any]:
    """How a user's DataLoader makes its batches."""
    names = ["num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"]
    options = {name: getattr(loader, name) for name in names}
    if loader.num_workers:
        options["prefetch_factor"] = loader.prefetch_factor
    return options


class _Shuffled:
    """Each sample once, in an order of its own each epoch."""

    def __init__(self, count: int) -> None:
        self._count = count

    def order(self, seed: int, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % (1 << 63))
        return torch.randperm(self._count, generator=generator, device="cpu")


def _orders(loader: Any) -> tuple[Any, Any]:
    """What gives whole batches, else what gives samples. Raises Refused."""
    given = loader.batch_sampler
    batches = given if given is not None and (loader.batch_size is None or type(given) is not torch_data.BatchSampler) else None
    samples = loader.sampler if batches is None else getattr(batches, "sampler", None)
    if batches is None:
        known = _known(samples, loader.dataset)
        if known is not None:
            return None, known
    for thing in (batches, samples):
        if hasattr(thing, "num_replicas") and hasattr(thing, "rank"):
            raise Refused(
                f"{type(thing).__name__} gives each rank its part, and ps.shard does so too. Give the DataLoader a sampler of all samples"
            )
    source = samples if batches is None else batches
    if not isinstance(source, Sized):
        raise Refused(f"{type(source).__name__} has no length, so an epoch of it has no end; give it __len__")
    return batches, samples


def _known(sampler: Any, dataset: Any) -> _Shuffled | range | None:
    """The order of a sampler of torch's that covers each sample once; None for any other."""
    if type(sampler) is torch_data.SequentialSampler:
        return range(len(dataset))
    if type(sampler) is torch_data.RandomSampler and not sampler.replacement and sampler.num_samples == len(dataset):
        return _Shuffled(len(dataset))
    if type(sampler) is torch_data.DistributedSampler:  # left in from DDP: all of the data, in slices
        return _Shuffled(len(dataset)) if sampler.shuffle else range(len(dataset))
    return None


def rounds_of(batches: int, world: int) -> int:
    """Steps of an epoch of so many batches."""
    return -(-batches // world)


def drawn(source: Iterable[Any], seed: tuple[int, ...]) -> list[Any]:
    """All that `source` gives where everything it may draw from was seeded; the script's generators are left as they are."""
    own = [getattr(thing, "generator", None) for thing in (source, getattr(source, "sampler", None))]
    with seeded(seed, [generator for generator in own if isinstance(generator, torch.Generator)]):
        return list(source)


@contextmanager
def seeded(parts: tuple[int, ...], own: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Inside, Python's, numpy's and torch's generators and `own` begin from `parts`; afterwards they are as before."""
    kept, states = generators(), [generator.get_state() for generator in own]
    value = seed_all(parts)
    for generator in own:
        generator.manual_seed(value)
    try:
        yield
    finally:
        put_generators(kept)
        for generator, state in zip(own, states, strict=True):
            generator.set_state(state)


def seed_all(parts: tuple[int, ...]) -> int:
    """Seed Python's, numpy's and torch's generators from `parts`; with which number."""
    value = random.Random(repr(parts)).getrandbits(63)  # noqa: S311 - a seed of the data's order, no key
    random.seed(value)
    torch.manual_seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value % (1 << 32))
    return value


class _Cut(Sequence[Indices]):
    """An order cut into batches, each when it is asked for."""

    def __init__(self, order: Any, size: int, drop_last: bool) -> None:
        self._order, self._size = order, size
        self._count = len(order) // size if drop_last else -(-len(order) // size)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < self._count:
            raise IndexError(number)
        part = self._order[number * self._size : (number + 1) * self._size]
        return part.tolist() if isinstance(part, torch.Tensor) else list(part)


class _Batch(list[Any]):
    """Sample indices, and what generators are seeded with before they are fetched."""

    def __init__(self, indices: Iterable[Any], seed: tuple[int, int, int]) -> None:
        super().__init__(indices)
        self.seed = seed


class _Given(torch_data.Sampler[list[Any]]):
    """Of the batches of an epoch those with these numbers."""

    def __init__(self, batches: Sequence[Indices], numbers: list[int], seed: tuple[int, int]) -> None:
        self._batches, self._numbers, self._seed = batches, numbers, seed

    def __iter__(self) -> Iterator[list[Any]]:
        return (_Batch(self._batches[number], (*self._seed, number)) for number in self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


class _Seeded(torch_data.Dataset[Any]):
    """The user's dataset. In a loader process, or `apart`, every batch is fetched with generators seeded from (seed, epoch, batch)."""

    def __init__(self, dataset: Any, apart: bool, whole: bool) -> None:
        self._dataset, self._apart, self._whole = dataset, apart, whole

    def __getitems__(self, indices: list[Any]) -> Any:
        if torch_data.get_worker_info() is not None and isinstance(indices, _Batch):
            seed_all(indices.seed)
        elif self._apart and isinstance(indices, _Batch):  # when it is read must not show in what the script draws
            with seeded(indices.seed):
                return self._fetch(indices)
        return self._fetch(indices)

    def _fetch(self, indices: list[Any]) -> Any:
        if self._whole:
            return self._dataset[indices[0]]
        many = getattr(self._dataset, "__getitems__", None)
        return list(many(indices) if many is not None else [self._dataset[i] for i in indices])

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __len__(self) -> int:
        return len(self._dataset)
