"""Pushes of one block or table that were admitted and are not applied yet.

Workers that wait for an answer of one block or table, kept so that a push looks only at those whom it may release.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from psjob.modes import Push
from psjob.shard.decided import Key
from psjob.wire.frame import WireError

if TYPE_CHECKING:
    from psjob.shard.cell import Cell
    from psjob.shard.rows import RowCell


MOST_PENDING = 64
"""Pushes of one worker that a block holds where workers need not wait for each other's."""


@dataclass(frozen=True)
class Info:
    """What a worker's pushes are made with: hyperparameters a group and a table, the tensors without a gradient."""

    hyperparameters: tuple[Mapping[str, Any], ...]
    none: frozenset[int]
    rows: tuple[Mapping[str, Any], ...] = ()
    clip: float | None = None
    """The largest norm that the mean gradient of all blocks may have; None: any."""
    clamp: float | None = None
    """The same of each element, from 0."""
    bad: int | None = None
    """The tensor (after the model's: the table) in which the worker has found NaN or inf, so that it skips this step."""
    processes: int = 1
    """Gradients whose mean a push is: those of the processes of its worker."""


class Received(Protocol):
    """What a push brought, in a buffer that is given back."""

    def free(self) -> None: ...


@dataclass(frozen=True)
class Arrived:
    """A push that was admitted and is not yet applied. `grad` is None for an absent rank."""

    push: Push
    grad: Received | None
    skip: bool
    info: Info


class PendingPushes:
    """By worker and clock, in order of arrival. A mode that is asked at each push is given the same list, not a new one."""

    def __init__(self) -> None:
        self._arrived: dict[Key, Arrived] = {}
        self._pushes: list[Push] | None = []
        """None: to be made again."""
        self._of: Counter[int] = Counter()
        self.changes = 0

    def __len__(self) -> int:
        return len(self._arrived)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._arrived)

    def __contains__(self, key: object) -> bool:
        return key in self._arrived

    def __getitem__(self, key: Key) -> Arrived:
        return self._arrived[key]

    def __setitem__(self, key: Key, arrived: Arrived) -> None:
        self._of[key[0]] += key not in self._arrived
        self._arrived[key] = arrived
        self.changes += 1
        if self._pushes is not None:
            self._pushes.append(arrived.push)

    def of(self, worker: int) -> int:
        """How many are a worker's."""
        return self._of[worker]

    @property
    def pushes(self) -> Sequence[Push]:
        """In order of arrival; stands until the next change."""
        if self._pushes is None:
            self._pushes = [arrived.push for arrived in self._arrived.values()]
        return self._pushes

    def take(self, keys: Iterable[Key]) -> list[Arrived]:
        """These, in this order, which wait no longer. Raises KeyError where one is not here."""
        taken = [self._arrived.pop(key) for key in keys]
        self._of.subtract(arrived.push.worker for arrived in taken)
        self._pushes = None if self._arrived else []
        self.changes += 1
        return taken

    def clear(self) -> None:
        self.take(list(self._arrived))


MOST_WAITING = 64
"""Answers of one block that one worker may wait for; it asks for one at a time, and again where a stream broke."""
MOST_NAMED = 32
"""Of the workers for whom an answer waits, so many are told by rank, of the others their number."""


class Replies(Protocol):
    """Where answers go: the stream of one worker."""

    def param(self, cell: Cell, waiter: Waiter) -> None: ...

    def rows(self, cell: RowCell, waiter: Waiter) -> None: ...

    def waiting(self, waiter: Waiter, cell: Cell | RowCell, missing: list[int], seconds: float) -> None: ...


@dataclass(eq=False)
class Waiter:
    """A worker that wants this block at `version` or later (see ServedMode.version_for), and with `update` the reduced gradient instead.

    Of a table: `ids` are the rows that are wanted; None asks only to be told that the version is there.
    """

    to: Replies
    rank: int
    request: int
    version: int
    clock: int
    since: float
    update: bool = False
    ids: torch.Tensor | None = None
    place: tuple[int, torch.Tensor] | None = None
    """Where in lent memory the rows are to be put, offset and memory itself; None: they are sent."""
    lent: bool = False
    """The answer may lie in memory that this shard lends to the worker."""
    info: Info | None = None
    """What the worker's numbers are; None: they were not told."""


class Waiters:
    """In order of arrival, where versions are equal. The caller has the block's lock."""

    def __init__(self) -> None:
        self._of: dict[int, list[Waiter]] = {}
        """By rank."""
        self._at: dict[int, dict[int, None]] = {}
        """By version: the ranks that wait for it."""
        self._reached = -1
        """Versions up to this one were reached when `take` was called last."""

    def __bool__(self) -> bool:
        return bool(self._of)

    def __iter__(self) -> Iterator[Waiter]:
        return (waiter for waiters in self._of.values() for waiter in waiters)

    def of(self, rank: int) -> int:
        """How many of one worker's requests wait."""
        return len(self._of.get(rank, ()))

    def check(self, rank: int, name: str) -> None:
        """Raise WireError where a worker asks again and again for what is still to come: each push would look at all of it."""
        if self.of(rank) >= MOST_WAITING:
            raise WireError(f"worker {rank} waits for {MOST_WAITING} answers of {name} already")

    def add(self, waiter: Waiter) -> None:
        self._of.setdefault(waiter.rank, []).append(waiter)
        self._at.setdefault(waiter.version, {})[waiter.rank] = None

    def clear(self) -> None:
        self._of.clear()
        self._at.clear()

    def drop(self, to: Replies, rank: int) -> None:
        """Nobody waits for answers to worker `rank` by this stream any more."""
        self._keep(rank, [waiter for waiter in self._of.get(rank, ()) if waiter.to is not to])

    def take(self, ranks: Iterable[int] | None, reached: int | None, goes: Callable[[int, int], bool]) -> list[Waiter]:
        """Those that wait no longer: `goes` says it of a rank and its version.

        Only `ranks` are asked about (None: all), and those that wait for a version that has been reached since the last call. `reached`
        is the highest such version; None: what one worker waits for tells nothing of another.
        """
        asked = dict.fromkeys(self._of if ranks is None else ranks)
        if reached is not None:
            if reached > self._reached:
                for version in sorted(version for version in self._at if self._reached < version <= reached):
                    asked.update(self._at[version])
            self._reached = reached
        taken = []
        for rank in asked:
            waiters = self._of.get(rank, ())
            ready = [waiter for waiter in waiters if goes(rank, waiter.version)]
            if ready:
                taken += ready
                self._keep(rank, [waiter for waiter in waiters if waiter not in ready])
        return taken

    def _keep(self, rank: int, waiters: list[Waiter]) -> None:
        for waiter in self._of.pop(rank, ()):
            ranks = self._at.get(waiter.version)
            if ranks is not None:
                ranks.pop(rank, None)
                if not ranks:
                    del self._at[waiter.version]
        for waiter in waiters:
            self.add(waiter)


def named(ranks: Sequence[int]) -> str:
    """Ranks as text: the first MOST_NAMED, and how many more there are."""
    more = len(ranks) - MOST_NAMED
    return f"{list(ranks[:MOST_NAMED])}" + (f" and {more} more" if more > 0 else "")
