"""Blocks back from a checkpoint, onto any number of shards."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from psjob import rules
from psjob.checkpoint import files
from psjob.checkpoint.manifest import BlockPlace, Manifest
from psjob.checkpoint.problems import Damage
from psjob.rules.base import BlockState


def read_states(folder: Path, made: Manifest, indices: Iterable[int]) -> dict[int, tuple[BlockState, int]]:
    """State and version n of each block in `indices`. Raises Damage, naming the file, where a byte is not what was written."""
    places = {place.index: place for place in made.blocks}
    by_file: dict[str, list[BlockPlace]] = {}
    for index in indices:
        if index not in places:
            raise Damage(made.name, f"block {index}", f"{len(places)} blocks without it")
        by_file.setdefault(places[index].file, []).append(places[index])
    found: dict[int, tuple[BlockState, int]] = {}
    try:
        slots = rules.named(made.rule).slots
    except ValueError as error:
        raise Damage(made.name, "a rule of this psjob", str(error)) from None
    for file, here in by_file.items():
        fact = made.fact(file)
        wanted = [name for place in here for name in names_of(place.index, slots) if name in fact.tensors]
        tensors = files.read_blocks(folder / file, wanted, fact)
        for place in here:
            found[place.index] = (_state(made, place, slots, tensors), place.n)
    return found


def names_of(index: int, slots: Iterable[str]) -> list[str]:
    """Names in its file of the tensors that a block may have."""
    return [f"{index}.weights", *(f"{index}.{slot}" for slot in slots)]


def _state(made: Manifest, place: BlockPlace, slots: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> BlockState:
    block = made.layout.blocks[place.index]
    weights = tensors[f"{place.index}.weights"]
    if weights.shape != (block.length,) or str(weights.dtype) != f"torch.{block.dtype}":
        raise Damage(place.file, f"block {place.index} of {block.length} {block.dtype}", f"{tuple(weights.shape)} {weights.dtype}")
    try:
        here = {slot: tensors[f"{place.index}.{slot}"] for slot in slots if f"{place.index}.{slot}" in tensors}
        return BlockState.of(weights, here, place.counts)
    except ValueError as error:
        raise Damage(made.name, f"counts and state of block {place.index}", str(error)) from None
