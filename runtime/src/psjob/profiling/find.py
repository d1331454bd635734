"""Gets the model and one batch out of a script: from a function that returns them, or by watching the script's first training step.

`model_parts` says which modules are the parts that a cut may lie between: its blocks, and the insides of what is too large for one.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

Parts = dict[str, nn.Module]
Shares = Callable[[Parts], Mapping[str, float]]
"""Of each part that a forward pass calls the larger one of its shares of FLOPs and weights."""
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Modules that compute nothing themselves: a cut inside is as good as one outside."""
MOST_PARTS = 512
OPEN_CONTAINER, OPEN_MODULE = 1 / 64, 1 / 4
"""A container, or another module, is opened where it has more than this share of the FLOPs or of the weights."""
DEPTH = 12


def model_parts(model: nn.Module, shares: Shares) -> Parts:
    """Modules of which none is inside another, by their names in `named_modules()`. Raises Unfound."""
    shut: set[str] = set()
    opened = {""}
    for name, part in model.named_modules():  # the pass may call nothing except what lies in lists
        if name and name.rpartition(".")[0] in opened and isinstance(part, (nn.ModuleList, nn.ModuleDict)):
            opened.add(name)
    if not any(True for _ in model.children()):
        raise Unfound(f"{type(model).__name__} has no modules inside, so there is nowhere to cut it; build it of modules")
    parts = _edge(model, opened)
    for _ in range(DEPTH):
        found = shares(parts)
        closed = {name for name in opened - {""} if not _called(name, found)} - shut
        shut |= {name for name in closed if not isinstance(model.get_submodule(name), CONTAINERS)}
        if opened & shut:
            opened -= shut
            parts = _edge(model, opened)
            continue
        more = {name for name, part in parts.items() if name not in shut and _opens(part, found.get(name))}
        if not more or len(parts) >= MOST_PARTS:
            break
        opened |= more
        parts = _edge(model, opened)
    return parts


def _edge(model: nn.Module, opened: set[str]) -> Parts:
    """What lies directly inside opened modules and is not opened itself."""
    parts = {}
    for name, part in model.named_modules():
        if name not in opened and name.rpartition(".")[0] in opened:
            parts[name] = part
    return parts


def _opens(part: nn.Module, share: float | None) -> bool:
    if next(part.children(), None) is None:
        return False
    if share is None:
        return True  # it is not called itself, as a ModuleList: what is inside may be
    return share > (OPEN_CONTAINER if isinstance(part, CONTAINERS) else OPEN_MODULE)


def _called(name: str, found: Mapping[str, float]) -> bool:
    return any(part.startswith(f"{name}.") for part in found)


def order(names: Sequence[str]) -> list[tuple[str, int, int]]:
    """Parts with their first and last event; those that a part which is called again lies around are one with it."""
    last = {name: i for i, name in enumerate(names)}
    found: list[tuple[str, int, int]] = []
    i = 0
    while i < len(names):
        end = j = i
        while j <= end:
            end = max(end, last[names[j]])
            j += 1
        found.append((names[i], i, end))
        i = end + 1
    return found


ROOM = 0.8
"""A model is run for real where its weights, their gradient and as much again take no more than this share of the free memory."""
EXAMPLE = "def build(): return model, example_inputs"


class Unfound(Exception):
    """The message says what was looked for, and what to write."""


@dataclass(frozen=True)
class Found:
    """A model with what its forward pass is given. `loss`: of its output, where one is known."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], torch.Tensor] | None = None
    autocast: torch.dtype | None = None
    """Of the device that the model is on."""
    meta: bool = False
    """On the meta device: shapes without numbers."""


def from_function(script: Path, name: str, args: Sequence[str], meta: bool, room: int | None) -> Found:
    """What `name()` of `script` returns: (model, inputs) or (model, inputs, loss function). Raises Unfound.

    Args:
        script: a file, which is run without being `__main__`.
        name: of a function without arguments.
        args: of the script, as its `sys.argv`.
        meta: build it on the meta device.
        room: bytes of free memory; a model that needs more is built on the meta device. None: not asked.
    """
    _as_main(script, args)
    made = runpy.run_path(str(script), run_name="psjob_profiled")
    function = made.get(name)
    if not callable(function):
        raise Unfound(f"{script.name}:{name}: there is no such function; write `{EXAMPLE}` in {script.name}")
    if not meta and room is not None:
        with contextlib.suppress(Exception):  # what cannot be built on the meta device is built for real
            with torch.device("meta"):
                model = function()[0]
            meta = 3 * sum(one.numel() * one.element_size() for one in model.parameters()) > ROOM * room
    with torch.device("meta") if meta else contextlib.nullcontext():
        returned = function()
    if not (isinstance(returned, tuple) and len(returned) in (2, 3) and isinstance(returned[0], nn.Module)):
        told = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else type(returned).__name__
        raise Unfound(f"{script.name}:{name} returned {told}; return (model, example_inputs) or (model, example_inputs, loss_fn)")
    model, inputs = returned[:2]
    loss = returned[2] if len(returned) > 2 else None
    if isinstance(inputs, Mapping):
        return Found(model, (), dict(inputs), loss, meta=meta)
    return Found(model, tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}, loss, meta=meta)


def from_script(script: Path, args: Sequence[str], then: Callable[[Found], None]) -> None:
    """Run `script` as `__main__`; at its first `optimizer.step()`, `then` is called with what was trained, and must not return.

    Raises Unfound: the script ended before, or trains what is called in several parts.
    """
    _as_main(script, args)
    with _calls() as calls:

        def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
            found = [call for call in calls.values() if any(id(one) in trained for one in call.model.parameters())]
            if not found:
                return
            if len(found) > 1:
                names = ", ".join(type(call.model).__name__ for call in found)
                raise Unfound(f"{script.name} calls {len(found)} modules one by one ({names}); put them into one, or {_write(script)}")
            then(found[0])

        handle = register_optimizer_step_pre_hook(stepped)
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            if end.code not in (0, None):
                raise
        finally:
            handle.remove()
    raise Unfound(f"{script.name} ended without an optimizer.step() of a model that it called; {_write(script)}")


def _write(script: Path) -> str:
    return f"write `{EXAMPLE}` in {script.name} and give {script.name}:build"


def _as_main(script: Path, args: Sequence[str]) -> None:
    sys.argv = [str(script), *args]
    sys.path[0] = str(script.absolute().parent)


@contextlib.contextmanager
def _calls() -> Iterator[dict[int, Found]]:
    """The last call of every module that has parameters, is called for training and by no other module."""
    found: dict[int, Found] = {}
    plain = nn.Module.__call__
    deep = 0

    def watched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal deep
        if not deep and torch.is_grad_enabled() and (first := next(self.parameters(), None)) is not None:
            kind = first.device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            found[id(self)] = Found(self, args, kwargs, autocast=dtype)
        deep += 1
        try:
            return plain(self, *args, **kwargs)
        finally:
            deep -= 1

    nn.Module.__call__ = watched  # type: ignore[method-assign]
    try:
        yield found
    finally:
        nn.Module.__call__ = plain  # type: ignore[method-assign]
