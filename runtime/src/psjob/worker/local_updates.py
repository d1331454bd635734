"""What a worker makes of its gradients by itself before it pushes.

- `LocalRounds`: rounds of local SGD, steps of its own from the weights that it took, then one push of how far they went.
- `WorkerSideRule`: the worker's half of a rule, with state that goes with the resume record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from psjob import rules
from psjob.process.errors import Refused
from psjob.rules.base import BlockState, Hyperparameters, WorkerHalf
from psjob.worker.compression import LIMIT
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
    ) -> LocalRounds | None:
        """Those of a job in mode local; None in another."""
        if not session.mode.inner_steps:
            return None
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
        self._session.push(way, self._hyperparameters, skip, 1.0, self._parameters)
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


class WorkerSideRule:
    """State by parameter (a row of the table); `groups` are their parameter groups."""

    def __init__(self, rule: WorkerHalf, parameters: Sequence[torch.Tensor], groups: Sequence[int]) -> None:
        self._rule, self._parameters, self._groups = rule, parameters, groups
        self._states: dict[int, BlockState] = {}

    @classmethod
    def of(cls, rule: str, parameters: Sequence[torch.Tensor], groups: Sequence[int]) -> WorkerSideRule | None:
        """That of the rule of this name, where it has one. Raises Refused if its state could not be saved."""
        made = rules.named(rule)
        if not isinstance(made, WorkerHalf):
            return None
        half = cls(made, parameters, groups)
        if half.nbytes > LIMIT:
            raise Refused(
                f"training.updateRule {rule} keeps {half.nbytes} bytes that go with each worker's resume record, at most {LIMIT} fit; "
                "leave updateRule out"
            )
        return half

    @property
    def nbytes(self) -> int:
        """Most bytes of its state."""
        return len(self._rule.worker_slots) * sum(p.nbytes for p in self._parameters)

    def outgoing(
        self, grads: Sequence[torch.Tensor | None], hyperparameters: Sequence[Hyperparameters], scale: float
    ) -> list[torch.Tensor | None]:
        """What is pushed in place of `scale` times `grads`, which are left as they are. A parameter without a gradient stays without."""
        made: list[torch.Tensor | None] = [None] * len(grads)
        for row, grad in enumerate(grads):
            if grad is None:
                continue
            weights = self._parameters[row].detach().reshape(-1)
            state = self._states.setdefault(row, BlockState(weights))
            state.weights = weights
            flat = grad.detach().reshape(-1)
            out = self._rule.outgoing(state, flat if scale == 1.0 else flat * scale, hyperparameters[self._groups[row]])
            made[row] = out.view(grad.shape)
        return made

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors by `row.slot`; no copies."""
        return {f"{row}.{slot}": tensor for row, state in self._states.items() for slot, tensor in state.slots.items()}

    def load_state_dict(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Put back what `state_dict` gave. Raises ValueError if a tensor does not fit its parameter."""
        self._states.clear()
        for name, tensor in saved.items():
            row, slot = name.split(".")
            weights = self._parameters[int(row)].detach().reshape(-1)
            if tensor.shape != weights.shape or tensor.dtype != weights.dtype:
                raise ValueError(f"state {slot} of parameter {row} has {tensor.numel()} {tensor.dtype}, it has {weights.numel()}")
            self._states.setdefault(int(row), BlockState(weights)).slots[slot] = tensor.clone().to(weights.device)
