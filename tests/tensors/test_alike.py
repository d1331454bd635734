"""Whether workers read the same data: what a worker tells of its data, and what is said where two differ."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from psjob.api.slices import SampleStream, Slices, Yielded, has_its_own
from psjob.protocol.coordinator.consistency import MOST_PASSES, Alike, Difference, Told
from tests.tensors.datasets import Joins, Normalises

WORLD = 2
Made = Callable[[int], Any]


def told(loader: Any, rank: int, number: int = 0) -> Told:
    """What shard 0 reads of what this rank tells with its first batch."""
    kind = Yielded if has_its_own(loader) else SampleStream if isinstance(loader.dataset, IterableDataset) else Slices
    source: Any = kind(loader, 5, rank, WORLD)
    feed = source.feed(number, 0) if kind is Slices else source.feed(number, {"round": 0})
    next(iter(feed), None)
    found = Told.of({"data": {**source.facts(), "site": 1, "number": number}})
    assert found is not None
    return found


def seen(make: Made) -> Difference | None:
    """What is said of two workers, of which rank 1 tells first."""
    alike = Alike()
    assert alike.see(1, told(make(1), 1)) is None
    return alike.see(0, told(make(0), 0))


class Images(Dataset[Any]):
    """Files of a list, read with augmentation that draws in some way."""

    def __init__(self, files: list[str], draw: Callable[[], float], rank: int = 0) -> None:
        self.files, self.draw, self.rank = files, draw, rank

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        return torch.full((2,), float(len(self.files[index]))) + self.draw()


class Strides(Dataset[Any]):
    """Maps indices to its rank's part of data that are whole."""

    def __init__(self, data: torch.Tensor, rank: int) -> None:
        self.data, self.rank = data, rank

    def __len__(self) -> int:
        return len(self.data) // WORLD

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index * WORLD + self.rank]


class Reads(IterableDataset[Any]):
    def __init__(self, rank: int, begin: int, step: int, draw: Callable[[], float] = lambda: 0.0) -> None:
        self.begin, self.step, self.draw = begin, step, draw

    def __iter__(self) -> Any:
        return (torch.tensor([n + self.draw()]) for n in range(self.begin, 64, self.step))


class Hidden(IterableDataset[Any]):
    """Slices in its `__iter__`, by what it keeps nowhere."""

    def __iter__(self) -> Any:
        return (torch.tensor([float(n)]) for n in range(Hidden.rank, 64, WORLD))

    rank = 0


def hidden(rank: int) -> Any:
    Hidden.rank = rank
    return DataLoader(Hidden(), batch_size=4)


X = torch.arange(64.0)[:, None]
OWN = [np.random.default_rng() for _ in range(WORLD)]


def files(rank: int, count: int = 12) -> list[str]:
    return [f"/machine{rank}/images/{'x' * (1 + n % 7)}{n}.png" for n in range(count)]


def split(rank: int) -> Any:
    return random_split(TensorDataset(X), [32, 32], generator=torch.Generator().manual_seed(3))[0]


def loader(data: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, **{"batch_size": 4, **options})


