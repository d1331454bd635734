"""Slices of the data: every sample once an epoch whatever the number of ranks, and the same batches again from any place."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from psjob.api.data import _Plan
from psjob.process.errors import Refused


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Dice(Numbers):
    """A sample with noise from the generators that a loader process seeds."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index), torch.rand(1).item(), random.random()], dtype=torch.float64)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def plans(count: int, size: int, world: int, shuffle: bool = True, drop_last: bool = False, seed: int = 3) -> list[_Plan]:
    loader = DataLoader(Numbers(count), batch_size=size, shuffle=shuffle, drop_last=drop_last)
    return [_Plan(loader, seed, rank, world) for rank in range(world)]


sizes = st.tuples(st.integers(1, 60), st.integers(1, 9), st.integers(1, 7))


@given(sizes, st.booleans(), st.booleans(), st.integers(0, 5))
@settings(deadline=None)
def test_every_sample_is_seen_once_an_epoch(shape: tuple[int, int, int], shuffle: bool, drop_last: bool, epoch: int) -> None:
    count, size, world = shape
    seen: Counter[int] = Counter()
    batches = 0
    for plan in plans(count, size, world, shuffle, drop_last):
        for batch in plan.indices(epoch, 0):
            seen.update(batch)
            batches += 1
            assert len(batch) == size or not drop_last
    assert max(seen.values(), default=1) == 1
    assert len(seen) == (count // size * size if drop_last else count)
    assert batches == (count // size if drop_last else -(-count // size))


@given(sizes, st.integers(0, 3))
@settings(deadline=None)
def test_all_ranks_take_the_same_number_of_rounds(shape: tuple[int, int, int], epoch: int) -> None:
    """Where there are too few batches the last ranks have none in the last round, and only there."""
    count, size, world = shape
    made = plans(count, size, world)
    (rounds,) = {plan.rounds() for plan in made}
    have = [[plan.batch_of(turn) is not None for plan in made] for turn in range(rounds)]
    assert all(all(row) for row in have[:-1]) and have[-1][0]
    assert have[-1] == sorted(have[-1], reverse=True)


@given(sizes, st.integers(0, 3), st.data())
@settings(deadline=None)
def test_from_any_place_the_rest_is_the_same(shape: tuple[int, int, int], epoch: int, data: st.DataObject) -> None:
    count, size, world = shape
    for plan in plans(count, size, world):
        begin = data.draw(st.integers(0, plan.rounds()))
        whole = [list(batch) for batch in plan.indices(epoch, 0)]
        done = sum(plan.batch_of(turn) is not None for turn in range(begin))
        assert [list(batch) for batch in plan.indices(epoch, begin)] == whole[done:]


@given(sizes)
@settings(deadline=None)
def test_the_order_is_one_for_all_ranks_and_another_in_each_epoch_and_seed(shape: tuple[int, int, int]) -> None:
    """Taken together round by round, the ranks walk one permutation; so another number of ranks sees the same batches."""
    count, size, world = shape

    def walk(world: int, epoch: int, seed: int) -> list[list[int]]:
        made = plans(count, size, world, seed=seed)
        each = [iter(plan.indices(epoch, 0)) for plan in made]
        return [
            list(next(each[rank])) for turn in range(made[0].rounds()) for rank in range(world) if made[rank].batch_of(turn) is not None
        ]

    first = walk(world, 0, 3)
    assert first == walk(1, 0, 3)
    if count >= 20:
        assert first != walk(world, 1, 3) and first != walk(world, 0, 4)


def test_without_shuffling_the_order_is_the_datasets() -> None:
    assert [list(batch) for batch in plans(10, 3, 2, shuffle=False)[0].indices(0, 0)] == [[0, 1, 2], [6, 7, 8]]
    assert [list(batch) for batch in plans(10, 3, 2, shuffle=False)[1].indices(4, 0)] == [[3, 4, 5], [9]]


@pytest.mark.parametrize("processes", [0, 2])
def test_the_loader_gives_what_the_users_would(processes: int) -> None:
    """Its collate function and its processes are kept."""
    x = torch.arange(20.0).view(10, 2)
    user = DataLoader(TensorDataset(x, x.sum(1)), batch_size=4, shuffle=True, num_workers=processes)
    plan = _Plan(user, 1, 0, 1)
    found = list(plan.loader(0, 0))
    assert [len(batch) for batch in found] == [2, 2, 2]
    rows = torch.cat([batch[0] for batch in found])
    assert torch.equal(rows, x[[index for batch in plan.indices(0, 0) for index in batch]])
    assert torch.equal(torch.cat([batch[1] for batch in found]), rows.sum(1))


def test_loader_processes_draw_the_same_numbers_from_any_place() -> None:
    """Noise of a batch depends on (seed, epoch, batch), not on which process makes it or where the loop began."""
    whole = list(_Plan(DataLoader(Dice(24), batch_size=3, shuffle=True, num_workers=2), 1, 0, 2).loader(2, 0))
    again = list(_Plan(DataLoader(Dice(24), batch_size=3, shuffle=True, num_workers=1), 1, 0, 2).loader(2, 2))
    assert len(whole) == 4 and len(again) == 2
    assert all(torch.equal(one, other) for one, other in zip(whole[2:], again, strict=True))
    assert not torch.equal(whole[0][:, 1:], whole[1][:, 1:])
    other = next(iter(_Plan(DataLoader(Dice(24), batch_size=3, shuffle=False, num_workers=1), 1, 0, 2).loader(3, 0)))
    same = next(iter(_Plan(DataLoader(Dice(24), batch_size=3, shuffle=False, num_workers=1), 1, 0, 2).loader(2, 0)))
    assert torch.equal(other[:, 0], same[:, 0]) and not torch.equal(other[:, 1:], same[:, 1:])


TEN = Numbers(10)
REFUSED: dict[str, tuple[Any, str]] = {
    "a list": ([1, 2], "takes a torch DataLoader, got list"),
    "an iterable dataset": (DataLoader(Endless(), batch_size=2), "IterableDataset"),
    "no batch size": (DataLoader(TEN, batch_size=None), "give the DataLoader a batch_size"),
    "a sampler with weights": (DataLoader(TEN, batch_size=2, sampler=WeightedRandomSampler([1.0] * 10, 10)), "WeightedRandomSampler"),
    "with replacement": (DataLoader(TEN, batch_size=2, sampler=RandomSampler(TEN, replacement=True)), "each sample once an epoch"),
    "a part of the samples": (DataLoader(TEN, batch_size=2, sampler=RandomSampler(TEN, num_samples=4)), "each sample once an epoch"),
    "batches of its own": (
        DataLoader(TEN, batch_sampler=type("Mine", (BatchSampler,), {})(SequentialSampler(TEN), 2, False)),
        "batch_size instead of a batch_sampler",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_has_no_place_to_come_back_to_is_refused(name: str) -> None:
    loader, words = REFUSED[name]
    with pytest.raises(Refused, match=words):
        _Plan(loader, 0, 0, 2)
