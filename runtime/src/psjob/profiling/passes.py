"""One forward and backward pass of a model whose parts are watched: who began when, and what the passes cost between these moments.

The autograd graph of a forward pass tells the rest: which tensors pass from part to part, whose parameters are whose, what is kept.
"""

from __future__ import annotations

import bisect
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from psjob.profiling.find import Found, Unfound

Meter = Callable[[], float]
"""Seconds or FLOPs so far."""


@dataclass(frozen=True)
class Event:
    """A part began its forward pass. `sequence`: number of the next operation in the autograd graph."""

    part: str
    at: float
    sequence: int


@dataclass(frozen=True)
class Passed:
    """One forward pass: what began in which order, and the graph of it."""

    events: Sequence[Event]
    end: float
    roots: Sequence[Node]
    nodes: Mapping[Node, int]
    """Every operation of the graph, with the number of the event that it belongs to."""
    outputs: Sequence[torch.Tensor]

    def forward(self) -> list[float]:
        """What each event cost until the next one; what is before the first counts as the first."""
        ends = [event.at for event in self.events[1:]] + [self.end]
        return [end - event.at for event, end in zip(self.events, ends, strict=True)]


def clock(device: torch.device) -> Meter:
    """Seconds, once the device has done what it was given."""
    if device.type == "cuda":

        def waited() -> float:
            torch.cuda.synchronize(device)
            return time.perf_counter()

        return waited
    return time.perf_counter


def forward(found: Found, parts: Mapping[str, nn.Module], meter: Meter, *hooks: Callable[[int], None]) -> Passed:
    """Run the forward pass, the loss with it where there is one. `hooks` are told the number of each event. Raises Unfound."""
    events: list[Event] = []

    def began(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            for tell in hooks:
                tell(len(events))
            events.append(Event(name, meter(), _sequence()))

        return hook

    handles = [part.register_forward_pre_hook(began(name)) for name, part in parts.items()]
    try:
        begin = meter()
        with _cast(found):
            output = found.model(*found.args, **found.kwargs)
            if found.loss is not None:
                output = found.loss(output)
        end = meter()
    finally:
        for handle in handles:
            handle.remove()
    outputs = list(_differentiable(output))
    if not outputs:
        raise Unfound("the model's output needs no gradient; return a tensor that depends on its parameters")
    if not events:
        raise Unfound("the forward pass called no module of the model; psjob cuts between modules, so call them by `self.layer(x)`")
    events[0] = Event(events[0].part, begin, events[0].sequence)
    roots = [one.grad_fn for one in outputs if one.grad_fn is not None]
    starts = [event.sequence for event in events]
    nodes = {node: max(0, bisect.bisect_right(starts, node._sequence_nr()) - 1) for node in _graph(roots)}
    return Passed(events, end, roots, nodes, outputs)


def backward(passed: Passed, meter: Meter) -> list[float]:
    """Run the backward pass; what it cost for each event.

    The engine takes operations in reverse order of their numbers, so the highest one of an event is its first.
    """
    first: dict[int, Node] = {}
    for node, event in passed.nodes.items():
        if is_operation(node) and (event not in first or node._sequence_nr() > first[event]._sequence_nr()):
            first[event] = node
    reached: list[tuple[float, int]] = []
    handles = [node.register_prehook(_reached(reached, event, meter)) for event, node in first.items()]
    begin = meter()
    torch.autograd.backward(list(passed.outputs), [torch.ones_like(one) for one in passed.outputs])
    end = meter()
    for handle in handles:
        handle.remove()
    cost = [0.0] * len(passed.events)
    marks = [(begin, len(passed.events) - 1), *reached]
    for (at, event), until in zip(marks, [at for at, _ in marks[1:]] + [end], strict=True):
        cost[event] += until - at
    return cost


def is_operation(node: Node) -> bool:
    """Whether it computes; the others add up gradients of parameters, and their number is no time."""
    return not hasattr(node, "variable")


def _reached(reached: list[tuple[float, int]], event: int, meter: Meter) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        reached.append((meter(), event))

    return hook


def _sequence() -> int:
    """The number that the next operation gets."""
    with torch.enable_grad():
        made = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True).clone().grad_fn
    assert made is not None
    return int(made._sequence_nr()) + 1


def _graph(roots: Sequence[Node]) -> Iterator[Node]:
    seen: set[Node] = set()
    edge = list(roots)
    while edge:
        node = edge.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        edge += [one for one, _ in node.next_functions if one is not None]


def _differentiable(output: Any) -> Iterator[torch.Tensor]:
    """Tensors that a backward pass can begin at; the loss alone, where the output names one."""
    if isinstance(output, torch.Tensor):
        if output.requires_grad and output.dtype.is_floating_point:
            yield output
    elif isinstance(output, Mapping):
        loss = output.get("loss")
        for one in [loss] if isinstance(loss, torch.Tensor) else output.values():
            yield from _differentiable(one)
    elif isinstance(output, (tuple, list)):
        for one in output:
            yield from _differentiable(one)


def _cast(found: Found) -> contextlib.AbstractContextManager[Any]:
    if found.autocast is None:
        return contextlib.nullcontext()
    kind = next(found.model.parameters()).device.type
    return torch.autocast(kind, dtype=found.autocast)


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
