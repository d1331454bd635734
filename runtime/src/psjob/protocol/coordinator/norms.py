"""The norm of a mean gradient over all shards, and the factor that clips it. Pure.

norm = √Σ squares, the shards in their order; factor = min(1, limit / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` has it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from psjob.protocol.coordinator import events

if TYPE_CHECKING:
    from psjob.protocol.coordinator.machine import Coordinator

EPSILON: Final = 1e-6
ASK_SECONDS: Final = 1.0
"""After so long a shard that has not told is asked whether it has made the update without a norm."""
FIRST_QUESTION: Final = 1 << 40
"""Above the numbers of `joining`'s."""


class Norms:
    """Each shard tells of each update once, and again on a new stream. What it is told twice it leaves."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.c = coordinator
        self._recovery = -1
        self._version = -1
        self._told: dict[int, events.NormMeasured] = {}
        self._early: dict[int, events.NormMeasured] = {}
        """Told before training was on: of a recovery that goes on, it is not told again."""
        self._since = 0.0
        """When a shard was last told, or asked, of the update under way."""
        self._question = FIRST_QUESTION
        self._last: dict[str, Any] | None = None
        """The newest order."""

    def take_up(self, recovery: int, version: int, factor: float) -> None:
        """Another process has given this order: a shard that has not heard it tells again, and hears it from here."""
        self._last = _order(recovery, version, factor)

    def go_on(self) -> None:
        """All shards serve on: what they told while that was not known counts."""
        early, self._early = self._early, {}
        for event in early.values():
            self.measured(event)

    def measured(self, event: events.NormMeasured) -> None:
        """A shard holds an update until it knows the norm of all blocks. What it told before a restore is void."""
        recovery = self.c.recovery
        if event.recovery != recovery.recovery:
            return
        if not recovery.open:
            self._early[event.shard] = event
            return
        if self._last is not None and (event.recovery, event.version) == (self._last["recovery"], self._last["version"]):
            recovery.order(event.shard, self._last)  # the stream that it was sent down has ended
            return
        if (event.recovery, event.version) != (self._recovery, self._version):
            self._recovery, self._version, self._told = event.recovery, event.version, {}
        self._told[event.shard] = event
        self._since = self.c.now
        self._whole()

    def tick(self, now: float) -> None:
        """Ask shards that have not told of an update. A worker may ask for a norm at one shard only, and others would wait for ever."""
        if not self._told or now - self._since < ASK_SECONDS or not self.c.recovery.open:
            return
        self._since = now
        self._question += 1
        for index in self._owning():
            if index not in self._told:
                self.c.recovery.order(index, {"do": "where", "ask": self._question, "ranks": []})

    def where(self, event: events.StandsAt) -> None:
        """A shard says where its blocks are: beyond the update under way it has no part in the norm."""
        if event.ask != self._question or not self._told or event.stands.lo <= self._version:
            return
        self._told.setdefault(event.shard, events.NormMeasured(event.shard, self._recovery, self._version, 0.0, math.inf))
        self._whole()

    def _owning(self) -> list[int]:
        return sorted(set(self.c.recovery.assignment))

    def _whole(self) -> None:
        owning = self._owning()
        if self._told.keys() >= set(owning):
            self._order([self._told[index] for index in owning])

    def _order(self, told: list[events.NormMeasured]) -> None:
        norm = math.sqrt(sum(each.squares for each in told))
        factor = clip_factor(norm, min(each.limit for each in told))
        self._last = _order(self._recovery, self._version, factor)
        self._told = {}
        self.c.progress.note_norm(norm)
        for each in reversed(told):  # shard 0 last: it carries an order out at once
            self.c.recovery.order(each.shard, self._last)


def _order(recovery: int, version: int, factor: float) -> dict[str, Any]:
    return {"do": "clip", "recovery": recovery, "version": version, "factor": None if math.isnan(factor) else factor}


def clip_factor(norm: float, limit: float) -> float:
    """By what a gradient of this norm is multiplied; NaN where the norm is NaN, as torch has it."""
    if math.isnan(norm):
        return math.nan
    return min(1.0, limit / (norm + EPSILON))
