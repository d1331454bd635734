"""The data path of a worker of several processes: gradients meet in shared memory, and one push goes out for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from psjob.layout.packing import Pack
from psjob.protocol.worker.together import Part
from psjob.worker.exchange import Exchange

if TYPE_CHECKING:
    from psjob.worker.following import FollowerSession
    from psjob.worker.leading import LeaderSession

_IN_MEMORY: Final = torch.empty(0, dtype=torch.float32, device="cpu")
"""Stands for a gradient that lies in shared memory."""


class LeaderExchange(Exchange):
    """Of process 0."""

    lends = False  # blocks leave from memory that the processes share

    def __init__(self, session: LeaderSession) -> None:
        super().__init__(session)
        self._leader = session

    def push(
        self,
        grads: Sequence[torch.Tensor | None] | None,
        hyperparameters: list[dict[str, Any]],
        skip: bool,
        scale: float,
        targets: Sequence[torch.Tensor],
    ) -> None:
        session = self._leader
        session.last_hyperparameters = hyperparameters
        whole = session.meet(_part(self, grads, skip, scale))
        self.finite.found, self.present = whole.bad, len(whole.present)
        merged = None if whole.absent else [None if row in whole.none else _IN_MEMORY for row in range(len(targets))]
        super().push(merged, hyperparameters, whole.skip, 1.0, targets)
        session.memory.scatter(targets)
        session.answer()

    def pull(self, parameters: Sequence[torch.Tensor], hyperparameters: list[dict[str, Any]]) -> None:
        self._leader.open_memory(parameters)
        super().pull(parameters, hyperparameters)
        self._leader.memory.scatter(parameters)

    def gradient(self, block: int, pack: Pack) -> torch.Tensor:
        return self._leader.memory.summed(block)

    def pieces(self, pack: Pack) -> None:
        """None: answers land in shared memory."""
        return

    def landing(self, block: int, pack: Pack) -> tuple[torch.Tensor, Callable[[], None]]:
        return self._leader.memory.answer(block), lambda: None


class FollowerExchange(Exchange):
    """Of any other process."""

    lends = False

    def __init__(self, session: FollowerSession) -> None:
        super().__init__(session)
        self._follower = session

    def push(
        self,
        grads: Sequence[torch.Tensor | None] | None,
        hyperparameters: list[dict[str, Any]],
        skip: bool,
        scale: float,
        targets: Sequence[torch.Tensor],
    ) -> None:
        session = self._follower
        session.check()
        session.meet(_part(self, grads, skip, scale))
        if (act := self.meanwhile) is not None:
            self.meanwhile = None
            act()
        self.skipped = session.take(targets)
        session.stepped()

    def finish(self) -> None:
        """Each step is answered before it returns. Raises SessionEnd."""
        self.session.check()


def _part(exchange: LeaderExchange | FollowerExchange, grads: Sequence[torch.Tensor | None] | None, skip: bool, scale: float) -> Part:
    """What this process brings; its gradients are where they are summed from then."""
    session: Any = exchange.session
    if grads is None:
        return Part(session.clock, absent=True)
    if not skip:
        session.sums.gather(grads, scale)
    none = frozenset(row for row, grad in enumerate(grads) if grad is None)
    return Part(session.clock, skip=skip, none=none, bad=exchange.finite.found)
