"""Slices of streams: each batch goes to one rank, all ranks make as many rounds, and a place is found again with or without a state.

- Orders without an end, and long ones: each rank takes its batches as they are drawn, and finds its place again.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler, get_worker_info

from psjob.api.sample_order import keeps_iterator
from psjob.api.slices import SampleStream, Slices
from psjob.process.errors import Refused
from tests.support.soaking import rotating
from tests.tensors.datasets import Lines, Numbers

START = {"round": 0}


class Stateful(Lines):
    """Knows its place."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.place, self.made = 0, 0

    def __iter__(self) -> Any:
        info = get_worker_info()
        begin, step = (0, 1) if info is None else (info.id, info.num_workers)
        numbers = list(range(begin, self.count, step))
        while self.place < len(numbers):
            self.place += 1
            self.made += 1
            yield torch.tensor([float(numbers[self.place - 1]), random.random(), float(self.made)], dtype=torch.float64)
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.place = state["place"]


def feeds(dataset: Any, world: int, processes: int = 0, size: int | None = 3, **options: Any) -> list[list[Any]]:
    loader = DataLoader(dataset, batch_size=size, num_workers=processes, **options)
    return [list(SampleStream(loader, 7, rank, world).feed(2, START)) for rank in range(world)]


@pytest.mark.parametrize(
    ("count", "world", "processes"),
    [
        (40, 3, 0), (41, 2, 0), (5, 4, 0), (0, 2, 0), (40, 3, 1), (5, 4, 3),
        *(rotating(*row) for row in [(41, 2, 1), (5, 4, 1), (0, 2, 1), (40, 3, 3), (41, 2, 3), (0, 2, 3)]),
    ],
)  # fmt: skip
def test_every_sample_goes_to_one_rank_and_all_make_as_many_rounds(processes: int, count: int, world: int) -> None:
    found = feeds(Lines(count), world, processes)
    seen = Counter(int(row[0]) for feed in found for batch, again, _ in feed if not again for row in batch)
    assert seen == Counter(range(count))
    assert len({len(feed) for feed in found}) == 1
    assert all([again for _, again, _ in feed] == sorted(again for _, again, _ in feed) for feed in found)


def test_batches_are_those_of_the_users_loader() -> None:
    theirs = [batch[:, 0].tolist() for batch in DataLoader(Lines(20), batch_size=3)]
    found = feeds(Lines(20), 2)
    ours = [[batch[:, 0].tolist() for batch, again, _ in feed if not again] for feed in found]
    assert [one for pair in zip(*ours, strict=False) for one in pair] + ours[0][len(ours[1]) :] == theirs
    dropped = feeds(Lines(20), 2, drop_last=True)
    assert all(len(batch) == 3 for feed in dropped for batch, _, _ in feed)
    whole = feeds(Lines(4), 2, size=None)
    assert [[int(batch[0]) for batch, _, _ in feed] for feed in whole] == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("kind", "processes", "samples"),
    [
        (Lines, 0, 50),
        (Stateful, 0, 50),
        (Stateful, 2, 18),
        *(rotating(kind, processes, 50) for kind in (Lines, Stateful) for processes in (1, 3)),
    ],
)
def test_from_any_place_the_rest_is_the_same(kind: type[Lines], processes: int, samples: int) -> None:
    """Numbers drawn for a sample are the same too."""
    for rank in range(2):
        loader = DataLoader(kind(samples), batch_size=4, num_workers=processes)
        whole = list(SampleStream(loader, 1, rank, 2).feed(0, START))
        for begin in range(len(whole) + 1):
            place = START if begin == 0 else whole[begin - 1][2]
            loader = DataLoader(kind(samples), batch_size=4, num_workers=processes)
            rest = list(SampleStream(loader, 1, rank, 2).feed(0, place))
            assert [again for _, again, _ in rest] == [again for _, again, _ in whole[begin:]]
            for (batch, again, at), (other, _, there) in zip(rest, whole[begin:], strict=True):
                assert at == there
                assert again or torch.equal(batch[:, :2], other[:, :2])


def test_a_state_saves_reading_again_and_without_one_the_cost_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        place = list(SampleStream(DataLoader(Stateful(30), batch_size=2), 0, 0, 1).feed(0, START))[9][2]
        rest = list(SampleStream(DataLoader(Stateful(30), batch_size=2), 0, 0, 1).feed(0, place))
        assert not caplog.records and int(rest[0][0][0, 2]) == 1, "the first sample it made"
        place = list(SampleStream(DataLoader(Lines(30), batch_size=2), 0, 0, 1).feed(0, START))[9][2]
        list(SampleStream(DataLoader(Lines(30), batch_size=2), 0, 0, 1).feed(0, place))
    assert "Lines has no state_dict: 10 batches are read again" in caplog.text


def test_another_number_of_loader_processes_is_refused() -> None:
    place = list(SampleStream(DataLoader(Lines(30), batch_size=2, num_workers=2), 0, 0, 1).feed(0, START))[3][2]
    with pytest.raises(Refused, match="2 loader processes, now num_workers makes 1"):
        list(SampleStream(DataLoader(Lines(30), batch_size=2), 0, 0, 1).feed(0, place))


