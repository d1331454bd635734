"""DataLoaders whose class makes batches in a way of its own: what they yield goes round the ranks, and comes again after a restart."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset, get_worker_info

from psjob.api.data import shard
from psjob.api.slices import SampleStream, Slices, Yielded, has_its_own
from psjob.process.errors import Refused
from tests.support.soaking import rotating
from tests.tensors.datasets import Joins, Lines, Normalises

DATA = TensorDataset(torch.arange(22.0)[:, None])
START = {"round": 0}


class Names(DataLoader[Any]):
    """Batches as dicts, with noise that the main process draws."""

    def __iter__(self) -> Any:
        for (x,) in super().__iter__():
            yield {"x": x, "noise": torch.rand(1), "other": random.random(), "third": np.random.rand()}


class Pairs(DataLoader[Any]):
    """Joins two batches to one, so that it gives half as many."""

    def __iter__(self) -> Any:
        held = None
        for (x,) in super().__iter__():
            if held is not None:
                yield torch.cat([held, x])
            held = x if held is None else None

    def __len__(self) -> int:
        return super().__len__() // 2


KINDS: dict[str, Any] = {
    "normalises": lambda **o: Normalises(DATA, batch_size=3, shuffle=True, **o),
    "names": lambda **o: Names(DATA, batch_size=3, shuffle=True, **o),
    "joins": lambda **o: Joins(DATA, batch_size=3, shuffle=True, **o),
    "pairs": lambda **o: Pairs(DATA, batch_size=3, shuffle=True, **o),
    "a generator of its own": lambda **o: Normalises(DATA, batch_size=3, shuffle=True, generator=torch.Generator(), **o),
    "a stream": lambda **o: Names(_Rows(), batch_size=3, **o),
    "left in from DDP": lambda **o: Joins(DATA, batch_size=3, sampler=DistributedSampler(DATA, num_replicas=2, rank=1), **o),
}


class _Rows(Lines):
    def __init__(self) -> None:
        super().__init__(22)

    def __iter__(self) -> Any:
        return ((row[:1].float(),) for row in super().__iter__())


def plain(value: Any) -> Any:
    return (
        value.tolist() if isinstance(value, torch.Tensor) else {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else value
    )


def given(loader: Any, rank: int, world: int, epoch: int = 0, place: Any = START) -> list[tuple[Any, bool, Any]]:
    return [(plain(batch), again, at) for batch, again, at in Yielded(loader, 7, rank, world).feed(epoch, place)]


@pytest.mark.parametrize(("name", "processes"), [*((name, 0) for name in KINDS), *(rotating(name, 2) for name in KINDS)])
def test_what_it_yields_goes_round_the_ranks_and_comes_again(name: str, processes: int) -> None:
    kept = torch.get_rng_state(), random.getstate()

    def make() -> Any:
        return KINDS[name](num_workers=processes)

    alone = [batch for batch, _, _ in given(make(), 0, 1)]
    ranks = [given(make(), rank, 2) for rank in range(2)]
    own = [[batch for batch, again, _ in found if not again] for found in ranks]
    assert [batch for pair in zip(*own, strict=False) for batch in pair] + own[0][len(own[1]) :] == alone
    assert len(ranks[0]) == len(ranks[1]) == (len(alone) + 1) // 2
    assert all(again for _, again, _ in ranks[1][len(own[1]) :])
    for rank, found in enumerate(ranks):
        for begin in range(1, len(found) + 1):
            assert given(make(), rank, 2, place=found[begin - 1][2]) == found[begin:]
    assert given(make(), 0, 2, epoch=1) != ranks[0] or name == "a stream"
    assert torch.equal(torch.get_rng_state(), kept[0]) and random.getstate() == kept[1]


def test_batches_are_those_of_the_class() -> None:
    """A rank's pass over the data has each sample once, as the class has made it."""
    batches = [torch.tensor(batch) for batch, _, _ in given(KINDS["normalises"](), 0, 1)]
    assert len(batches) == 8 and all(abs(float(batch.mean())) < 1e-5 for batch in batches)
    assert sorted(x for batch, _, _ in given(KINDS["joins"](), 0, 1) for (x,) in batch) == [10.0 * n for n in range(22)]
    assert [len(batch) for batch, _, _ in given(KINDS["pairs"](), 0, 1)] == [6, 6, 6, 4]


def test_only_a_class_that_would_lose_something_is_asked_as_it_is() -> None:
    class Initialises(DataLoader[Any]):
        """As torch_geometric's: a collate function and attributes."""

        def __init__(self, data: Any, size: int) -> None:
            self.extra = 1
            super().__init__(data, batch_size=size, collate_fn=lambda rows: torch.stack([row[0] for row in rows]))

        def __len__(self) -> int:
            return super().__len__()

    assert not has_its_own(Initialises(DATA, 3)) and not has_its_own(DataLoader(DATA))
    assert all(has_its_own(make()) for make in KINDS.values())
    taken = [batch.tolist() for batch, _ in Slices(Initialises(DATA, 11), 0, 1, 2).feed(0, 0)]
    assert taken == [[[float(n)] for n in range(11, 22)]]
    assert [x.tolist() for x in shard(KINDS["joins"]())] != [], "outside a job all of it"


def test_a_state_that_lives_from_pass_to_pass_is_told_after_a_restart(caplog: pytest.LogCaptureFixture) -> None:
    class Grows(DataLoader[Any]):
        passes = 0

        def __iter__(self) -> Any:
            self.passes += 1
            return (x * self.passes for (x,) in super().__iter__())

    loader = Grows(DATA, batch_size=3)
    given(loader, 0, 2)
    place = given(loader, 0, 2, epoch=1)[1][2]
    with caplog.at_level(logging.WARNING):
        given(Grows(DATA, batch_size=3), 0, 2, epoch=1, place=place)
    assert "Grows is asked for 4 batches again" in caplog.text and "Grows gives other batches than before this restart" in caplog.text
    caplog.clear()
    again = Grows(DATA, batch_size=3)
    given(again, 0, 2)
    given(again, 0, 2, epoch=1, place=place)
    assert "gives other batches" not in caplog.text


def test_a_sampler_of_a_ranks_part_is_refused() -> None:
    class Half(DistributedSampler[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(range(self.rank, 22, 2))

    with pytest.raises(Refused, match="Half gives each rank its part"):
        Yielded(Normalises(DATA, batch_size=3, sampler=Half(DATA, 2, 1)), 0, 0, 2)


class Opened(Dataset[Any]):
    """Has a file opened in each loader process, by a function of the script."""

    file: str = "none"

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> str:
        info = get_worker_info()
        return f"{self.file} {info is not None and info.dataset is self}"


class OpenedStream(Opened, IterableDataset[Any]):
    def __iter__(self) -> Any:
        return (self[index] for index in range(8))


def opens(process: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.file = f"file {process}"  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [Opened, OpenedStream])
def test_a_function_for_loader_processes_reaches_the_scripts_own_dataset(kind: type[Opened]) -> None:
    loader = DataLoader(kind(), batch_size=2, num_workers=1, worker_init_fn=opens)
    feed: Any = SampleStream(loader, 0, 1, 2).feed(0, START) if kind is OpenedStream else Slices(loader, 0, 1, 2).feed(0, 0)
    found = [batch for batch, *_ in feed]
    assert found == [["file 0 True"] * 2] * 2
