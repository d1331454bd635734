"""What the autograd graph of a forward pass tells: which tensors pass from part to part, whose parameters are whose, what is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from psjob.profiling.passes import Passed, is_operation


def sent(passed: Passed, part_of: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
    """Of each part the tensors that later ones read: bytes, and the parts. `part_of`: the part of each event.

    Only what has a gradient is seen: masks, positions and other integers that a script hands from module to module are not.
    """
    readers: dict[tuple[Any, int], set[int]] = {}
    for node, event in passed.nodes.items():
        if not is_operation(node):
            continue
        for source, index in node.next_functions:
            if source is not None and is_operation(source) and part_of[passed.nodes[source]] < part_of[event]:
                readers.setdefault((source, index), set()).add(part_of[event])
    found: dict[int, list[dict[str, Any]]] = {}
    for (source, index), to in readers.items():
        shape = source._input_metadata[index]
        size = torch.Size(shape.shape).numel() * shape.dtype.itemsize
        found.setdefault(part_of[passed.nodes[source]], []).append({"bytes": size, "to": sorted(to)})
    return {part: sorted(outputs, key=lambda one: (one["to"], one["bytes"])) for part, outputs in found.items()}


def users(passed: Passed, part_of: Sequence[int]) -> dict[nn.Parameter, set[int]]:
    """The parts that use each parameter."""
    found: dict[nn.Parameter, set[int]] = {}
    for node, event in passed.nodes.items():
        for source, _ in node.next_functions:
            if source is not None and not is_operation(source):
                found.setdefault(source.variable, set()).add(part_of[event])  # type: ignore[attr-defined]
    return found


class Kept:
    """Bytes that each event makes and autograd keeps, each memory once; neither parameters nor what the model was given."""

    def __init__(self, model: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        self._seen = {_memory(one) for one in [*model.parameters(), *model.buffers(), *inputs]}
        self._alive: list[torch.Tensor] = []
        self._event = 0
        self.made: list[tuple[Any, int, int]] = []
        """Graph node (None: the event's own), event and bytes of each memory."""

    def begins(self, event: int) -> None:
        """For `forward`: from now on things belong to this event."""
        self._event = max(0, event)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While the forward pass runs."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda one: one):
            yield

    def by_event(self, passed: Passed) -> list[float]:
        """Each memory at the event whose operation made it."""
        sizes = [0.0] * len(passed.events)
        for node, event, size in self.made:
            sizes[passed.nodes.get(node, event)] += size
        return sizes

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        memory = _memory(tensor)
        if memory not in self._seen and not isinstance(tensor, nn.Parameter):
            self._seen.add(memory)
            self._alive.append(tensor)  # so that its memory is not given to another one meanwhile
            self.made.append((tensor.grad_fn, self._event, tensor.untyped_storage().nbytes()))
        return tensor


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors(one)
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors(one)


Tell = Callable[[int], None]
