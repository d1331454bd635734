"""The profile of a model, as `psjob plan-stages` reads it: a dict for JSON, in the format that docs/stages.md tells.

In each forward and backward pass the parts are watched: who began when, and what the passes cost between these moments. The autograd graph
of a forward pass tells the rest: which tensors pass from part to part, whose parameters are whose, what is kept.

Model and batch come out of a script: from a function that returns them, or by watching the script's first training step. `model_parts`
says which modules are the parts that a cut may lie between: its blocks, and the insides of what is too large for one.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from psjob.profiling.find import Found, Parts, Unfound, model_parts, order

logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)  # where triton is missing it says so, and a profile needs none
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

Meter = Callable[[], float]
"""Seconds or FLOPs so far."""
Tell = Callable[[int], None]
"""Is given the number of an event that begins."""
FORMAT = 1
WARM_UP = 2
FEWEST, MOST, SECONDS = 3, 15, 10.0
"""Passes that are timed: so many at least, and up to so many while they take no longer."""
CALIBRATION = 1024
"""Side of the two matrices whose product tells this machine's FLOP/s."""


def profiled(found: Found) -> dict[str, Any]:
    """Run the model some times; what each part takes. Raises Unfound."""
    found = _plain(found)
    model = found.model
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    counter = FlopCounterMode(display=False) if found.meta else None
    meter: Meter = (lambda: float(counter.get_total_flops())) if counter is not None else clock(device)

    def shares(parts: Parts) -> Mapping[str, float]:
        ruler = FlopCounterMode(display=False)  # seconds would open other modules every time
        row, passed = _once(found, parts, lambda: float(ruler.get_total_flops()), ruler)
        return _shares([event.part for event in passed.events], row, parts)

    parts = _bound(model_parts(model, shares), found, meter)
    kept, passed = _kept(found, parts, meter, counter)
    names = [event.part for event in passed.events]
    runs = _timed(found, parts, meter, counter, names)
    per_second = _flops(found) if found.meta else 1.0
    order_of = order(names)
    part_of = [i for i, (_, first, last) in enumerate(order_of) for _ in range(first, last + 1)]
    medians = [[statistics.median(run[way][i] for run in runs) / per_second for i in range(len(names))] for way in (0, 1)]
    weights = users(passed, part_of)
    outputs = sent_tensors(passed, part_of)
    fixed = _fixed(model, parts, {name: i for i, (name, _, _) in enumerate(order_of)}, names, part_of)
    nodes = []
    for i, (name, first, last) in enumerate(order_of):
        span = range(first, last + 1)
        nodes.append(
            {
                "name": name,
                "forward": sum(medians[0][j] for j in span),
                "backward": sum(medians[1][j] for j in span),
                "parameters": sum(_size(one) for one, used in weights.items() if used == {i}),
                "fixed": fixed.get(i, 0),
                "saved": int(sum(kept[j] for j in span)),
                "outputs": outputs.get(i, []),
            }
        )
    inputs = list(tensors_in([found.args, dict(found.kwargs)]))
    return {
        "format": FORMAT,
        "model": type(model).__name__,
        "device": _told(device, found.meta, per_second),
        "estimated": found.meta,
        **({"samples": inputs[0].shape[0]} if inputs and inputs[0].dim() and inputs[0].shape[0] else {}),
        "input": sum(_size(one) for one in inputs),
        "nodes": nodes,
        "tied": [{"bytes": _size(one), "nodes": sorted(used)} for one, used in weights.items() if len(used) > 1],
    }


def _plain(found: Found) -> Found:
    """Without what torch.compile and DistributedDataParallel put around a model: they hide its modules."""
    model = found.model
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            break
        model = inner
    return Found(model, found.args, found.kwargs, found.loss, found.autocast, found.meta)


Row = tuple[list[float], list[float]]


def _once(found: Found, parts: Parts, meter: Meter, counter: FlopCounterMode | None, *hooks: Tell) -> tuple[Row, Passed]:
    """What each event cost forward and backward, in the meter's unit."""
    found.model.zero_grad(set_to_none=found.meta)
    if counter is None:
        passed = forward(found, parts, meter, *hooks)
        return (passed.forward(), backward(passed, meter)), passed
    with counter:
        passed = forward(found, parts, meter, *hooks)
        return (passed.forward(), backward(passed, meter)), passed