def test_the_scripts_own_generators_are_left_alone() -> None:
    feed = SampleStream(DataLoader(Lines(30), batch_size=2), 0, 0, 1).feed(0, START)
    next(feed)  # torch draws a seed as a loader begins
    kept = torch.get_rng_state(), random.getstate()
    for _ in feed:
        assert torch.equal(torch.get_rng_state(), kept[0]) and random.getstate() == kept[1]


TEN = Numbers(10)


class Infinite(Sampler[int]):
    """Continues forever, over shuffles of all samples. Made for all ranks, whatever its attributes are called."""

    def __init__(self, rank: int = 0, num_replicas: int = 1, seed: int = 0) -> None:
        self.rank, self.num_replicas, self.seed = rank, num_replicas, seed

    def __iter__(self) -> Iterator[int]:
        order = np.arange(10)
        drawn = np.random.RandomState(self.seed)
        while True:
            drawn.shuffle(order)
            yield from order.tolist()[self.rank :: self.num_replicas]


class Repeated:
    """Of another sampler, again and again; no class of torch's."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class Iterations(BatchSampler):
    """So many batches, over as many epochs of another one as that takes."""

    def __init__(self, batches: BatchSampler, iterations: int) -> None:
        self.batch_sampler, self.iterations = batches, iterations

    def __iter__(self) -> Iterator[list[int]]:
        return islice(iter(Repeated(self.batch_sampler)), self.iterations)

    def __len__(self) -> int:
        return self.iterations


class Drawn(Sampler[int]):
    """Draws from a generator of its own, of any kind."""

    def __init__(self, generator: Any) -> None:
        self.own = generator

    def __iter__(self) -> Iterator[int]:
        while True:
            if isinstance(self.own, torch.Generator):
                yield int(torch.randint(10, (1,), generator=self.own))
            else:
                yield int(self.own.integers(10) if isinstance(self.own, np.random.Generator) else self.own.randint(0, 9))


def endless(**options: Any) -> DataLoader[Any]:
    return DataLoader(TEN, **options)


ENDLESS: dict[str, Any] = {
    "for ever": lambda: endless(batch_size=2, sampler=Infinite()),
    "again and again": lambda: endless(batch_sampler=Repeated(BatchSampler(RandomSampler(TEN), 3, False))),
    "single samples": lambda: endless(batch_size=None, sampler=Repeated(RandomSampler(TEN))),
    "ten thousand million": lambda: endless(batch_size=2, sampler=RandomSampler(TEN, replacement=True, num_samples=10**10)),
    "torch's generator": lambda: endless(batch_size=2, sampler=Drawn(torch.Generator())),
    "numpy's generator": lambda: endless(batch_size=2, sampler=Drawn(np.random.default_rng())),
    "Python's generator": lambda: endless(batch_size=2, sampler=Drawn(random.Random())),
}


@pytest.mark.parametrize("name", sorted(ENDLESS))
def test_ranks_share_an_order_without_an_end_and_find_their_place_in_it(name: str) -> None:
    """Batch j goes to rank j mod W, whatever W is; the script's generators are as they were."""

    def taken(rank: int, world: int, begin: int, count: int) -> tuple[list[Any], list[int]]:
        source = Slices(ENDLESS[name](), 3, rank, world)
        feed = source.feed(1, begin)
        found = [(batch.tolist() if isinstance(batch, torch.Tensor) else batch, source.order_at(begin + turn + 1)) for turn, (batch, _)
                 in enumerate(islice(feed, count))]  # fmt: skip
        assert source.rounds is None
        return [batch for batch, _ in found], [order for _, order in found]

    kept = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    alone, _ = taken(0, 1, 0, 60)
    ranks = [taken(rank, 3, 0, 20) for rank in range(3)]
    assert [batch for round in zip(*(batches for batches, _ in ranks), strict=True) for batch in round] == alone
    assert ranks[0][1] == ranks[1][1] == ranks[2][1]
    rest = taken(1, 3, 13, 7)
    assert rest == (ranks[1][0][13:], ranks[1][1][13:])
    assert random.getstate() == kept[1] and np.random.get_state()[1].tolist() == kept[2]  # type: ignore[index, union-attr]


def test_one_that_comes_to_an_end_after_all_gives_the_last_round_as_any() -> None:
    class Seven(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(7))

    def given(rank: int, begin: int = 0) -> list[tuple[list[int], bool]]:
        feed = Slices(endless(batch_size=2, sampler=Seven()), 0, rank, 3).feed(0, begin)
        return [(batch.tolist(), again) for batch, again in feed]

    assert given(0) == [([0, 1], False), ([6], False)]
    assert given(1) == [([2, 3], False), ([0, 1], True)] and given(2) == [([4, 5], False), ([2, 3], True)]
    assert given(1, 1) == [([0, 1], True)] and given(1, 2) == []


