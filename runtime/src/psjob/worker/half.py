"""The worker's half of a rule: what it makes of gradients before they are pushed, with state that goes with the resume record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from psjob import rules
from psjob.process.errors import Refused
from psjob.rules.base import BlockState, Hyperparameters, WorkerHalf
from psjob.worker.compression import LIMIT


class Half:
    """State by parameter (a row of the table); `groups` are their parameter groups."""

    def __init__(self, rule: WorkerHalf, parameters: Sequence[torch.Tensor], groups: Sequence[int]) -> None:
        self._rule, self._parameters, self._groups = rule, parameters, groups
        self._states: dict[int, BlockState] = {}

    @classmethod
    def of(cls, rule: str, parameters: Sequence[torch.Tensor], groups: Sequence[int]) -> Half | None:
        """That of the rule of this name, where it has one. Raises Refused where its state could not be saved."""
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
        """Put back what `state_dict` gave. Raises ValueError where a tensor does not fit its parameter."""
        self._states.clear()
        for name, tensor in saved.items():
            row, slot = name.split(".")
            weights = self._parameters[int(row)].detach().reshape(-1)
            if tensor.shape != weights.shape or tensor.dtype != weights.dtype:
                raise ValueError(f"state {slot} of parameter {row} has {tensor.numel()} {tensor.dtype}, it has {weights.numel()}")
            self._states.setdefault(int(row), BlockState(weights)).slots[slot] = tensor.clone().to(weights.device)
