"""`shard`: this worker's slice of a DataLoader, at the same place again after a restart.

Per epoch there is one order of samples, from (seed, epoch); the loader's batches are cut from it, and batch j goes to rank
j mod m, so every sample is seen once an epoch whatever m is. In the last round a rank may have no batch: it counts as
absent there and stays in step.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import data as torch_data

from psjob.api import attach as attaching
from psjob.embeddings.prefetch import Ahead
from psjob.process.errors import Refused
from psjob.resume.generators import generators, put_generators


def shard(loader: Any, prefetch: Callable[[Any], Any] | None = None) -> Iterator[Any]:
    """Iterate over this worker's batches of `loader` (a torch DataLoader); outside a job over all of them, as they are.

    Call it once an epoch: the n-th call is epoch n, and epochs that are already done yield nothing after a restart. The
    batch size is per worker. The order is the loader's own where it does not shuffle, else a permutation from
    (training.seed, epoch).

    Where the model has `ps.Embedding`s, one batch is read ahead, so that its rows are on their way while the one before is trained;
    `prefetch` names them: of a batch it gives pairs (module, ids). Without it they are found where the ids of a module are a tensor
    of the batch, or a view of one. A batch that is read ahead is made with random generators of its own, from (seed, epoch, batch).

    Ends the script with a sentence (exit status 77) for an IterableDataset or a sampler of your own, whose place could not
    be found again.
    """
    job = attaching.current
    if job is None:
        yield from loader
        return
    try:
        plan = _Plan(loader, job.place.config.seed, job.place.index, job.place.config.workers)
    except Refused as refused:
        job.refuse(str(refused))
        return
    ahead = Ahead(job.tables.modules, prefetch) if job.tables.modules else None
    yield from _epoch(job, plan, ahead)


_calls = 0


def epoch() -> int:
    """Number of the epoch that `shard` is in (calls finished or begun, minus one); 0 before the first."""
    return max(0, _calls - 1)


def _epoch(job: attaching.AttachedJob, plan: _Plan, ahead: Ahead | None) -> Iterator[Any]:
    global _calls
    number = _calls
    _calls += 1
    begin = 0
    back = job.restored
    if back is not None and back.cursor is not None:
        if number < back.cursor["epoch"]:
            return
        begin = back.cursor["round"]
    rounds = plan.rounds()
    batches: Iterator[Any] = iter(plan.loader(number, begin, apart=ahead is not None))
    if ahead is not None:
        batches = _looking_ahead(batches, ahead)
    made, given = job.made, 0
    for turn in range(begin, rounds):
        if back is not None:
            job.put_back()
            back = None
        job.edge({"epoch": number, "round": turn})
        if plan.batch_of(turn) is not None:
            given += 1
            yield next(batches)
        elif _trains(job, given, job.made - made):
            job.absent_step()
    if back is not None:
        job.put_back()
    job.edge({"epoch": number, "round": rounds})


def _looking_ahead(batches: Iterator[Any], ahead: Ahead) -> Iterator[Any]:
    """Each batch when the one after it has been read."""
    held = next(batches, _NONE)
    while held is not _NONE:
        following = next(batches, _NONE)
        ahead.handing(held, None if following is _NONE else following)
        yield held
        held = following


_NONE = object()


def _trains(job: attaching.AttachedJob, given: int, steps: int) -> bool:
    """Does this loop make a step a batch? An evaluation makes none, and a rank without a batch must then make none either."""
    return steps == given if given else job.model.training and torch.is_grad_enabled()


class _Plan:
    """Which sample indices make which batch, for one rank. Pure but for `loader`."""

    def __init__(self, loader: Any, seed: int, rank: int, world: int) -> None:
        if not isinstance(loader, torch_data.DataLoader):
            raise Refused(f"shard takes a torch DataLoader, got {type(loader).__name__}")
        if isinstance(loader.dataset, torch_data.IterableDataset):
            raise Refused("shard cannot find its place again in an IterableDataset; use a dataset with __getitem__ and __len__")
        if loader.batch_size is None or type(loader.batch_sampler) is not torch_data.BatchSampler:
            raise Refused("shard makes its own batches; give the DataLoader a batch_size instead of a batch_sampler")
        sampler: Any = loader.sampler
        everything: Any = loader.dataset
        if type(sampler) is torch_data.RandomSampler:
            if sampler.replacement or sampler.num_samples != len(everything):
                raise Refused("shard covers each sample once an epoch; RandomSampler with replacement or num_samples is not supported")
            self.shuffle = True
        elif type(sampler) is torch_data.SequentialSampler:
            self.shuffle = False
        else:
            raise Refused(f"shard cannot find its place again in a {type(sampler).__name__}; use shuffle=True or shuffle=False")
        self._loader, self._seed, self._rank, self._world = loader, seed, rank, world
        self._size = int(loader.batch_size)
        self._count = count = len(everything)
        self._batches = count // self._size if loader.drop_last else -(-count // self._size)

    def rounds(self) -> int:
        """Steps of an epoch."""
        return -(-self._batches // self._world)

    def batch_of(self, turn: int) -> int | None:
        """Number of this rank's batch in a round, None where it has none."""
        number = turn * self._world + self._rank
        return number if number < self._batches else None

    def indices(self, epoch_number: int, begin: int) -> Iterator[_Batch]:
        """Sample indices of this rank's batches from round `begin` on."""
        order: list[int] = list(range(self._count))
        if self.shuffle:
            generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch_number) % (1 << 63))
            order = torch.randperm(self._count, generator=generator).tolist()
        for turn in range(begin, self.rounds()):
            number = self.batch_of(turn)
            if number is not None:
                batch = _Batch(order[number * self._size : (number + 1) * self._size])
                batch.seed = (self._seed, epoch_number, number)
                yield batch

    def loader(self, epoch_number: int, begin: int, apart: bool = False) -> Any:
        """A DataLoader over this rank's batches, otherwise like the user's. `apart`: the script's generators are left as they are."""
        old = self._loader
        options: dict[str, Any] = {
            "num_workers": old.num_workers, "collate_fn": old.collate_fn, "pin_memory": old.pin_memory, "timeout": old.timeout,
            "worker_init_fn": old.worker_init_fn, "multiprocessing_context": old.multiprocessing_context, "generator": old.generator,
        }  # fmt: skip
        if old.num_workers:
            options["prefetch_factor"] = old.prefetch_factor
        return torch_data.DataLoader(_Seeded(old.dataset, apart), batch_sampler=_Sampler(self, epoch_number, begin), **options)


