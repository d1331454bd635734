"""Slices of an IterableDataset: of the batches that each loader process would make, every W-th goes to this rank.

Each rank reads the whole stream, with the same seeds on all of them, and makes those batches that are its own. Batch j of
loader process p goes to rank (j + p) mod W of W workers. When a process has read to its end it tells how many batches there
were, so that every rank knows how many rounds the longest of them has.

Batches of a DataLoader whose class makes them in a way of its own: every rank reads all of them, and batch j goes to rank j mod W.

A loader is taken apart where it can be (`slices.py`, `streams.py`). What a subclass does to what it gives would be lost then, so that
one which has an `__iter__` of its own is asked as it is. All that it may draw from is seeded before each batch from (seed, epoch, batch).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple

from torch.utils import data as torch_data

from psjob.api import advice, alike, orders
from psjob.api.orders import seed_all, seeded
from psjob.api.slices import options_of
from psjob.process.errors import Refused

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


class Stream:
    """Of one rank. `loader` is a torch DataLoader over an IterableDataset."""

    def __init__(self, loader: Any, seed: int, rank: int, world: int) -> None:
        self._loader, self._seed, self._rank, self._world = loader, seed, rank, world
        self.rounds: int | None = None
        """Of a pass, which are not known before its end."""
        self.first: int | None = None
        """A checksum of the stream's first samples, which all ranks read; None where the pass went on in its middle."""

    def facts(self) -> dict[str, Any]:
        """What tells this stream from others', once a batch was given."""
        return alike.facts(self._loader, self._seed, self.first)

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
        options = {**options_of(old, within=True), "collate_fn": _as_it_is}
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
                first = alike.digest(found)
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
    return isinstance(loader.dataset, torch_data.IterableDataset) or orders.keeps_iterator(loader) is None


class Yielded:
    """Of one rank. Raises Refused for samplers that give a rank its part."""

    def __init__(self, loader: Any, seed: int, rank: int, world: int) -> None:
        self._loader, self._seed, self._rank, self._world = loader, seed, rank, world
        self._parts = orders.parts_of(loader)
        orders.check_whole(self._parts)
        self.rounds: int | None = None
        """Of a pass, which are not known before its end."""
        self.first: int | None = None
        """A checksum of the pass's first batch, which all ranks read."""

    def feed(self, epoch: int, place: Mapping[str, Any]) -> Iterator[tuple[Any, bool, Mapping[str, Any]]]:
        """This rank's batches from `place` on; of each whether it was given before, for want of another, and the place after it."""
        name, begin = type(self._loader).__name__, int(place["round"])
        if self._world > 1:
            advice.tell(
                "yielded",
                f"{name} makes its batches in a way of its own: every worker reads all of them, and trains on one in {self._world}",
            )
        if begin:
            log.warning("%s is asked for %d batches again to find its place", name, begin * self._world)
        if isinstance(self._loader.dataset, torch_data.IterableDataset) and callable(
            start := getattr(self._loader.dataset, "set_epoch", None)
        ):
            start(epoch)
        orders.begin_epoch(self._parts, epoch)
        self._loader._iterator = None  # loader processes that live on have drawn in the pass before
        return self._feed(self._read(epoch), begin, place.get("read"))

    def facts(self) -> dict[str, Any]:
        """What tells this data from others', once a batch was given."""
        return alike.facts(self._loader, self._seed, self.first)

    def _feed(self, batches: Iterator[Any], begin: int, read: int | None) -> Iterator[tuple[Any, bool, Mapping[str, Any]]]:
        self.first, number, told, last = None, 0, 0, None
        for number, batch in enumerate(batches, 1):
            told = alike.digest(batch, told)
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
            with orders.seeded_draws((self._seed, epoch, number), self._parts):
                given = iter(self._loader) if given is None else given
                batch = next(given, _END)
            if batch is _END:
                return
            yield batch
            number += 1
