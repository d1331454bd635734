"""Pushes of one block or table that were admitted and are not applied yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from psjob.modes import Push
from psjob.shard.decided import Key

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
