"""A shard's part in a decided mode: it tells the coordinator which pushes are whole here, and carries out what that decides.

Pushes wait in their blocks and tables until an order names them. Orders are carried out one after the other, in the thread that brings
them. So a cut which is ordered between two of them finds every block and table at the same version.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from psjob.modes import ServedMode
from psjob.rules.reduction import ReductionProblem
from psjob.wire.frame import WireError

if TYPE_CHECKING:
    from psjob.shard.store import Store

Key = tuple[int, int]
"""Worker and clock of a push."""


@dataclass(frozen=True)
class Decision:
    """One update (or none, where nothing is kept): `lag` is that of the oldest kept push, `weights` (None: the mean) theirs in order."""

    kept: Sequence[Key]
    dropped: Sequence[Key]
    weights: Sequence[float] | None
    lag: int | None


class DecidedPushes:
    """Of one store. `arrived` tells the coordinator."""

    def __init__(self, mode: ServedMode) -> None:
        self.early = mode.may_go(0, 0, True)
        """A worker may be answered, and write where its push lies, before that is decided on."""
        self.gone: dict[int, int] = {}
        """By worker, how many of its clocks may be answered; every block and table looks here."""
        self.arrived: Callable[[dict[str, Any]], None] = lambda body: None
        self._bases: dict[Key, int | None] = {}
        self._carried = 0
        self._broken = False
        """An order was not carried out to its end."""
        self._told: dict[Key, dict[str, Any]] = {}
        """What the coordinator was told, or is to be, of whole pushes that no order has named yet."""
        self._lock = threading.Lock()

    @property
    def carried(self) -> int | None:
        """Number of the last order that was carried out since the last restore; None: one broke off."""
        return None if self._broken else self._carried

    def begin(self, clocks: Mapping[int, int]) -> None:
        """Serving begins: so many clocks of each worker are in the blocks."""
        self.gone.clear()
        self.gone.update(clocks)
        self._bases.clear()
        self._carried, self._broken = 0, False
        with self._lock:
            self._told.clear()

    def took(self, key: Key, base: int | None) -> None:
        """A block or table of a push was admitted; it was computed on version `base` of it. The store's lock is held."""
        least = self._bases.get(key, base)
        self._bases[key] = None if base is None or least is None else min(base, least)

    def whole(self, key: Key, recovery: int) -> None:
        """All of a push is here: tell it."""
        body = {"did": "arrived", "recovery": recovery, "push": key, "base": self._bases.pop(key, None), "carried": self._carried}
        with self._lock:
            self._told[key] = body
        self.arrived(body)

    def tell_again(self) -> None:
        """On a new stream to the coordinator: what the one before may have lost. It knows what it has heard."""
        with self._lock:
            told = list(self._told.values())
        for body in told:
            self.arrived(body)

    def carry_out(self, store: Store, body: Mapping[str, Any]) -> None:
        """Make the updates of an order in every block and table, then answer who may go. Raises WireError where it does not fit."""
        number, broken = int(body["number"]), self._broken
        self._broken = True  # until its end
        if broken or number != self._carried + 1:
            raise WireError(f"the coordinator's order {number} follows on {self._carried}" + (", which broke off" if broken else ""))
        decisions = [_decision(batch) for batch in body["batches"]]
        try:
            for cell in store.all_cells():
                with cell.lock:
                    if cell.n != int(body["version"]):
                        raise WireError(f"{cell.name} is at version {cell.n}, and the coordinator decides on {body['version']}")
                    for decision in decisions:
                        cell.decide(decision)
                    store.moved(int(body["version"]), cell.n)
        except ReductionProblem as problem:
            store.on_problem(f"update {body['version']}: {problem}")
            return
        except WireError:
            raise
        except Exception as error:  # some blocks have the update and others have not
            store.on_failure(f"update {body['version']} was not made, {type(error).__name__}: {str(error)[:300]}")
            return
        dropped = sum(len(decision.dropped) for decision in decisions)
        with store.lock:
            store.counters.dropped += dropped
            store.counters.applied -= dropped  # each was counted when it was whole
        if store.counters.first_applied is None and any(decision.kept for decision in decisions):
            store.counters.first_applied = time.time()
        with self._lock:
            for decision in decisions:
                for key in (*decision.kept, *decision.dropped):
                    self._told.pop(key, None)
        self._carried, self._broken = number, False
        go = {int(rank): int(clocks) for rank, clocks in body["go"]}
        self.gone.update(go)
        for cell in store.all_cells():
            with cell.lock:
                cell.answer(go)
        store.tell_step()


def _decision(batch: Mapping[str, Any]) -> Decision:
    return Decision(_keys(batch["kept"]), _keys(batch["dropped"]), batch["weights"], batch["lag"])


def _keys(pairs: Any) -> list[Key]:
    return [(int(worker), int(clock)) for worker, clock in pairs]
