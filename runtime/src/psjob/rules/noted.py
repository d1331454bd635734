"""The base of rules that keep, for each worker, the weights that it was sent: those that its next gradient is computed on."""

from __future__ import annotations

from collections.abc import Mapping

from psjob.rules import arrays
from psjob.rules.arrays import Array
from psjob.rules.base import BaseRule, BlockState, Hyperparameters, Rule, of_worker


class Noted(BaseRule):
    """Around another rule: changes the gradient by what the weights have moved since its worker was sent them, then lets `inner` update.

    A push must answer a reply: its base must be known (`needs_lag`), and its worker noted. Costs one copy of the block a worker.
    """

    needs_lag = True

    def __init__(
        self, name: str, inner: Rule, hyperparameters: Mapping[str, float | bool], slots: tuple[str, ...], per_worker: tuple[str, ...]
    ) -> None:
        self.name, self.inner = name, inner
        self.hyperparameters = {**inner.hyperparameters, **hyperparameters}
        self.slots = inner.slots + slots
        self.per_worker = (*inner.per_worker, *per_worker, "sent")

    def sent(self, state: BlockState, worker: int) -> Array:
        """What the worker's gradient was computed on. Raises ValueError where it was sent nothing."""
        note = state.slots.get(of_worker("sent", worker))
        if note is None:
            raise ValueError(f"rule {self.name}: worker {worker} pushes, but has not been sent weights")
        return note

    def reply(self, state: BlockState, hyperparameters: Hyperparameters, worker: int) -> Array:
        """What the inner rule replies, noted. Another array each time: nobody changes it."""
        reply = self.inner.reply(state, hyperparameters, worker)
        if reply is state.weights:
            reply = arrays.copy(reply)
        state.slots[of_worker("sent", worker)] = reply
        return reply

    def forget(self, state: BlockState, worker: int) -> None:
        """Remove what this rule and the inner one have of the worker."""
        self.inner.forget(state, worker)
        super().forget(state, worker)
