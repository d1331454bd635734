"""Slices of the data: every sample once an epoch whatever the number of ranks, and the same batches again from any place."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from psjob.api.data import ShardedLoader
from psjob.api.slices import Slices, rounds_of
from psjob.process.errors import Refused
from tests.tensors.datasets import Numbers


class Dice(Numbers):
    """A sample with noise from the generators that a loader process seeds."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index), torch.rand(1).item(), random.random()], dtype=torch.float64)


def plans(count: int, size: int, world: int, shuffle: bool = True, drop_last: bool = False, seed: int = 3) -> list[Slices]:
    loader = DataLoader(Numbers(count), batch_size=size, shuffle=shuffle, drop_last=drop_last)
    return [Slices(loader, seed, rank, world) for rank in range(world)]


def mine(plan: Slices, epoch: int, begin: int = 0) -> list[list[int]]:
    """A rank's own batches."""
    batches = plan.batches(epoch)
    return [batches[number] for number, again in plan.turns(len(batches), begin) if not again]


sizes = st.tuples(st.integers(1, 60), st.integers(1, 9), st.integers(1, 7))


@given(sizes, st.booleans(), st.booleans(), st.integers(0, 5))
def test_every_sample_is_seen_once_an_epoch(shape: tuple[int, int, int], shuffle: bool, drop_last: bool, epoch: int) -> None:
    count, size, world = shape
    seen: Counter[int] = Counter()
    batches = 0
    for plan in plans(count, size, world, shuffle, drop_last):
        for batch in mine(plan, epoch):
            seen.update(batch)
            batches += 1
            assert len(batch) == size or not drop_last
    assert max(seen.values(), default=1) == 1
    assert len(seen) == (count // size * size if drop_last else count)
    assert batches == (count // size if drop_last else -(-count // size))


@given(sizes, st.integers(0, 3))
def test_all_ranks_take_the_same_number_of_rounds(shape: tuple[int, int, int], epoch: int) -> None:
    """If there are too few batches the last ranks are given others in the last round, and only there."""
    count, size, world = shape
    made = plans(count, size, world)
    batches = len(made[0].batches(epoch))
    again = [[other for _, other in plan.turns(batches, 0)] for plan in made]
    assert {len(turns) for turns in again} == {rounds_of(batches, world)}
    last = [turns[-1] for turns in again]
    assert not any(other for turns in again for other in turns[:-1]) and not last[0] and last == sorted(last)


@given(sizes, st.integers(0, 3), st.data())
def test_from_any_place_the_rest_is_the_same(shape: tuple[int, int, int], epoch: int, data: st.DataObject) -> None:
    count, size, world = shape
    for plan in plans(count, size, world):
        batches = len(plan.batches(epoch))
        begin = data.draw(st.integers(0, rounds_of(batches, world)))
        assert plan.turns(batches, begin) == plan.turns(batches, 0)[begin:]


@given(sizes)
def test_the_order_is_one_for_all_ranks_and_another_in_each_epoch_and_seed(shape: tuple[int, int, int]) -> None:
    """Taken together round by round, the ranks walk one permutation; so another number of ranks sees the same batches."""
    count, size, world = shape

    def walk(world: int, epoch: int, seed: int) -> list[list[int]]:
        each = [mine(plan, epoch) for plan in plans(count, size, world, seed=seed)]
        return [batches[turn] for turn in range(len(each[0])) for batches in each if turn < len(batches)]

    first = walk(world, 0, 3)
    assert first == walk(1, 0, 3)
    if count >= 20:
        assert first != walk(world, 1, 3) and first != walk(world, 0, 4)


def test_without_shuffling_the_order_is_the_datasets() -> None:
    assert mine(plans(10, 3, 2, shuffle=False)[0], 0) == [[0, 1, 2], [6, 7, 8]]
    assert mine(plans(10, 3, 2, shuffle=False)[1], 4) == [[3, 4, 5], [9]]


def test_a_rank_without_a_batch_is_given_one_of_the_same_epoch_again() -> None:
    plan = plans(9, 3, 2, shuffle=False)[1]
    assert [(batch.tolist(), again) for batch, again in plan.feed(0, 0)] == [([3, 4, 5], False), ([0, 1, 2], True)]


@pytest.mark.parametrize("processes", [0, 2])
def test_the_loader_gives_what_the_users_would(processes: int) -> None:
    """Its collate function and its processes are kept."""
    x = torch.arange(20.0).view(10, 2)
    user = DataLoader(TensorDataset(x, x.sum(1)), batch_size=4, shuffle=True, num_workers=processes)
    plan = Slices(user, 1, 0, 1)
    found = [batch for batch, _ in plan.feed(0, 0)]
    assert [len(batch) for batch in found] == [2, 2, 2]
    rows = torch.cat([batch[0] for batch in found])
    assert torch.equal(rows, x[[index for batch in mine(plan, 0) for index in batch]])
    assert torch.equal(torch.cat([batch[1] for batch in found]), rows.sum(1))


def test_loader_processes_draw_the_same_numbers_from_any_place() -> None:
    """Noise of a batch depends on (seed, epoch, batch), not on which process makes it or where the loop began."""

    def noise(epoch: int, begin: int, processes: int, shuffle: bool = True) -> list[Any]:
        loader = DataLoader(Dice(24), batch_size=3, shuffle=shuffle, num_workers=processes)
        return [batch for batch, _ in Slices(loader, 1, 0, 2).feed(epoch, begin)]

    whole, again = noise(2, 0, 2), noise(2, 2, 1)
    assert len(whole) == 4 and len(again) == 2
    assert all(torch.equal(one, other) for one, other in zip(whole[2:], again, strict=True))
    assert not torch.equal(whole[0][:, 1:], whole[1][:, 1:])
    other, same = noise(3, 0, 1, shuffle=False)[0], noise(2, 0, 1, shuffle=False)[0]
    assert torch.equal(other[:, 0], same[:, 0]) and not torch.equal(other[:, 1:], same[:, 1:])


class Buckets(BatchSampler):
    """Batches of neighbours, in an order of its own each time; another number of them each epoch."""

    def __init__(self, count: int) -> None:
        super().__init__(SequentialSampler(Numbers(count)), 3, False)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        found = list(super().__iter__())
        random.shuffle(found)
        return iter(found[: len(found) - self.epoch])


class Own(Sampler[int]):
    """The even samples, in an order drawn from numpy's generator."""

    def __iter__(self) -> Any:
        return iter((np.random.permutation(5) * 2).tolist())

    def __len__(self) -> int:
        return 5


TEN = Numbers(10)
DRAWN: dict[str, tuple[Any, set[int]]] = {
    "weights": (DataLoader(TEN, batch_size=2, sampler=WeightedRandomSampler([0.0, 1.0] * 5, 30)), {1, 3, 5, 7, 9}),
    "with replacement": (DataLoader(TEN, batch_size=2, sampler=RandomSampler(TEN, replacement=True, num_samples=80)), set(range(10))),
    "a part of the samples": (DataLoader(TEN, batch_size=2, sampler=SubsetRandomSampler(range(2, 10))), set(range(2, 10))),
    "a generator of its own": (DataLoader(TEN, batch_size=2,
        sampler=RandomSampler(TEN, num_samples=60, replacement=True, generator=torch.Generator())), set(range(10))),
    "a sampler of one's own": (DataLoader(TEN, batch_size=2, sampler=Own()), {0, 2, 4, 6, 8}),
    "batches of one's own": (DataLoader(TEN, batch_sampler=Buckets(10)), set(range(10))),
    "no batch size": (DataLoader(TEN, batch_size=None, shuffle=True), set(range(10))),
    "left in from DDP": (DataLoader(TEN, batch_size=2, sampler=DistributedSampler(TEN, num_replicas=4, rank=1)), set(range(10))),
    "left in, within another": (DataLoader(TEN, batch_sampler=BatchSampler(DistributedSampler(TEN, num_replicas=4, rank=1), 2, False)),
        set(range(10))),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(DRAWN))
def test_an_order_that_is_drawn_is_the_same_on_all_ranks_and_again_after_a_restart(name: str) -> None:
    loader, samples = DRAWN[name]
    kept = torch.get_rng_state(), random.getstate()
    made = [Slices(loader, 5, rank, 3) for rank in range(3)]
    orders = [list(plan.batches(0)) for plan in (*made, made[0])]
    assert all(order == orders[0] for order in orders)
    assert {sample for batch in orders[0] for sample in batch} == samples
    assert list(made[0].batches(1)) != orders[0]
    assert torch.equal(torch.get_rng_state(), kept[0]) and random.getstate() == kept[1], "the script draws as it would alone"


@pytest.mark.parametrize("name", sorted(DRAWN))
def test_a_loaders_length_is_that_of_its_passes(name: str) -> None:
    """A sampler that was left in from DDP counts its own rank's samples, and gives all."""
    loader, _ = DRAWN[name]
    plan = Slices(loader, 5, 0, 3)
    batches = len(plan.batches(0))
    assert len(ShardedLoader(loader, plan, 3, None)) == rounds_of(batches, 3)


def test_batches_of_ones_own_go_round_the_ranks() -> None:
    made = [Slices(DataLoader(TEN, batch_sampler=Buckets(10)), 0, rank, 2) for rank in range(2)]
    assert [len(mine(plan, 0)) for plan in made] == [2, 2] and [len(mine(plan, 1)) for plan in made] == [2, 1]


def test_a_dataset_that_gives_whole_batches_is_left_to_do_so() -> None:
    class Whole(Numbers):
        def __getitem__(self, index: int) -> Any:
            return torch.full((3,), index)

    found = [batch for batch, _ in Slices(DataLoader(Whole(4), batch_size=None), 0, 1, 2).feed(0, 0)]
    assert [batch.tolist() for batch in found] == [[1, 1, 1], [3, 3, 3]]


class Restless(Own):
    """Counts how often it was asked."""

    asked = 0

    def __iter__(self) -> Any:
        self.asked += 1
        return iter([self.asked % 10] * 5)


class Halves(Own):
    """Gives a rank its part."""

    num_replicas, rank = 2, 0


REFUSED: dict[str, tuple[Any, str]] = {
    "never the same": (DataLoader(TEN, batch_size=2, sampler=Restless()), "Restless gives another order each time"),
    "a slice already": (DataLoader(TEN, batch_size=2, sampler=Halves()), "Halves gives each rank its part"),
    "slices of batches": (DataLoader(TEN, batch_sampler=BatchSampler(Halves(), 2, False)), "Halves gives each rank its part"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_has_no_place_to_come_back_to_is_refused(name: str) -> None:
    loader, words = REFUSED[name]
    with pytest.raises(Refused, match=words):
        Slices(loader, 0, 0, 2).batches(0)
