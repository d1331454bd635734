"""Slices of a script's data: which samples make which batch, and which batch goes to which worker.

- `Slices`, of a dataset with `__getitem__`. Of an epoch there is one order of samples, from (seed, epoch). The loader's batches are cut
  from it. Batch j goes to rank j mod W of W workers, so every sample is seen once an epoch whatever W is. If the last round has too few
  batches, the ranks without one are given a batch of that epoch again, which counts for nothing (see `data.py`). An order without an end
  is drawn as it is needed.
- `SampleStream`, of an IterableDataset. Each rank reads the whole stream, with the same seeds on all of them, and makes those batches that
  are its own. Batch j of loader process p goes to rank (j + p) mod W. When a process has read to its end it tells how many batches there
  were, so that every rank knows how many rounds the longest of them has.
- `Yielded`, of a DataLoader whose class makes batches in a way of its own: every rank reads all of them, and batch j goes to rank j mod W.
  A loader is taken apart where it can be. What a subclass does to what it gives would be lost then, so one that has an `__iter__` of its
  own is asked as it is. All that it may draw from is seeded before each batch from (seed, epoch, batch).
"""

from __future__ import annotations

import logging
import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple

import torch
from torch.utils import data as torch_data

from psjob.api import advice, consistency, sample_order, values
from psjob.api.sample_order import Indices, Shuffled, seed_all, seeded
from psjob.process.errors import Refused


class Slices:
    """Of one rank. `loader` is a torch DataLoader over a dataset with `__getitem__`.

    Raises Refused for an order that could not be found again, or that is one rank's already.
    """

    def __init__(self, loader: Any, seed: int, rank: int, world: int) -> None:
        self._loader, self._seed, self._rank, self._world = loader, seed, rank, world
        self._order = sample_order.find(loader)
        self._checked = False
        self._drawn: Sequence[Indices] = ()
        """The batches of the pass under way; none where they have no end."""
        self._endless: _Endless | None = None
        self.order = self._first = 0
        """What tells this pass's batches from others, as far as they were drawn."""
        self.rounds: int | None = None
        """Of this pass; None where it has no end that is known."""

    def batches(self, epoch: int) -> Sequence[Indices]:
        """The batches of an epoch, those of all ranks; `order` tells them from others then. Raises ValueError if they have no end."""
        found = self._batches(epoch)
        if found is None:
            raise ValueError(f"{self._order.name} comes to no end")
        return found

    def _batches(self, epoch: int) -> Sequence[Indices] | None:
        """Those; None where they have no end."""
        order, source = self._order, self._order.source
        drawn: Any = source
        if isinstance(source, Shuffled):
            drawn = source.order(self._seed, epoch)
        elif not order.known:
            drawn = order.values(self._seed, epoch)
            self._check(epoch, drawn)
            if drawn is None:
                return None
        told = _checksum(drawn) if isinstance(drawn, list) else len(drawn)
        self.order = self._told(told)
        if order.whole:
            return [list(batch) for batch in drawn]
        return _Cut(drawn, order.size or 1, order.drop_last)

    def _check(self, epoch: int, drawn: list[Any] | None) -> None:
        """Raises Refused if it is another order when it is drawn again."""
        if self._checked:
            return
        if drawn is None:
            one, again = (list(islice(self._order.endless(self._seed, epoch), sample_order.TOGETHER)) for _ in range(2))
            same = one == again
        else:
            same = self._order.values(self._seed, epoch) == drawn
        if not same:
            raise Refused(
                f"{self._order.name} gives another order each time it is asked, with the same seeds too, so a restart could not "
                "find its place again. Draw from torch's, numpy's or Python's own generator, or from set_epoch(epoch)"
            )
        self._checked = True

    def _told(self, order: int) -> int:
        return zlib.crc32(str(_content(self._loader.dataset)).encode(), order)

    def turns(self, batches: int, begin: int) -> list[tuple[int, bool]]:
        """Of each round from `begin` on: number of this rank's batch of so many, and is it another rank's that is given again?"""
        return [(number % batches, number >= batches) for number in self._mine(batches, begin)]

    def _mine(self, batches: int, begin: int) -> range:
        """By round, from `begin` on: number of this rank's batch; those past the last are of the first ones again."""
        return range(begin * self._world + self._rank, rounds_of(batches, self._world) * self._world, self._world)

    def feed(self, epoch: int, begin: int, apart: bool = False) -> Iterator[tuple[Any, bool]]:
        """This rank's batches from round `begin` on, and of each whether it is another rank's that is given again.

        `apart`: what is drawn as a batch is made does not show in the script's generators. What the loader draws from them as it begins,
        it has drawn when this returns.
        """
        batches, seed = self._batches(epoch), (self._seed, epoch)
        if batches is None:
            self._drawn = ()
            self.rounds, drawn = None, self._order.endless(self._seed, epoch)
            endless = self._endless = _Endless(drawn, self._rank, self._world, seed, self._told(0))
            endless.skip(begin)
            self.order = endless.order_at(begin)
            return zip(self._like(endless, apart), endless.again(), strict=False)
        self._endless, self.rounds = None, rounds_of(len(batches), self._world)
        self._drawn = batches
        self._first = _checksum([len(batches), *(batches[0] if len(batches) else [])], self.order)
        mine = self._mine(len(batches), begin)
        return zip(self._like(_Given(batches, mine, seed), apart), (number >= len(batches) for number in mine), strict=True)

    def order_at(self, turn: int) -> int:
        """What tells the batches before this round from others, where the pass has come so far."""
        return self.order if self._endless is None else self._endless.order_at(turn)

    @property
    def first(self) -> int:
        """A checksum of the order and its first batch, or of its first round where it has no end; of all ranks one."""
        return self._first if self._endless is None else self._endless.first

    def facts(self) -> dict[str, Any]:
        """What tells this data from others'."""
        return consistency.facts(self._loader, self._seed, self.first, ordered=self._order.known or _has_each_once(self._drawn))

    def _like(self, chosen: Any, apart: bool) -> Any:
        """A DataLoader of these batches, otherwise like the user's."""
        # Where the user's loader makes no batches, what the dataset gives for one index is one.
        dataset = _Seeded(self._loader.dataset, apart, whole=self._order.size is None and not self._order.whole)
        loader: Any = torch_data.DataLoader(dataset, batch_sampler=chosen, **loader_options(self._loader, within=True))
        return iter(loader)


