"""What a script without `ps.shard` trains on: a sum over each of its first inputs, so that workers with the same data can be told of."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from psjob.layout import memory
from psjob.worker.overlap import Hook, before_forward

STEPS = 16
"""So many steps are looked at."""
BYTES = 1 << 16
"""Of an input."""


class FirstInputs:
    """Looks at the first tensor that the model is given in each of the first steps, until `done` has them.

    Where the model itself is not called, as a LightningModule, it is the module that runs first.
    """

    def __init__(self, model: torch.nn.Module, done: Callable[[list[int]], None]) -> None:
        self._done = done
        self._sums: list[int] = []
        self._open = 0
        self._first: torch.nn.Module | None = None
        inside = getattr(model, "_orig_mod", model)  # torch.compile cannot trace a hook of the module that it returns
        self._hooks = [before_forward(module, Hook(self._look)) for module in inside.modules()]

    def step(self) -> None:
        """A step was made of what was looked at since the last."""
        if not self._hooks:
            return
        self._sums.append(self._open)
        self._open = 0
        if len(self._sums) == STEPS:
            self.stop()
            self._done(self._sums)

    def stop(self) -> None:
        """Look no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _look(self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if torch.is_grad_enabled() and self._first in (None, module):
            first = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
            if first is not None and (values := memory.underneath(first)) is not None and values.numel():
                self._first = module
                with torch._C._DisableFuncTorch():
                    self._open = sum_of(values, self._open)


def sum_of(tensor: torch.Tensor, before: int = 0) -> int:
    """A crc32 of the first BYTES of a dense tensor, after that of what came before."""
    part = tensor.detach().reshape(-1)[: BYTES // tensor.element_size()]
    return zlib.crc32(memory.view(memory.plain(part)), before)
