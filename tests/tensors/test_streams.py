"""Slices of streams: each batch goes to one rank, all ranks make as many rounds, and a place is found again with or without a state."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from psjob.api.slices import Stream
from psjob.process.errors import Refused
from tests.soaking import rotating

START = {"round": 0}


class Lines(IterableDataset[Any]):
    """Shared out to loader processes as torch's manual has it; each sample has a number drawn for it."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        info = get_worker_info()
        begin, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(begin, self.count, step):
            yield torch.tensor([float(number), random.random(), torch.rand(1).item()], dtype=torch.float64)


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
    return [list(Stream(loader, 7, rank, world).feed(2, START)) for rank in range(world)]


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
        whole = list(Stream(loader, 1, rank, 2).feed(0, START))
        for begin in range(len(whole) + 1):
            place = START if begin == 0 else whole[begin - 1][2]
            loader = DataLoader(kind(samples), batch_size=4, num_workers=processes)
            rest = list(Stream(loader, 1, rank, 2).feed(0, place))
            assert [again for _, again, _ in rest] == [again for _, again, _ in whole[begin:]]
            for (batch, again, at), (other, _, there) in zip(rest, whole[begin:], strict=True):
                assert at == there
                assert again or torch.equal(batch[:, :2], other[:, :2])


def test_a_state_saves_reading_again_and_without_one_the_cost_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        place = list(Stream(DataLoader(Stateful(30), batch_size=2), 0, 0, 1).feed(0, START))[9][2]
        rest = list(Stream(DataLoader(Stateful(30), batch_size=2), 0, 0, 1).feed(0, place))
        assert not caplog.records and int(rest[0][0][0, 2]) == 1, "the first sample it made"
        place = list(Stream(DataLoader(Lines(30), batch_size=2), 0, 0, 1).feed(0, START))[9][2]
        list(Stream(DataLoader(Lines(30), batch_size=2), 0, 0, 1).feed(0, place))
    assert "Lines has no state_dict: 10 batches are read again" in caplog.text


def test_another_number_of_loader_processes_is_refused() -> None:
    place = list(Stream(DataLoader(Lines(30), batch_size=2, num_workers=2), 0, 0, 1).feed(0, START))[3][2]
    with pytest.raises(Refused, match="2 loader processes, now num_workers makes 1"):
        list(Stream(DataLoader(Lines(30), batch_size=2), 0, 0, 1).feed(0, place))


def test_the_scripts_own_generators_are_left_alone() -> None:
    feed = Stream(DataLoader(Lines(30), batch_size=2), 0, 0, 1).feed(0, START)
    next(feed)  # torch draws a seed as a loader begins
    kept = torch.get_rng_state(), random.getstate()
    for _ in feed:
        assert torch.equal(torch.get_rng_state(), kept[0]) and random.getstate() == kept[1]