def _has_each_once(batches: Sequence[Indices]) -> bool:
    """Is no sample drawn twice, as with replacement? Of no batches that is not known."""
    drawn = [index for batch in batches for index in batch]
    try:
        return 0 < len(set(drawn)) == len(drawn)
    except TypeError:  # an index may be what it likes
        return False


def _checksum(order: list[Any], before: int = 0) -> int:
    """Of indices, or of batches of them, after that of what came before."""
    try:
        return zlib.crc32(array("q", order), before)
    except (TypeError, OverflowError):
        return zlib.crc32(repr(order).encode(), before)


def _content(dataset: Any) -> list[int]:
    """Checksums of some numbers of the tensors that a dataset gives, and of which parts; of other datasets nothing."""
    if isinstance(dataset, torch_data.Subset):
        return [_checksum(list(dataset.indices)), *_content(dataset.dataset)]
    if isinstance(dataset, torch_data.ConcatDataset):
        return [each for part in dataset.datasets for each in _content(part)]
    tensors = dataset.tensors if isinstance(dataset, torch_data.TensorDataset) else [dataset] if isinstance(dataset, torch.Tensor) else []
    return [values.sample_sum(tensors, few=False)] if tensors else []


def loader_options(loader: Any, within: bool = False) -> dict[str, Any]:
    """How a user's DataLoader makes its batches; of one over psjob's own dataset, `within` which the user's is."""
    names = ["num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"]
    options = {name: getattr(loader, name) for name in names}
    if loader.num_workers:
        options["prefetch_factor"] = loader.prefetch_factor
        if within:
            options["worker_init_fn"] = _Shown(loader.worker_init_fn)
    return options


class _Shown:
    """What a loader process begins with: `get_worker_info().dataset` is the user's own there, for a function of theirs too."""

    def __init__(self, then: Any) -> None:
        self._then = then

    def __call__(self, process: int) -> None:
        info = torch_data.get_worker_info()
        if info is not None:
            object.__setattr__(info, "dataset", getattr(info.dataset, "theirs", info.dataset))
        if self._then is not None:
            self._then(process)