class _Batch(list[int]):
    """Sample indices, and what a loader process seeds its generators with before it fetches them."""

    seed: tuple[int, int, int] = (0, 0, 0)


class _Sampler(torch_data.Sampler[list[int]]):
    def __init__(self, plan: _Plan, epoch_number: int, begin: int) -> None:
        self._plan, self._epoch, self._begin = plan, epoch_number, begin

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._plan.indices(self._epoch, self._begin))

    def __len__(self) -> int:
        return sum(1 for t in range(self._begin, self._plan.rounds()) if self._plan.batch_of(t) is not None)


class _Seeded(torch_data.Dataset[Any]):
    """The user's dataset; in a loader process, or `apart`, every batch is fetched with generators seeded from (seed, epoch, batch)."""

    def __init__(self, dataset: Any, apart: bool = False) -> None:
        self._dataset, self._apart = dataset, apart

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if torch_data.get_worker_info() is not None and isinstance(indices, _Batch):
            _seed(indices.seed)
        elif self._apart and isinstance(indices, _Batch):  # when it is read must not show in what the script draws
            kept = generators()
            _seed(indices.seed)
            try:
                return self._fetch(indices)
            finally:
                put_generators(kept)
        return self._fetch(indices)

    def _fetch(self, indices: list[int]) -> list[Any]:
        many = getattr(self._dataset, "__getitems__", None)
        found = many(indices) if many is not None else [self._dataset[i] for i in indices]
        return list(found)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __len__(self) -> int:
        return len(self._dataset)


def _seed(parts: tuple[int, int, int]) -> None:
    value = random.Random(repr(parts)).getrandbits(63)
    random.seed(value)
    torch.manual_seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value % (1 << 32))
