"""Batches of a DataLoader whose class makes them in a way of its own: every rank reads all of them, and batch j goes to rank j mod W.

A loader is taken apart where it can be (`slices.py`, `streams.py`). What a subclass does to what it gives would be lost then, so that
one which has an `__iter__` of its own is asked as it is. All that it may draw from is seeded before each batch from (seed, epoch, batch).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch.utils import data as torch_data

from psjob.api import advice, alike, drawing, orders

log = logging.getLogger(__name__)
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
        self._parts = drawing.parts_of(loader)
        drawing.check_whole(self._parts)
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
        drawing.begin_epoch(self._parts, epoch)
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
            with drawing.drawing((self._seed, epoch, number), self._parts):
                given = iter(self._loader) if given is None else given
                batch = next(given, _END)
            if batch is _END:
                return
            yield batch
            number += 1