def _timed(found: Found, parts: Parts, meter: Meter, counter: FlopCounterMode | None, names: Sequence[str]) -> list[Row]:
    rows = []
    begin = time.monotonic()
    for number in range(1 if found.meta else WARM_UP + MOST):
        row, passed = _once(found, parts, meter, counter)
        if [event.part for event in passed.events] != names:
            raise Unfound("the forward pass calls its modules in another order every time; psjob plans stages of models with one order")
        rows.append(row)
        if number + 1 >= WARM_UP + FEWEST and time.monotonic() - begin > SECONDS:
            break
    return rows[WARM_UP:] or rows


def _kept(found: Found, parts: Parts, meter: Meter, counter: FlopCounterMode | None) -> tuple[list[float], Passed]:
    kept = KeptMemory(found.model, list(tensors_in([found.args, dict(found.kwargs)])))
    with kept.watching():
        passed = forward(found, parts, meter, kept.begins)
    return kept.by_event(passed), passed


def _bound(parts: Parts, found: Found, meter: Meter) -> Parts:
    """Without modules that are called again and have no weights, such as one ReLU for all layers: they bind nothing together."""
    names = [event.part for event in forward(found, parts, meter).events]
    bare = {name for name in parts if names.count(name) > 1 and not {*parts[name].parameters(), *parts[name].buffers()}}
    return {name: part for name, part in parts.items() if name not in bare} if len(bare) < len(set(names)) else parts


def _shares(names: Sequence[str], row: Row, parts: Parts) -> dict[str, float]:
    """The larger one of each part's shares of FLOPs and of weights."""
    flops: dict[str, float] = dict.fromkeys(names, 0.0)
    for name, forth, back in zip(names, *row, strict=True):
        flops[name] += forth + back
    weights = {name: float(sum(_size(one) for one in parts[name].parameters())) for name in flops}
    all_flops, all_weights = sum(flops.values()) or 1.0, sum(weights.values()) or 1.0
    return {name: max(flops[name] / all_flops, weights[name] / all_weights) for name in flops}


def _fixed(model: nn.Module, parts: Parts, place: Mapping[str, int], names: Sequence[str], part_of: Sequence[int]) -> dict[int, int]:
    """Bytes of frozen parameters and buffers at the part that holds them; those that lie around the parts at the first one."""
    home = {name: part_of[i] for i, name in reversed(list(enumerate(names)))} | dict(place)
    found: dict[int, int] = {}
    for name, one in [*model.named_parameters(), *model.named_buffers()]:
        if not one.requires_grad:
            at = next((home[part] for part in parts if name.startswith(f"{part}.") and part in home), 0)
            found[at] = found.get(at, 0) + _size(one)
    return found


def _flops(found: Found) -> float:
    """FLOPs a second of this machine in the model's number format, by a product of two matrices."""
    dtype = next((one.dtype for one in found.model.parameters()), torch.float32)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    one = torch.ones(CALIBRATION, CALIBRATION, dtype=dtype, device=device)
    meter = clock(device)
    taken = []
    for _ in range(5):
        begin = meter()
        torch.mm(one, one)
        taken.append(meter() - begin)
    return 2 * CALIBRATION**3 / min(taken)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _told(device: torch.device, meta: bool, per_second: float) -> str:
    if meta:
        return f"no device: seconds from FLOPs at {per_second / 1e9:.0f} GFLOP/s, which a product of matrices reaches here"
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"


@dataclass(frozen=True)
class PartBegan:
    """A part began its forward pass. `sequence`: number of the next operation in the autograd graph."""

    part: str
    at: float
    sequence: int


@dataclass(frozen=True)
class Passed:
    """One forward pass: what began in which order, and the graph of it."""

    events: Sequence[PartBegan]
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
    """Run the forward pass, the loss with it where there is one. `hooks` get the number of each event. Raises Unfound."""
    events: list[PartBegan] = []

    def began(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            for tell in hooks:
                tell(len(events))
            events.append(PartBegan(name, meter(), _sequence()))

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
    events[0] = PartBegan(events[0].part, begin, events[0].sequence)
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


def sent_tensors(passed: Passed, part_of: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
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


class KeptMemory:
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


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors_in(one)
