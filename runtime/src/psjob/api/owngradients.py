"""Gradients as a script leaves them: whether it changes them between backward and step, where DDP has the mean; and sparse ones.

Gradients that a step has left, and that a script goes on with in place of clearing them; and those that change after they were clipped.

No record holds them, so a script that was started again has none where the process before had some. And where the shards clip, those of the
worker are as they were before. A script that clears them first never sees that; one that adds to them is refused.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

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
        f"sparse gradients, such as that of {names[sparse[0]]}, are sent as dense ones: {size / 1e6:.1f} MB per step. ps.Embedding sends "
        "the rows of a batch only",
    )
    for row in sparse:
        parameters[row].grad = parameters[row].grad.to_dense()  # type: ignore[union-attr]
    return [parameters[row].grad if row in sparse else g for row, g in enumerate(grads)]


NAME: Final = "gradients left"
"""Of these in a resume record."""
LOST: Final = (
    "a gradient that the step before has left was added to, or used again, after a restart, and no record holds it. Call zero_grad before "
    "the first backward of each step, and make no step without a backward"
)
UNCLIPPED: Final = (
    "a gradient that the step before has left was clipped by the shards at the last step, and is added to, or used again, as it was "
    "before. Call zero_grad before the first backward of each step, or set training.updateAt: worker"
)
CHANGED: Final = (
    "a gradient was changed after it was clipped, and the mean gradient of a step is clipped as the step is made. Clip right before each "
    "step, when its gradients are complete"
)


class LeftGradients:
    """Of all parameters. A few small ones show what becomes of all: those of `watched`, by row."""

    counts_again = True
    """It is put back where the script stands, and not before."""

    def __init__(self, parameters: Sequence[torch.Tensor], watched: Collection[int]) -> None:
        self._parameters, self._watched = parameters, tuple(watched)
        self._stepped: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        """By row, the gradient as it was after the last step, and its version."""
        self._armed: dict[int, tuple[weakref.ref[torch.Tensor], int, str]] = {}
        """By row, a gradient that is to be cleared before it is used, its version, and why."""
        self._used: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        """By row, a gradient that was added to before it was cleared, and why no step may be made of it."""
        self._clipped: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        """By row, a gradient as it was when the script clipped it for the step that comes."""
        self._hooks: dict[int, Any] = {}
        self._within: Callable[[int], bool] = _none
        """Rows of the step that is made now: a record may be made before it is over, of the moment after it."""

    def problem(self, rows: Callable[[int], bool]) -> str:
        """Why the step that is made now, of these rows, would be wrong; empty: it is not."""
        self._within = rows
        if any(rows(row) and not self._is_as(row, then) for row, then in self._clipped.items()):
            return CHANGED
        again = (why for row, (_, _, why) in self._armed.items() if rows(row) and self._is_as(row, self._armed[row][:2]))
        used = (why for row, (grad, why) in self._used.items() if rows(row) and grad() is self._parameters[row].grad is not None)
        return next(used, "") or next(again, "")

    def clip(self, rows: Collection[int]) -> bool:
        """The script clips the gradients of these rows, which is done in the step that comes. Were the same ones clipped before?"""
        again = any(row in self._clipped and self._is_as(row, self._clipped[row]) for row in rows)
        for row in set(self._watched).intersection(rows):
            if (grad := self._parameters[row].grad) is not None:
                self._clipped[row] = weakref.ref(grad), grad._version
        return again

    def forget(self, rows: Callable[[int], bool]) -> None:
        """A step of these rows is over, also one that was not made."""
        self._clipped = {row: then for row, then in self._clipped.items() if not rows(row)}

    def stepped(self, rows: Callable[[int], bool], clipped: bool) -> None:
        """A step of these rows was made. `clipped`: on the shards only."""
        self._within = _none
        for row in filter(rows, self._watched):
            self._armed.pop(row, None)
            self._stepped.pop(row, None)
            if (grad := self._parameters[row].grad) is not None:
                self._stepped[row] = weakref.ref(grad), grad._version
        if clipped:
            self._arm(filter(rows, list(self._stepped)), UNCLIPPED)

    def state_dict(self) -> dict[str, Any]:
        """Rows that have a gradient; whether the script has cleared it since the last step."""
        there = [row for row, p in enumerate(self._parameters) if p.grad is not None]
        left = [row for row, then in self._stepped.items() if not self._within(row) and self._is_as(row, then)]
        left += [row for row in filter(self._within, self._watched) if self._parameters[row].grad is not None]
        return {"rows": there, "cleared": not left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Zeros in the place of gradients that no record holds, to be cleared before they are used; nothing else was known to be there."""
        rows = [row for row in state.get("rows", ()) if row < len(self._parameters)]
        for row in rows:
            p = self._parameters[row]
            if p.grad is None and p.is_leaf:
                p.grad = torch.zeros_like(p)
        if rows and not state.get("cleared", True):
            self._arm(rows, LOST)

    def _is_as(self, row: int, then: tuple[weakref.ref[torch.Tensor], int]) -> bool:
        grad = self._parameters[row].grad
        return grad is not None and then[0]() is grad and then[1] == grad._version

    def _arm(self, rows: Any, why: str) -> None:
        for row in rows:
            grad = self._parameters[row].grad
            if row in self._watched and grad is not None:
                self._armed[row] = weakref.ref(grad), grad._version, why
        for row in self._armed.keys() - self._hooks.keys():
            if self._parameters[row].requires_grad:  # a frozen one has no such hook, and is looked at by the step itself
                self._hooks[row] = self._parameters[row].register_post_accumulate_grad_hook(self._added(row))  # type: ignore[no-untyped-call]

    def _added(self, row: int) -> Callable[[torch.Tensor], None]:
        """Autograd adds in place: what was cleared before is another tensor by then, or was written to twice."""

        def hook(p: torch.Tensor) -> None:
            if (armed := self._armed.get(row)) is not None:
                grad, version, why = armed
                if self._is_as(row, (grad, version + 1)):
                    self._used[row] = grad, why
                del self._armed[row]

        return hook


def _none(_row: int) -> bool:
    return False
