"""Which rule stands for a torch optimizer, with what hyperparameters, and its state_dict from the shards' blocks.

`of_manifest` reads what a manifest itself says of a job's rule: its name, and numbers that no optimizer of a script has. A worker reads
them there for its optimizer. A shard reads them there too, and takes no other of a worker. `checked_options` names the field in each
sentence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from psjob import contract, rules
from psjob.layout import memory
from psjob.layout.blocks import FLOATS, Block, Layout
from psjob.rules.base import BlockState, Hyperparameters, Rule, check_hyperparameters


def checked_options(rule: Rule, known: Sequence[str], given: Mapping[str, float], field: str, by: str) -> Hyperparameters:
    """Those that were given, as the rule takes them: a flag is 0 or 1 in a manifest.

    Args:
        rule: whose numbers they are.
        known: names of those that the manifest may give.
        given: by name.
        field: of the manifest that has them.
        by: the field of the manifest that names the rule.

    Raises:
        ValueError: a number that the rule does not know, or whose value cannot be.
    """
    for name in sorted(set(given) - set(known)):
        taken = "; that is the script's optimizer's" if name in rule.hyperparameters else ""
        raise ValueError(f"{field} has {name}, which {by} {rule.name} does not take{taken}; it takes {listed_names(known) or 'none'}")
    flags = {name for name in given if isinstance(rule.hyperparameters[name], bool)}
    for name in sorted(flags):
        if given[name] not in (0, 1):
            raise ValueError(f"{field}: {name} of {by} {rule.name} is 0 or 1, got {given[name]:g}")
    try:
        checked = check_hyperparameters(rule, {name: bool(value) if name in flags else value for name, value in given.items()})
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None
    return {name: checked[name] for name in given}


def listed_names(names: Sequence[str]) -> str:
    """As in a sentence: a, b and c."""
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


OUTER = "outer-nesterov"
"""The rule of mode local where the manifest names none."""


def of_manifest(wanted: str, workers: int, options: Mapping[str, float]) -> Hyperparameters:
    """The numbers of `training.updateRule` that the manifest gives, or that follow from it. Raises ValueError naming one that cannot be."""
    known = contract.UPDATE_RULES[wanted]
    given = {**({"every": float(workers)} if "every" in known else {}), **options}
    checked = checked_options(rules.named(wanted), known, given, "training.ruleOptions", "updateRule")
    return {**checked, "workers": float(workers)} if wanted == "adam-async" else checked


def describe_optimizer(optimizer: torch.optim.Optimizer) -> tuple[str | None, list[dict[str, float | bool]]]:
    """(name of the rule, hyperparameters a parameter group), or (None, []) where no rule does exactly what this optimizer does.

    Only torch's own SGD, Adam, AdamW, NAdam and Adagrad have one, not their subclasses. `foreach`, `fused`, `capturable` and
    `differentiable` say how to compute, not what, and are not looked at.
    """
    kind = type(optimizer)
    if kind not in _READERS or not all(updatable(p) for group in optimizer.param_groups for p in group["params"]):
        return None, []
    names = {_name(kind, group) for group in optimizer.param_groups}
    if len(names) != 1:
        return None, []
    return names.pop(), [_READERS[kind](group) for group in optimizer.param_groups]


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, float | bool]]:
    """The hyperparameters as they are now, a parameter group each. Raises ValueError naming one that is not finite."""
    kind = next((kind for kind in type(optimizer).__mro__ if kind in _READERS), None)
    if kind is None:
        raise ValueError(f"{type(optimizer).__name__} has no rule on the shards")
    found = [_READERS[kind](group) for group in optimizer.param_groups]
    for index, group in enumerate(found):
        for name, value in group.items():
            if not math.isfinite(value):
                raise ValueError(f"{name} of parameter group {index} is {value}; it must be a finite number")
    return found


def assemble_state(state_dict: Mapping[str, Any], rule: str, layout: Layout, raw: Mapping[int, bytes]) -> dict[str, Any]:
    """`state_dict` of torch's optimizer with its state taken from the shards' blocks.

    `rule` is that of the optimizer; of shards that run another one, state that the optimizer does not have is left out.
    `raw` has a STATE body for each block: 4 bytes length, JSON {slots: {name: bytes}, steps, segments}, then the slots' bytes.
    Parameters are numbered as rows of the table. Raises ValueError on a body that does not fit its block.
    """
    states = {index: _parse(layout.blocks[index], body) for index, body in raw.items()}
    whole: dict[int, dict[str, Any]] = {int(row): dict(entry) for row, entry in state_dict["state"].items()}
    for row in range(len(layout.table)):
        entry = _entry(rule, layout, row, states)
        if entry:
            whole[row] = entry
    return {**state_dict, "state": whole}


def _entry(rule: str, layout: Layout, row: int, states: Mapping[int, BlockState]) -> dict[str, Any]:
    """State of one parameter as torch keeps it; empty before its first update."""
    places = layout.pieces_of(row)
    if not places:
        return {}
    block, piece = places[0]
    _, count, *numbers = states[block.index].segment_at(piece.block_offset)
    if count == 0:
        return {}
    spec = layout.table[row]
    entry: dict[str, Any] = {} if rule == "sgd" else {"step": torch.tensor(float(count), dtype=torch.float32, device="cpu")}
    if rule == "nadam" and numbers:
        entry["mu_product"] = torch.tensor(numbers[0], dtype=torch.float32, device="cpu")
    for slot in [name for name in states[block.index].slots if name in rules.named(rule).slots]:
        flat = torch.empty(spec.numel, dtype=getattr(torch, spec.dtype), device="cpu")
        for block, piece in places:
            part = states[block.index].slots[slot][piece.block_offset : piece.block_offset + piece.length]
            flat[piece.tensor_offset : piece.tensor_offset + piece.length].copy_(part)
        entry[slot] = flat.view(spec.shape)
    return entry


def _parse(block: Block, raw: bytes) -> BlockState:
    length = int.from_bytes(raw[:4], "little")
    try:
        head = json.loads(raw[4 : 4 + length])
        sizes = dict(head["slots"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"state of block {block.index} has no readable head: {error}") from None
    at = 4 + length
    slots: dict[str, torch.Tensor] = {}
    for name, size in sizes.items():
        if size != block.nbytes or at + size > len(raw):
            raise ValueError(f"state {name!r} of block {block.index} has {size} bytes, expected {block.nbytes} of {len(raw) - at} left")
        slots[name] = torch.empty(block.length, dtype=getattr(torch, block.dtype), device="cpu")
        memory.view(slots[name])[:] = raw[at : at + size]
        at += size
    weights = torch.empty(block.length, dtype=getattr(torch, block.dtype), device="cpu")
    return BlockState.of(weights, slots, head)


def updatable(parameter: torch.Tensor) -> bool:
    """Can a rule on the shards update it?"""
    return str(parameter.dtype).removeprefix("torch.") in FLOATS


def _name(kind: type, group: Mapping[str, Any]) -> str:
    if kind is torch.optim.SGD:
        return "sgd"
    if kind in (torch.optim.Adagrad, torch.optim.NAdam):
        return kind.__name__.lower()
    return "adamw" if group.get("decoupled_weight_decay", kind is torch.optim.AdamW) else "adam"


def _sgd(group: Mapping[str, Any]) -> dict[str, float | bool]:
    names = ("lr", "momentum", "dampening", "weight_decay")
    return {name: float(group[name]) for name in names} | _flags(group, "nesterov", "maximize")


def _adam(group: Mapping[str, Any]) -> dict[str, float | bool]:
    first, second = group["betas"]
    betas = {"beta1": float(first), "beta2": float(second)}
    return {name: float(group[name]) for name in ("lr", "eps", "weight_decay")} | betas | _flags(group, "amsgrad", "maximize")


def _nadam(group: Mapping[str, Any]) -> dict[str, float | bool]:
    flags = _flags(group, "decoupled_weight_decay", "maximize")
    return (
        {name: value for name, value in _adam(group).items() if name != "amsgrad"}
        | {"momentum_decay": float(group["momentum_decay"])}
        | flags
    )


def _adagrad(group: Mapping[str, Any]) -> dict[str, float | bool]:
    names = ("lr", "lr_decay", "weight_decay", "eps", "initial_accumulator_value")
    return {name: float(group[name]) for name in names} | _flags(group, "maximize")


def _flags(group: Mapping[str, Any], *names: str) -> dict[str, float | bool]:
    return {name: bool(group.get(name, False)) for name in names}


_READERS: Final[dict[type, Callable[[Mapping[str, Any]], dict[str, float | bool]]]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.NAdam: _nadam,
    torch.optim.Adagrad: _adagrad,
}


def amp(optimizer: torch.optim.Optimizer) -> tuple[float, bool]:
    """What a GradScaler left on the optimizer: the factor that unscales, and whether the step must be skipped."""
    scale = getattr(optimizer, "grad_scale", None)
    found = getattr(optimizer, "found_inf", None)
    return (1.0 if scale is None else 1.0 / float(scale)), bool(found is not None and float(found) > 0)


def clear_marks(optimizer: torch.optim.Optimizer) -> None:
    """Take those marks away: the gradients are unscaled already, and the optimizer's own step shall not do it again."""
    for mark in ("grad_scale", "found_inf"):
        if hasattr(optimizer, mark):
            setattr(optimizer, mark, None)
