"""One forward and backward pass of a model whose parts are watched: who began when, and what the passes cost between these moments."""

from __future__ import annotations

import bisect
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