ALIKE: dict[str, Made] = {
    "tensors": lambda rank: loader(TensorDataset(X, X.sum(1)), shuffle=True),
    "a part, of the same seed": lambda rank: loader(split(rank)),
    "augmented from seeded generators": lambda rank: loader(Images(files(0), random.random)),
    "augmented without a seed": lambda rank: loader(Images(files(0), lambda: float(OWN[rank].random()))),
    "files in a folder of each machine, and the rank for its log": lambda rank: loader(Images(files(rank), random.random, rank)),
    "with other numbers of loader processes": lambda rank: loader(TensorDataset(X), num_workers=rank),
    "arrays": lambda rank: loader(np.arange(64.0)),
    "a list": lambda rank: loader([{"text": f"line {n}", "label": n} for n in range(64)]),
    "a stream": lambda rank: loader(Reads(rank, 0, 1)),
    "a stream that draws with a seed": lambda rank: loader(Reads(rank, 0, 1, random.random)),
    "a loader of its own": lambda rank: Normalises(TensorDataset(X), batch_size=4, shuffle=True),
    "long orders": lambda rank: loader(TensorDataset(X), sampler=RandomSampler(X, replacement=True, num_samples=10**10)),  # type: ignore[arg-type]
}
DIFFER: dict[str, tuple[Made, str]] = {
    "tensors sliced by hand": (lambda rank: loader(TensorDataset(X[rank::2])), "the 32 samples of TensorDataset are not the same"),
    "slices of other lengths": (lambda rank: loader(TensorDataset(X[: 30 + rank])), "has 31 samples of TensorDataset, worker 0 30"),
    "a Subset by rank": (lambda rank: loader(Subset(TensorDataset(X), range(rank, 64, 2))), "the 32 samples of Subset"),
    "parts that were joined": (
        lambda rank: loader(ConcatDataset([TensorDataset(X), TensorDataset(X[rank::2])])), "the 96 samples of ConcatDataset"
    ),
    "a list by rank": (lambda rank: loader([{"text": f"line {n}"} for n in range(rank, 64, 2)]), "the 32 samples of list"),
    "an array by rank": (lambda rank: loader(np.arange(64)[rank::2]), "the 32 samples of ndarray"),
    "files by rank": (lambda rank: loader(Images(files(0, 40)[rank::2], random.random)), "the 20 samples of Images"),
    "a mapping of indices": (lambda rank: loader(Strides(X, rank)), "the 32 samples of Strides"),
    "a split without a seed": (
        lambda rank: loader(random_split(TensorDataset(X), [32, 32], generator=torch.Generator().manual_seed(rank))[0]),
        "made with one seed",
    ),
    "batches of other sizes": (lambda rank: loader(TensorDataset(X), batch_size=4 + 12 * rank), "batches of 16 samples, worker 0 of 4"),
    "batches of other sizes of a stream": (lambda rank: loader(Reads(0, 0, 1), batch_size=4 + 12 * rank), "batches of 16 samples"),
    "a stream by other numbers of processes": (
        lambda rank: loader(Reads(0, 0, 1), num_workers=1 + rank), "Reads by num_workers=2, worker 0 by 1"
    ),
    "an order that only one shuffles": (lambda rank: loader(TensorDataset(X), shuffle=rank == 1), "draws another order of TensorDataset"),
    "another class": (lambda rank: loader([X, TensorDataset(X)][rank]), "worker 1 reads TensorDataset by DataLoader, worker 0 Tensor"),
    "an order of another seed": (
        lambda rank: loader(TensorDataset(X), sampler=torch.randperm(64, generator=torch.Generator().manual_seed(rank)).tolist()),
        "draws another order of TensorDataset",
    ),
    "a stream by rank": (lambda rank: loader(Reads(rank, rank, 2)), "reads other samples from Reads.*keeps other numbers"),
    "a loader of its own, by rank": (lambda rank: Joins(TensorDataset(X[rank::2]), batch_size=4), "the 32 samples of TensorDataset"),
}  # fmt: skip
UNSURE = "slices by rank by itself, or draws without a seed"
ONLY_TOLD: dict[str, tuple[Made, str]] = {
    "a stream that draws without a seed": (lambda rank: loader(Reads(0, 0, 1, lambda: float(OWN[rank].random()))), UNSURE),
    "a stream that slices by what it keeps nowhere": (hidden, UNSURE),
    "weights of a worker's own": (
        lambda rank: loader(TensorDataset(X), sampler=WeightedRandomSampler([1.0 + rank * n for n in range(64)], 64)),
        "draws other samples of TensorDataset than worker 0, as by weights of its own",
    ),
}


@pytest.mark.parametrize("name", sorted(ALIKE))
def test_workers_that_read_the_same_are_left_alone(name: str) -> None:
    assert seen(ALIKE[name]) is None


@pytest.mark.parametrize("name", sorted(DIFFER))
def test_data_that_a_rank_has_its_part_of_are_refused_with_a_remedy(name: str) -> None:
    make, words = DIFFER[name]
    found = seen(make)
    assert found is not None and found.sure
    assert re.search(words, found.sentence), found.sentence
    assert "worker 1" in found.sentence and "\n" not in found.sentence


@pytest.mark.parametrize("name", sorted(ONLY_TOLD))
def test_of_data_that_may_only_be_drawn_anew_it_is_said(name: str) -> None:
    make, words = ONLY_TOLD[name]
    found = seen(make)
    assert found is not None and not found.sure and words in found.sentence


def test_passes_of_other_places_and_later_ones_are_not_compared() -> None:
    """A worker that has begun again tells its data anew, of a pass that others were in before."""
    one, other = (told(loader(TensorDataset(X[rank::2])), rank) for rank in range(2))
    alike = Alike()
    assert alike.see(0, one) is None and alike.see(0, other) is None, "of one worker"
    for number in range(1, 2 * MOST_PASSES):
        assert alike.see(0, told(loader(TensorDataset(X)), 0, number) if number < 3 else dataclasses.replace(one, number=number)) is None
    assert len(alike._told) == MOST_PASSES


@pytest.mark.parametrize(
    "body", [{}, {"data": 1}, {"data": {}}, {"data": {"site": -1, "number": 0}}, {"data": {"site": 0, "number": True}}, {"data": [0]}]
)
def test_what_is_not_in_shape_says_nothing(body: dict[str, Any]) -> None:
    assert Told.of(body) is None


def test_what_a_worker_writes_is_bounded() -> None:
    found = Told.of({"data": {"site": 0, "number": 0, "data": "a\n" * 500, "length": "many", "first": 1.5, "ordered": 1}})
    assert found is not None and found.data == "a" * 80 and (found.length, found.first, found.ordered) == (None, None, False)
