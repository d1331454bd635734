"""Rounds of local SGD on a worker: steps of its own from the weights that it took, then one push of how far they went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from psjob.process.errors import Refused

if TYPE_CHECKING:
    from psjob.worker.session import WorkerSession


class LocalRounds:
    """`hyperparameters` are the outer rule's, a parameter group each. Call `begin` when the parameters hold the job's weights."""

    def __init__(self, session: WorkerSession, parameters: Sequence[torch.Tensor], hyperparameters: list[dict[str, float | bool]]) -> None:
        self._session, self._parameters, self._hyperparameters = session, list(parameters), hyperparameters
        self._taken: list[torch.Tensor] = []
        """The weights at the round's start; while they are pushed, weights taken - weights reached."""
        self.steps = 0
        """Steps that the script has come through, those that this rank had no batch for and those made again included."""
        self.open = 0
        """Steps of the round that has begun."""
        self._moved = False

    @classmethod
    def of(
        cls,
        session: WorkerSession,
        parameters: Sequence[torch.Tensor],
        hyperparameters: Callable[[], list[dict[str, float | bool]]],
        overlap: bool,
    ) -> LocalRounds | None:
        """Those of a job in mode local; None in another. Raises Refused for what wants a push of each step."""
        if not session.mode.inner_steps:
            return None
        if overlap or session.rows.specs:
            what = "overlap=True sends the gradients of each step" if overlap else "rows on the shards take a push of each step"
            raise Refused(f"{what}, and in training.mode local workers push once a round; take another mode, or leave that out")
        return cls(session, parameters, hyperparameters())

    def step(self, own: Callable[[], Any] | None, skip: bool = False) -> None:
        """Make the worker's `own` step (None: this rank has no batch for it) unless it is to be skipped. The last of a round ends it.

        Raises Ending.
        """
        if own is not None:
            self._moved = True
            if not skip:
                own()
        self.steps += 1
        self.open += 1
        if self.open == self._session.mode.inner_steps:
            self.end()

    def end(self) -> bool:
        """Push how far the round went, however short, and take the job's new weights; False where none is open. Raises Ending."""
        if not self.open:
            return False
        with torch.no_grad():
            torch._foreach_sub_(self._taken, self._parameters)
        way = self._taken if self._moved else None
        skip = self._session.exchange.finite.skips(way, (), False)
        self._session.exchange.push(way, self._hyperparameters, skip, 1.0, self._parameters)
        self.begin()
        return True

    def begin(self) -> None:
        """The parameters hold the weights from which the next round starts."""
        with torch.no_grad():
            self._taken = self._taken or [p.detach().clone() for p in self._parameters]
            torch._foreach_copy_(self._taken, self._parameters)
        self.open, self._moved = 0, False

    def step_again(self) -> bool:
        """A step that was made before, by the process that this one follows: it has no effect. Was it the last of its round?"""
        self.steps += 1
        self.open += 1
        return self.open == self._session.mode.inner_steps and self.end_again()

    def end_again(self) -> bool:
        """A round that was made before ends here, however short; False where none is open."""
        ended, self.open = self.open > 0, 0
        return ended

    @property
    def at_step(self) -> int:
        """Steps until now if no round was short: the scale of a script's own curves, also after a restart."""
        return self._session.clock * self._session.mode.inner_steps + self.open

    def rounds_in(self, steps: float) -> float:
        """How many rounds so many steps are, the last one as short as it may be."""
        return -(-steps // self._session.mode.inner_steps)
