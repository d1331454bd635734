"""The profile of a model, as `psjob plan-stages` reads it: a dict for JSON, in the format that docs/stages.md tells."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from psjob.profiling import passes
from psjob.profiling.find import Found, Parts, Unfound, order, parts_of
from psjob.profiling.passes import Meter, Passed, backward, clock, forward

logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)  # where triton is missing it says so, and a profile needs none
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

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

    parts = _bound(parts_of(model, shares), found, meter)
    kept, passed = _kept(found, parts, meter, counter)
    names = [event.part for event in passed.events]
    runs = _timed(found, parts, meter, counter, names)
    per_second = _flops(found) if found.meta else 1.0
    order_of = order(names)
    part_of = [i for i, (_, first, last) in enumerate(order_of) for _ in range(first, last + 1)]
    medians = [[statistics.median(run[way][i] for run in runs) / per_second for i in range(len(names))] for way in (0, 1)]
    weights = passes.users(passed, part_of)
    outputs = passes.sent(passed, part_of)
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
    inputs = list(passes.tensors([found.args, dict(found.kwargs)]))
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


def _once(found: Found, parts: Parts, meter: Meter, counter: FlopCounterMode | None, *hooks: passes.Tell) -> tuple[Row, Passed]:
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
    kept = passes.Kept(found.model, list(passes.tensors([found.args, dict(found.kwargs)])))
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
