"""What overlap hooks into a model: gradients as backward makes them, modules as they begin, readers of the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from psjob.worker.overlap import Overlap
from psjob.worker.use import Tree

CarryOut = Callable[[Callable[[], Any]], Any]


def tree_of(model: torch.nn.Module, parameters: Sequence[torch.Tensor]) -> Tree:
    """Which rows of the table each module holds itself."""
    row_of = {id(p): row for row, p in enumerate(parameters)}
    return Tree({path: [row_of[id(p)] for p in m._parameters.values() if id(p) in row_of] for path, m in _all_of(model)})


def install(model: torch.nn.Module, overlap: Overlap, carry_out: CarryOut, makes_again: Callable[[], bool]) -> None:
    """Hook `overlap` in. `carry_out` runs a call that may end this process; `makes_again`: steps without effect are being made."""
    for row, p in enumerate(overlap.parameters):
        if p.requires_grad and row not in overlap.apart:
            p.register_post_accumulate_grad_hook(_accumulated(overlap, row, makes_again))  # type: ignore[no-untyped-call]
    paths: dict[torch.nn.Module, list[str]] = {}
    for path, module in _all_of(model):
        paths.setdefault(module, []).append(path)
    for module, own in paths.items():
        before_forward(module, Hook(_before_forward(overlap, carry_out, own)), prepend=True)
        before_state(module, Hook(_before_state(overlap, carry_out)))


def before_forward(module: torch.nn.Module, hook: Hook, prepend: bool = False) -> RemovableHandle:
    """Call `hook` with module, positional and named arguments before each forward, also of a scripted module that is called by itself."""
    # Scripted modules refuse by their own name what torch does for them if they are called from Python.
    return torch.nn.Module.register_forward_pre_hook(module, hook, prepend=prepend, with_kwargs=True)


def before_state(module: torch.nn.Module, hook: Hook) -> RemovableHandle:
    """Call `hook` with the module before each `state_dict`, as `before_forward` does."""
    handle: RemovableHandle = torch.nn.Module.register_state_dict_pre_hook(module, hook)  # type: ignore[no-untyped-call]
    return handle


class Hook:
    """A hook that copies of its module do not have, nor pickles of it."""

    def __init__(self, act: Callable[..., None]) -> None:
        self._act = act

    def __call__(self, *given: Any) -> None:
        self._act(*given)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _forgotten, ()


def _forgotten() -> Callable[..., None]:
    return _nothing


def _nothing(*_given: object) -> None:
    return None


def _accumulated(overlap: Overlap, row: int, makes_again: Callable[[], bool]) -> Callable[[torch.Tensor], None]:
    def hook(p: torch.Tensor) -> None:
        gradient = p.grad
        if gradient is not None and gradient.layout is torch.strided and not makes_again():
            overlap.told(row, gradient)

    return hook


def _before_forward(overlap: Overlap, carry_out: CarryOut, paths: Sequence[str]) -> Callable[..., None]:
    def hook(module: torch.nn.Module, *_given: object) -> None:
        if overlap.learning:
            if torch.is_grad_enabled():
                overlap.ran += [path for path in paths if path not in overlap.ran]
            return
        if overlap.landed():
            return
        # Without gradients, modules may read what is inside them by other ways than in training (torch's fast paths do).
        whole = not torch.is_grad_enabled() or (not module.training and next(module.children(), None) is not None)
        blocks = overlap.all_blocks if whole else frozenset().union(*(overlap.use.waits.get(path, frozenset()) for path in paths))
        carry_out(lambda: overlap.need(blocks))

    return hook


def _before_state(overlap: Overlap, carry_out: CarryOut) -> Callable[..., None]:
    def hook(*_given: object) -> None:
        if not overlap.landed():
            carry_out(lambda: overlap.need(overlap.all_blocks))

    return hook


def _all_of(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    return list(model.named_modules(remove_duplicate=False))