def test_with_loader_processes_the_batches_are_the_same() -> None:
    found = [
        [batch.tolist() for batch, _ in islice(Slices(endless(batch_size=2, sampler=Infinite(), num_workers=n), 0, 1, 2).feed(0, 2), 9)]
        for n in (0, 2)
    ]
    assert found[0] == found[1]


def test_what_never_gives_the_same_is_refused_before_it_is_trained_on() -> None:
    class Restless(Infinite):
        def __iter__(self) -> Iterator[int]:
            self.seed += 1
            return super().__iter__()

    with pytest.raises(Refused, match="Restless gives another order each time"):
        Slices(endless(batch_size=2, sampler=Restless()), 0, 0, 2).feed(0, 0)
    with pytest.raises(Refused, match=r"Infinite gives each rank its part.*rank=0"):
        Slices(endless(batch_size=2, sampler=Infinite(1, 2)), 0, 0, 2)


def test_a_shuffle_that_fits_in_no_memory_is_refused_with_what_does() -> None:
    loader = DataLoader(Numbers(10**13), batch_size=2, shuffle=True)
    with pytest.raises(Refused, match=r"10000000000000 samples does not fit in memory; .* replacement=True"):
        Slices(loader, 0, 0, 2).feed(0, 0)
    loader = DataLoader(Numbers(10**13), batch_size=2)
    assert next(Slices(loader, 0, 1, 2).feed(0, 0))[0].tolist() == [2, 3]


@pytest.mark.parametrize("shuffle", [True, False])
def test_torchs_slices_within_other_samplers_are_those_of_all_samples(shuffle: bool) -> None:
    """Every sample once in each five batches of two, from whichever rank's sampler: as torchvision's references cut batches by hand."""

    def batches(rank: int, made: Any) -> list[list[int]]:
        sampler = DistributedSampler(TEN, num_replicas=2, rank=rank, shuffle=shuffle)
        found = [list(map(int, batch)) for batch in Slices(endless(batch_sampler=made(sampler)), 0, rank, 2).batches(4)]
        assert (sampler.num_replicas, sampler.rank, len(sampler)) == (2, rank, 5), "as the script has made it"
        return found

    for made in (lambda sampler: BatchSampler(sampler, 2, False), lambda sampler: Iterations(BatchSampler(sampler, 2, False), 10)):
        one, other = (batches(rank, made) for rank in range(2))
        assert one == other
        assert sorted(chain(*one[:5])) == list(range(10))
        assert (sorted(chain(*one[:5])) == list(chain(*one[:5]))) is not shuffle


class Epochs(DataLoader[Any]):
    """Keeps its processes alive: one iterator over a batch sampler that never ends, as timm's and YOLO's loaders."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.iterator)


class Scaled(Epochs):
    """Does more than to hand on."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch * 2


def test_a_loader_that_keeps_its_iterator_is_taken_apart_if_it_only_hands_on() -> None:
    loader = Epochs(TEN, batch_size=3, shuffle=True)
    assert keeps_iterator(loader) == "iterator" and keeps_iterator(Scaled(TEN, batch_size=3)) is None
    for epoch in (0, 2):
        seen = [[batch.tolist() for batch, again in Slices(loader, 1, rank, 2).feed(epoch, 0) if not again] for rank in range(2)]
        assert sorted(chain(*seen[0], *seen[1])) == list(range(10)), "a pass is one epoch of the loader's"
    assert sorted(chain(*(batch.tolist() for batch in loader))) == list(range(10)), "its own pass is as it was"


def test_samplers_that_count_their_epochs_draw_the_same_when_they_are_asked_again() -> None:
    class Counts(Sampler[int]):
        epoch = 0

        def __init__(self, setter: bool) -> None:
            self.epoch = 0
            if setter:
                self.set_epoch = lambda epoch: setattr(self, "epoch", epoch)

        def __iter__(self) -> Iterator[int]:
            order = torch.randperm(10, generator=torch.Generator().manual_seed(self.epoch)).tolist()
            yield from order
            self.epoch += 1

        def __len__(self) -> int:
            return 10

    class Grouped(BatchSampler):
        """Seeds a generator that inner samplers share."""

        def __init__(self, several: list[Any], generator: torch.Generator) -> None:
            super().__init__(SequentialSampler(TEN), 2, False)
            self.batch_samplers, self.generator = several, generator

        def __iter__(self) -> Iterator[list[int]]:
            return (batch for pair in zip(*self.batch_samplers, strict=True) for batch in pair)

    shared = torch.Generator()
    grouped = Grouped([BatchSampler(RandomSampler(TEN, generator=shared), 2, False) for _ in range(2)], shared)
    for loader in (*(endless(batch_size=2, sampler=Counts(setter)) for setter in (True, False)), endless(batch_sampler=grouped)):
        orders = [list(Slices(loader, 0, rank, 2).batches(epoch)) for rank in range(2) for epoch in (0, 1)]
        assert orders[0] == orders[2] != orders[1] == orders[3]
