"""Blocks back from a checkpoint, onto any number of shards."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from psjob import rules
from psjob.checkpoint import files
from psjob.checkpoint.disk import Moved
from psjob.checkpoint.files import FileFact
from psjob.checkpoint.manifest import BlockPlace, Manifest
from psjob.checkpoint.problems import Damage
from psjob.rules.base import BlockState, Rule

WEIGHTS = "weights"


def state_bytes(made: Manifest, indices: Iterable[int]) -> int:
    """Bytes that `read_states` reads. Raises Damage where the manifest does not hold a block."""
    places = {place.index: place.file for place in made.blocks}
    sizes: dict[str, dict[str, int]] = {}
    total = 0
    for index in indices:
        file = places.get(index)
        if file is None:
            raise Damage(made.name, f"block {index}", f"{len(places)} blocks without it")
        if file not in sizes:
            sizes[file] = {}
            for name, span in made.fact(file).tensors.items():
                block = name.partition(".")[0]
                sizes[file][block] = sizes[file].get(block, 0) + span.length
        total += sizes[file].get(str(index), 0)
    return total


def read_states(folder: Path, made: Manifest, indices: Iterable[int], moved: Moved | None = None) -> dict[int, tuple[BlockState, int]]:
    """State and version n of each block in `indices`. Raises Damage, naming the file, where a byte is not what was written.

    Nothing else of the checkpoint is read. What `moved` raises ends the reading.
    """
    places = {place.index: place for place in made.blocks}
    by_file: dict[str, list[BlockPlace]] = {}
    for index in indices:
        if index not in places:
            raise Damage(made.name, f"block {index}", f"{len(places)} blocks without it")
        by_file.setdefault(places[index].file, []).append(places[index])
    found: dict[int, tuple[BlockState, int]] = {}
    try:
        rule = rules.named(made.rule)
    except ValueError as error:
        raise Damage(made.name, "a rule of this psjob", str(error)) from None
    for file, here in by_file.items():
        fact = made.fact(file)
        held = _names(made, rule, fact)
        tensors = files.read_blocks(folder / file, [f"{place.index}.{name}" for place in here for name in held[place.index]], fact, moved)
        for place in here:
            found[place.index] = (state_of(made, place, {name: tensors[f"{place.index}.{name}"] for name in held[place.index]}), place.n)
    return found


def _names(made: Manifest, rule: Rule, fact: FileFact) -> dict[int, list[str]]:
    """What a file has of each block: its weights, and state by the names that the rule gives it. Raises Damage for any other name."""
    indices = {str(block.index): block.index for block in made.layout.blocks}
    held: dict[int, list[str]] = {}
    for tensor in fact.tensors:
        index, _, name = tensor.partition(".")
        slot, of, rank = name.partition("@")
        known = (slot in rule.per_worker and rank in made.workers) if of else slot in (WEIGHTS, *rule.slots)
        if not known or index not in indices:
            expected = f"weights and state of rule {made.rule} for {len(made.workers)} workers and {len(indices)} blocks"
            raise Damage(fact.name, expected, f"a tensor {tensor[:80]!r}")
        held.setdefault(indices[index], []).append(name)
    return held


def state_of(made: Manifest, place: BlockPlace, tensors: dict[str, torch.Tensor]) -> BlockState:
    """The state of a block, whose tensors by name these are. Raises Damage where they are not what the manifest says."""
    block = made.layout.blocks[place.index]
    weights = tensors.pop(WEIGHTS)
    if weights.shape != (block.length,) or str(weights.dtype) != f"torch.{block.dtype}":
        raise Damage(place.file, f"block {place.index} of {block.length} {block.dtype}", f"{tuple(weights.shape)} {weights.dtype}")
    try:
        return BlockState.of(weights, tensors, place.counts)
    except ValueError as error:
        raise Damage(made.name, f"counts and state of block {place.index}", str(error)) from None
