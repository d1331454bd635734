"""A shard's files of a checkpoint: blocks read back onto any number of shards, and its admission table.

The table says what the shard had taken of each worker, and which process had sent it. Its rows are those of
`psjob.shard.admission.Admission.save`, keyed by rank. In the file a worker is six values; the blocks of its open clock are one bit each.
`Base` says which blocks a checkpoint names where they already lie, and which are written again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from psjob import rules
from psjob.checkpoint import files
from psjob.checkpoint.disk import Moved
from psjob.checkpoint.files import FileFact
from psjob.checkpoint.manifest import BlockPlace, Manifest
from psjob.checkpoint.problems import Damage
from psjob.layout.blocks import assign
from psjob.rules.base import BlockState, Rule

FORMAT: Final = 1
Rows = Mapping[str, Mapping[str, Any]]


def write_admission(folder: Path, name: str, rows: Rows) -> FileFact:
    """Write the table durably, whole or not at all. Raises CheckpointProblem."""
    packed = [[int(rank), row["complete"], row["leftAt"], *row["incarnation"], _bits(row["open"])] for rank, row in rows.items()]
    return files.write_json(folder, name, {"format": FORMAT, "rows": packed})


def read_admission(folder: Path, made: Manifest, shard: int) -> dict[str, dict[str, Any]] | None:
    """The table that `shard` had in checkpoint `made`, None where it has none. Raises Damage or CheckpointProblem."""
    fact = made.tables.get(str(shard))
    if fact is None:
        return None
    body = files.read_json(folder / fact.name, fact)
    try:
        if body["format"] != FORMAT:
            raise ValueError(f"format {body['format']}")
        most = len(made.layout.blocks) + (0 if made.rows is None else len(made.rows.specs))
        rows = {
            str(int(rank)): {
                "complete": int(complete), "leftAt": None if left is None else int(left),
                "incarnation": [int(start), int(rewinds)], "open": _positions(bits, most),
            }
            for rank, complete, left, start, rewinds, bits in body["rows"]
        }  # fmt: skip
        if not rows.keys() <= made.workers.keys():
            raise ValueError(f"ranks of {len(rows)} workers, which are not all of the job's {len(made.workers)}")
        return rows
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise Damage(fact.name, "an admission table", f"{type(error).__name__}: {str(error)[:200]}") from None


def open_blocks(made: Manifest, tables: Mapping[int, Rows]) -> dict[int, set[int]]:
    """By rank, the blocks that hold its push of the very clock at which it goes on; `tables` are those of the shards that wrote `made`.

    A worker that died in the middle of a push leaves it in some blocks. It comes again, and must not count there a second time.
    """
    owner = assign(made.layout, made.shards)
    found: dict[int, set[int]] = {}
    for shard, rows in tables.items():
        own = [block for block, held_by in enumerate(owner) if held_by == shard]  # in the order of their positions
        for rank, row in rows.items():
            if row["complete"] == made.workers[rank]["clock"]:
                held = {own[position] for position in row["open"] if position < len(own)}
                found.setdefault(int(rank), set()).update(held)
    return found


def _bits(positions: list[int]) -> str:
    return format(sum(1 << position for position in positions), "x")


def _positions(bits: str, most: int) -> list[int]:
    if not isinstance(bits, str) or len(bits) > most // 4 + 1:
        raise ValueError(f"open blocks {str(bits)[:40]!r}, expected hex digits of {most} bits")
    # To shift a number of so many bits by each of them takes seconds.
    return [position for position, bit in enumerate(reversed(f"{int(bits, 16):b}")) if bit == "1"]


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


MAX_FILES: Final = 8
"""So many older files a shard's part of a manifest names at most: each is another that may be damaged."""


@dataclass(frozen=True)
class Lies:
    """A block of a checkpoint: its file, its bytes there, and the mark of what they were (the same object: the same bytes)."""

    file: str
    bytes: int
    content: object


@dataclass(frozen=True)
class Base:
    """What a shard has in one checkpoint: its blocks, and the size of each file they lie in."""

    blocks: Mapping[int, Lies]
    files: Mapping[str, int]


EMPTY: Final = Base({}, {})


def staying(base: Base, contents: Mapping[int, object]) -> frozenset[int]:
    """The blocks whose bytes are still those of `base`, and that the next checkpoint names there; all others are written.

    A file of which no more than half is still needed is given up, and so are the least needed ones beyond MAX_FILES. So a checkpoint
    names less than twice what it needs.
    """
    needed: dict[str, int] = {}
    same = {index: lies for index, lies in base.blocks.items() if index in contents and contents[index] is lies.content}
    for lies in same.values():
        needed[lies.file] = needed.get(lies.file, 0) + lies.bytes
    worth = sorted((file for file, size in needed.items() if 2 * size > base.files[file]), key=lambda file: -needed[file])
    named = frozenset(worth[:MAX_FILES])
    return frozenset(index for index, lies in same.items() if lies.file in named)