def rounds_of(batches: int, world: int) -> int:
    """Steps of an epoch of so many batches."""
    return -(-batches // world)


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
    """Of the batches of an epoch those with these numbers; one past the last is of the first ones again."""

    def __init__(self, batches: Sequence[Indices], numbers: range, seed: tuple[int, int]) -> None:
        self._batches, self._numbers, self._seed = batches, numbers, seed

    def __iter__(self) -> Iterator[list[Any]]:
        numbers = (number % len(self._batches) for number in self._numbers)
        return (_Batch(self._batches[number], (*self._seed, number)) for number in numbers)

    def __len__(self) -> int:
        return len(self._numbers)


class _Endless(torch_data.Sampler[list[Any]]):
    """Of batches that are drawn as they are needed those of one rank: to its round t belongs batch t W + rank."""

    def __init__(self, drawn: Iterator[Indices], rank: int, world: int, seed: tuple[int, int], order: int) -> None:
        self._drawn, self._rank, self._world, self._seed = drawn, rank, world, seed
        self._turn = self._count = 0
        self._orders: dict[int, int] = {0: order}
        self._begin: list[Indices] = []
        self._again: deque[bool] = deque()
        self.first = order
        """A checksum of the first round."""

    def skip(self, rounds: int) -> None:
        """Those were given before a restart."""
        for _ in range(rounds):
            self._round()
            self._orders.pop(self._turn - 1, None)
        self._again.clear()

    def __iter__(self) -> Iterator[list[Any]]:
        while mine := self._round():
            yield mine

    def again(self) -> Iterator[bool]:
        """Of each batch, when it has been made: is it another rank's?"""
        while self._again:
            yield self._again.popleft()

    def order_at(self, turn: int) -> int:
        """A checksum of what was drawn before this round."""
        for before in [each for each in self._orders if each < turn]:
            del self._orders[before]
        return self._orders[turn]

    def _round(self) -> _Batch | None:
        """This rank's batch of the next round; None: there is none."""
        several = list(islice(self._drawn, self._world))
        if not several:
            return None
        order = _checksum([len(several), *(each for batch in several for each in batch)], self._orders[self._turn])
        if not self._turn:
            self._begin, self.first = several, order
        number = self._count + self._rank
        again = self._rank >= len(several)
        self._count, self._turn = self._count + len(several), self._turn + 1
        self._orders[self._turn] = order
        self._again.append(again)
        return _Batch(self._begin[number % self._count] if again else several[self._rank], (*self._seed, number))


class _Seeded(torch_data.Dataset[Any]):
    """The user's dataset. In a loader process, or `apart`, every batch is fetched with generators seeded from (seed, epoch, batch)."""

    def __init__(self, dataset: Any, apart: bool, whole: bool) -> None:
        self.theirs, self._apart, self._whole = dataset, apart, whole

    def __getitems__(self, indices: list[Any]) -> Any:
        if torch_data.get_worker_info() is not None and isinstance(indices, _Batch):
            seed_all(indices.seed)
        elif self._apart and isinstance(indices, _Batch):  # when it is read must not show in what the script draws
            with seeded(indices.seed):
                return self._fetch(indices)
        return self._fetch(indices)

    def _fetch(self, indices: list[Any]) -> Any:
        if self._whole:
            return self.theirs[indices[0]]
        many = getattr(self.theirs, "__getitems__", None)
        return list(many(indices) if many is not None else [self.theirs[i] for i in indices])

    def __getitem__(self, index: Any) -> Any:
        return self.theirs[index]

    def __len__(self) -> int:
        return len(self.theirs)


log = logging.getLogger(__name__)


class _Item(NamedTuple):
    """What a loader process gives: a `batch` of this rank, the `last` one that was read; its `end`; or `pass`, where another process is
    next in the first lap.

    A tuple, since torch pins what lies in one.
    """

    process: int
    read: int
    """Batches of the process that were read with this one, those of all ranks; at the end: all of them."""
    batch: Any = None
    state: Any = None
    """What the dataset's `state_dict` gave then."""
    kind: str = "batch"
    first: int | None = None
    """A checksum of the first samples that were read, told once by process 0."""


class SampleStream:
    """Of one rank. `loader` is a torch DataLoader over an IterableDataset."""

    def __init__(self, loader: Any, seed: int, rank: int, world: int) -> None:
        self._loader, self._seed, self._rank, self._world = loader, seed, rank, world
        self.rounds: int | None = None
        """Of a pass, which are not known before its end."""
        self.first: int | None = None
        """A checksum of the stream's first samples, which all ranks read; None where the pass continued in its middle."""

    def facts(self) -> dict[str, Any]:
        """What tells this stream from others', once a batch was given."""
        return consistency.facts(self._loader, self._seed, self.first)

    def feed(self, epoch: int, place: Mapping[str, Any]) -> Iterator[tuple[Any, bool, Mapping[str, Any]]]:
        """This rank's batches from `place` on; of each whether it was given before, for want of another, and the place after it.

        What the loader draws from the script's generators as it begins, it has drawn when this returns.
        """
        streams: dict[str, Any] = {str(process): dict(one) for process, one in place.get("streams", {}).items()}
        before = place.get("processes", self._processes)
        if before != self._processes:
            raise Refused(f"the IterableDataset was read by {before} loader processes, now num_workers makes {self._processes}; keep it")
        self._tell(streams)
        return self._feed(self._items(epoch, streams, int(place.get("process", 0))), int(place["round"]), streams)

    def _feed(self, items: Iterator[_Item], turn: int, streams: dict[str, Any]) -> Iterator[tuple[Any, bool, Mapping[str, Any]]]:
        self.first, last = None, None
        for item in items:
            self.first = item.first if self.first is None else self.first
            over = item.kind in ("last", "end")
            streams[str(item.process)] = {"read": item.read, **({"end": True} if over else {"state": item.state})}
            if item.kind not in ("batch", "last"):
                continue
            turn, last = turn + 1, item.batch
            after = (item.process + 1) % self._processes
            yield item.batch, False, self._place(turn, after, streams)
        for end in range(turn + 1, self._longest(streams) + 1):
            yield last, True, self._place(end, 0, streams)

    def _place(self, turn: int, process: int, streams: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            "round": turn,
            "process": process,
            "processes": self._processes,
            "streams": {key: dict(one) for key, one in streams.items()},
        }

    @property
    def _processes(self) -> int:
        return max(1, int(self._loader.num_workers))

    def _items(self, epoch: int, streams: Mapping[str, Any], first: int) -> Iterator[_Item]:
        old = self._loader
        begin = getattr(old.dataset, "set_epoch", None)
        if callable(begin):
            begin(epoch)
        own = _Own(old.dataset, (self._seed, epoch), self._rank, self._world, _Batching.of(old), streams, first)
        options = {**loader_options(old, within=True), "collate_fn": _as_it_is}
        return iter(torch_data.DataLoader(own, batch_size=None, **options))

    def _longest(self, streams: Mapping[str, Any]) -> int:
        """Rounds of the rank that has most of them."""
        read = [(int(process), int(one["read"])) for process, one in streams.items()]
        return max(
            sum(len(range((rank - process) % self._world, batches, self._world)) for process, batches in read)
            for rank in range(self._world)
        )

    def _tell(self, streams: Mapping[str, Any]) -> None:
        again = sum(int(one["read"]) for one in streams.values() if one.get("state") is None and not one.get("end"))
        if again:
            log.warning(
                "%s has no state_dict: %d batches are read again to find its place; a state_dict and load_state_dict would save that",
                type(self._loader.dataset).__name__,
                again,
            )


@dataclass(frozen=True)
class _Batching:
    """How the user's loader makes a batch; size None: the dataset gives whole ones."""

    size: int | None
    drop_last: bool
    collate: Any

    @classmethod
    def of(cls, loader: Any) -> _Batching:
        return cls(loader.batch_size, bool(loader.drop_last), loader.collate_fn)

    def read(self, samples: Iterator[Any]) -> tuple[Any, bool]:
        """The samples of the next batch, None where there are none; and whether the end was met."""
        if self.size is None:
            found = next(samples, None)
            return found, found is None
        group = list(islice(samples, self.size))
        over = len(group) < self.size
        return (None if not group or (over and self.drop_last) else group), over


class _Own(torch_data.IterableDataset[_Item]):
    """In a loader process (or in the script's own): this rank's batches of the part that this process reads."""

    def __init__(
        self, dataset: Any, seed: tuple[int, int], rank: int, world: int, batching: _Batching, streams: Mapping[str, Any], first: int
    ) -> None:
        self.theirs, self._seed, self._rank, self._world, self._batching = dataset, seed, rank, world, batching
        self._streams, self._first = streams, first

    def __iter__(self) -> Iterator[_Item]:
        info = torch_data.get_worker_info()
        process = 0 if info is None else info.id
        mine = self._streams.get(str(process), {"read": 0})
        number, state = int(mine["read"]), mine.get("state")
        if process < self._first:
            yield _Item(process, number, state=state, kind="pass")
        if mine.get("end"):
            yield _Item(process, number, kind="end")
            return
        begin = number if state is not None else 0
        if state is not None:
            self.theirs.load_state_dict(state)
        samples, number, first = None, begin, None
        while True:
            own = number >= int(mine["read"]) and (number + process) % self._world == self._rank
            with self._drawing(process, number, alone=info is None):
                samples = iter(self.theirs) if samples is None else samples
                found, over = self._batching.read(samples)
                batch = self._batching.collate(found) if own and found is not None else None
            if found is not None and not number and not process:
                first = consistency.batch_digest(found)
            number += found is not None
            if own and found is not None:
                save = getattr(self.theirs, "state_dict", None)
                # A dataset that was read to its end may begin anew.
                kept = save() if callable(save) and not over else None
                yield _Item(process, number, batch, kept, "last" if over else "batch", first)
                first = None
            if over:
                yield _Item(process, number, kind="end")
                return

    def _drawing(self, process: int, number: int, alone: bool) -> Any:
        """Draw from generators that are the same on every rank and from any place; in the script's own process leave its own alone."""
        parts = (*self._seed, process, number)
        if alone:
            return seeded(parts)
        seed_all(parts)
        return nullcontext()


def _as_it_is(item: Any) -> Any:
    return item


_MAKES: Final = ("__iter__", "_get_iterator", "_index_sampler", "_auto_collation")
"""What decides about the batches of a DataLoader, beside what it is given."""
_TORCHS: Final = ("torch", "torchdata")
"""Packages whose loaders give what a plain one would."""
_END: Final = object()


def has_its_own(loader: torch_data.DataLoader[Any]) -> bool:
    """Does the loader's class make batches in a way that one of other options would lose?"""
    classes = [kind for kind in type(loader).__mro__ if kind.__module__.partition(".")[0] not in _TORCHS]
    if not any(name in vars(kind) for kind in classes for name in _MAKES):
        return False
    return isinstance(loader.dataset, torch_data.IterableDataset) or sample_order.keeps_iterator(loader) is None


class Yielded:
    """Of one rank. Raises Refused for samplers that give a rank its part."""

    def __init__(self, loader: Any, seed: int, rank: int, world: int) -> None:
        self._loader, self._seed, self._rank, self._world = loader, seed, rank, world
        self._parts = sample_order.nested_samplers(loader)
        sample_order.check_whole(self._parts)
        self.rounds: int | None = None
        """Of a pass, which are not known before its end."""
        self.first: int | None = None
        """A checksum of the pass's first batch, which all ranks read."""

    def feed(self, epoch: int, place: Mapping[str, Any]) -> Iterator[tuple[Any, bool, Mapping[str, Any]]]:
        """This rank's batches from `place` on; of each whether it was given before, for want of another, and the place after it."""
        name, begin = type(self._loader).__name__, int(place["round"])
        if self._world > 1:
            advice.tell_once(
                "yielded",
                f"{name} makes its batches in a way of its own: every worker reads all of them, and trains on one in {self._world}",
            )
        if begin:
            log.warning("%s is asked for %d batches again to find its place", name, begin * self._world)
        if isinstance(self._loader.dataset, torch_data.IterableDataset) and callable(
            start := getattr(self._loader.dataset, "set_epoch", None)
        ):
            start(epoch)
        sample_order.begin_epoch(self._parts, epoch)
        self._loader._iterator = None  # loader processes that live on have drawn in the pass before
        return self._feed(self._read(epoch), begin, place.get("read"))

    def facts(self) -> dict[str, Any]:
        """What tells this data from others', once a batch was given."""
        return consistency.facts(self._loader, self._seed, self.first)

    def _feed(self, batches: Iterator[Any], begin: int, read: int | None) -> Iterator[tuple[Any, bool, Mapping[str, Any]]]:
        self.first, number, told, last = None, 0, 0, None
        for number, batch in enumerate(batches, 1):
            told = consistency.batch_digest(batch, told)
            if number == 1:
                self.first = told
            turn, rank = divmod(number - 1, self._world)
            if rank != self._rank:
                last = batch if last is None else last  # of another worker, where this one has none of its own
                continue
            last = batch
            if turn + 1 == begin and told != read:
                log.warning(
                    "%s gives other batches than before this restart, which was at its batch %d: what it draws from is not seeded, or it "
                    "keeps a state from pass to pass",
                    type(self._loader).__name__, begin,
                )  # fmt: skip
            if turn >= begin:
                yield batch, False, {"round": turn + 1, "read": told}
        if number % self._world and self._rank >= number % self._world and number // self._world >= begin:
            yield last, True, {"round": number // self._world + 1, "read": told}

    def _read(self, epoch: int) -> Iterator[Any]:
        """Its batches from the first, those of all ranks."""
        given: Iterator[Any] | None = None
        number = 0
        while True:
            with sample_order.seeded_draws((self._seed, epoch, number), self._parts):
                given = iter(self._loader) if given is None else given
                batch = next(given, _END)
            if batch is _END:
                return
            yield batch
            number += 1
