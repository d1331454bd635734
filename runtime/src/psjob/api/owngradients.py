"""Gradients as a script leaves them: whether it changes them between backward and step, where DDP has the mean; and sparse ones."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch

from psjob.api import advice

STEPS = 3
"""Looked at from the first on."""


class OwnGradients:
    """Tells of it once, on standard error. `names` are the parameters'."""

    def __init__(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        self._parameters, self._names = parameters, names
        self._left: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        """By row, the gradient that backward left, and its version then."""
        self._steps = 0
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._seen(row))  # type: ignore[no-untyped-call]
            for row, p in enumerate(parameters)
            if p.requires_grad and p.is_leaf
        ]

    def step(self, rows: Iterable[int], scaled: bool) -> None:
        """A step is made of the gradients of `rows`. Those that a GradScaler has unscaled are `scaled`, and not looked at."""
        if not self._hooks:
            return
        changed = next((row for row in rows if self._changed(row)), None) if not scaled else None
        self._steps += 1
        if changed is not None:
            print(
                f"psjob: the gradient of {self._names[changed]} was changed by hand before optimizer.step(). It is this worker's own, and "
                "the mean is taken after the change; clip_grad_norm_ and clip_grad_value_ clip the mean",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        if changed is not None or self._steps == STEPS:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    def _seen(self, row: int) -> Callable[[torch.Tensor], None]:
        def hook(p: torch.Tensor) -> None:
            if p.grad is not None and not p.grad._is_view():  # those of one memory count their versions together
                self._left[row] = weakref.ref(p.grad), p.grad._version

        return hook

    def _changed(self, row: int) -> bool:
        now, left = self._parameters[row].grad, self._left.get(row)
        return now is not None and left is not None and (left[0]() is not now or left[1] != now._version)


def dense(parameters: Sequence[torch.Tensor], names: Sequence[str], grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Sparse gradients as dense ones, of which the rules of the shards make the same step. That they are sent so is told."""
    sparse = [row for row, g in enumerate(grads) if g is not None and g.layout is not torch.strided]
    size = sum(parameters[row].nbytes for row in sparse)
    advice.tell(
        "sparse",
        f"sparse gradients, such as that of {names[sparse[0]]}, are sent as dense ones: {size / 1e6:.1f} MB a step. ps.Embedding sends the "
        "rows of a batch only",
    )
    for row in sparse:
        parameters[row].grad = parameters[row].grad.to_dense()  # type: ignore[union-attr]
    return [parameters[row].grad if row in sparse else g for row, g in enumerate(grads)]
