"""Random draws of a pipeline's modules: bits that depend on seed, step, micro-batch and the module's name, and on nothing else.

So they are the same for any number of stages and when a forward is run again, and the script's own stream is left where it was. While a
part of the model runs, each module that may draw finds torch's generators seeded for it: a counter takes the place of a stream.
Generators of the CPU, of CUDA and of XPU are known. The CPU's takes the lower 32 bits of a seed.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


@dataclass(frozen=True)
class Draw:
    """What bits depend on, beside the name: the run's seed, the number of the step and of the micro-batch in it."""

    seed: int
    step: int
    micro: int


class Calls(Counter[str]):
    """How often each module was called in one forward, by name."""


@contextmanager
def drawing(
    draw: Draw, names: Mapping[int, str], devices: Iterable[torch.device], calls: Calls, again: bool = False, prefix: str = ""
) -> Iterator[None]:
    """Inside, modules of `names` draw by their name, and so do the nodes of an exported graph (`drawn`).

    Args:
        draw: of the forward.
        names: by id of the module, relative to `prefix`. Modules that do not draw need not be there.
        devices: where tensors lie.
        calls: counts the calls. A second call of a module draws other bits.
        again: a backward runs, in which activation checkpointing may run modules again: they draw what they drew.
        prefix: name of the module that is run.

    Raises:
        ValueError: a device whose generator is not known.
        RuntimeError: activation checkpointing runs a module again that was called several times in the forward.
    """
    active = _Active(draw, generators_of(devices), calls)

    def before(module: nn.Module, _args: Any) -> None:
        name = names.get(id(module))
        if name is None:
            return
        path = joined_path(prefix, name)
        if again and calls[path] > 1:
            raise RuntimeError(
                f"{path or type(module).__name__} is called {calls[path]} times in a forward, and activation checkpointing calls it again: "
                "which of its draws are wanted is not known. Give each call a module of its own"
            )
        active.outer.append([generator.get_state() for generator in active.generators])
        active.seed(path, 0 if again else calls[path], 0)
        if not again:
            calls[path] += 1

    def after(module: nn.Module, _args: Any, _output: Any) -> None:
        if id(module) in names and active.outer:
            put_generators_back(active.generators, active.outer.pop())

    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)]
    token = _active.set(active)
    try:
        yield
    finally:
        _active.reset(token)
        for handle in handles:
            handle.remove()


def drawn(op: Any, path: str, call: int, draws: int, *args: Any, **kwargs: Any) -> Any:
    """Run a random operator of an exported graph: the `draws`-th of the `call`-th call of module `path`."""
    active = _active.get()
    if active is None:
        return op(*args, **kwargs)
    kept = [generator.get_state() for generator in active.generators]
    try:
        active.seed(path, call, draws)
        return op(*args, **kwargs)
    finally:
        put_generators_back(active.generators, kept)


def may_draw(module: nn.Module) -> bool:
    """Could the module's own code draw? True for all that is not torch's, whose modules that draw are known."""
    return isinstance(module, DRAWING) or not type(module).__module__.startswith("torch.nn.")


DRAWING = (_DropoutNd, nn.RReLU, nn.MultiheadAttention, nn.RNNBase, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
"""Modules of torch whose own forward is random in training."""


def seed_for(*parts: int | str) -> int:
    """63 bits that depend on all of the parts and their order."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generators_of(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """The CPU's generator and those of the devices.

    Raises:
        ValueError: a device whose generator is not known.
    """
    found = [torch.default_generator]
    for device in dict.fromkeys(devices):
        if device.type in ("cpu", "meta"):
            continue
        if device.type not in ("cuda", "xpu"):
            raise ValueError(f"random draws on device {device} cannot be repeated; use cpu, cuda or xpu")
        place: Any = getattr(torch, device.type)
        found.append(place.default_generators[place.current_device() if device.index is None else device.index])
    return found


def put_generators_back(given: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    """Give each generator its state again."""
    for generator, state in zip(given, states, strict=True):
        generator.set_state(state)


def joined_path(prefix: str, name: str) -> str:
    """`prefix.name`, where either may be empty."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


@dataclass
class _Active:
    draw: Draw
    generators: list[torch.Generator]
    calls: Calls
    outer: list[list[torch.Tensor]] = field(default_factory=list)
    """States of the generators in the modules around the one that runs, innermost last."""

    def seed(self, path: str, call: int, draws: int) -> None:
        number = seed_for(self.draw.seed, self.draw.step, self.draw.micro, path, call, draws)
        for generator in self.generators:
            generator.manual_seed(number)


_active: ContextVar[_Active | None] = ContextVar("psjob.pipeline.random_draws", default=None)
