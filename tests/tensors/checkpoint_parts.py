"""A small run on disk, for the checkpoint tests."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from psjob import rules
from psjob.checkpoint import files
from psjob.checkpoint.manifest import BlockPlace, Manifest
from psjob.checkpoint.states import write_admission
from psjob.layout.blocks import Layout, TensorSpec, assign
from psjob.rules.base import BlockState

RUN = "run-1"
TABLE = [TensorSpec("w", (12, 30), "float32", 0), TensorSpec("b", (30,), "float32", 0), TensorSpec("d", (70,), "float64", 1)]
LAYOUT = Layout.of(TABLE, 1024)


def blocks(seed: int) -> dict[int, BlockState]:
    """Adam state that follows only from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    rule = rules.named("adam")
    made = {}
    for block in LAYOUT.blocks:
        dtype = getattr(torch, block.dtype)
        made[block.index] = rule.init(torch.randn(block.length, generator=generator, dtype=dtype))
        rule.apply(made[block.index], torch.randn(block.length, generator=generator, dtype=dtype), rule.hyperparameters)
    return made


def save(
    folder: Path,
    step: int,
    term: int = 1,
    snapshot: int | None = None,
    shards: int = 2,
    final: bool = False,
    run: str = RUN,
    seed: int | None = None,
    base: Manifest | None = None,
    mode: str = "sync",
) -> Manifest:
    """Write the files of one checkpoint; the manifest that is returned is not committed yet.

    With `base` half of the blocks have not changed since, and are named in its files.
    """
    snapshot = step if snapshot is None else snapshot
    states = blocks(step if seed is None else seed)
    owner = assign(LAYOUT, shards)
    facts, places = [], []
    if base is not None:
        places = [replace(place, n=step) for place in base.blocks if stays(place.index)]
        facts = [base.fact(name) for name in sorted({place.file for place in places})]
    for shard in range(shards):
        mine = [index for index in states if owner[index] == shard and not (base is not None and stays(index))]
        tensors = [(f"{i}.{name}", t) for i in mine for name, t in {"weights": states[i].weights, **states[i].slots}.items()]
        fact = files.write_blocks(folder, f"v{term:06d}-c{snapshot:06d}-shard{shard:03d}-a1.safetensors", tensors, {"run": run})
        facts.append(fact)
        places += [BlockPlace(i, fact.name, 1, step, states[i].counts()) for i in mine]
    held = [("record.0", torch.arange(9, dtype=torch.uint8))]
    records = files.write_blocks(folder, f"v{term:06d}-c{snapshot:06d}-records.safetensors", held)
    buffers = files.write_blocks(
        folder, f"v{term:06d}-c{snapshot:06d}-buffers.safetensors", [("bn.running_mean", torch.full((3,), float(step)))]
    )
    rows = {"0": {"complete": step, "open": [], "leftAt": None, "incarnation": [1, 0]}}
    tables = {str(s): write_admission(folder, f"v{term:06d}-c{snapshot:06d}-shard{s:03d}-a1-admission.json", rows) for s in range(shards)}
    return Manifest(
        run=run, term=term, step=step, mode=mode, final=final, created=1.5, layout=LAYOUT, rule="adam", update_at="server", shards=shards,
        assignment=owner, blocks=tuple(places), files=tuple(facts), tables=tables,
        workers={"0": {"clock": step, "start": 1, "rewinds": 0, "leftAt": None}}, counters={"applied": 3},
        spec_hash="ab", records=records, buffers=buffers,
    )  # fmt: skip


def stays(index: int) -> bool:
    """Is this one of the blocks that do not change where there is a base?"""
    return index % 2 == 0


def same(one: BlockState, other: BlockState) -> bool:
    """Equal in every tensor and count."""
    return (
        torch.equal(one.weights, other.weights)
        and one.slots.keys() == other.slots.keys()
        and all(torch.equal(one.slots[k], other.slots[k]) for k in one.slots)
        and one.counts() == other.counts()
    )


def names(folder: Path, beginning: str = "") -> Sequence[str]:
    """File names in order."""
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(beginning))


def damage(path: Path, how: str) -> None:
    raw = path.read_bytes()
    path.unlink()
    if how == "gone":
        return
    if how == "cut":
        path.write_bytes(raw[:-1])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "longer":
        path.write_bytes(raw + b"\0")
    elif how == "link":
        (path.parent / "real").write_bytes(raw)
        path.symlink_to(path.parent / "real")
    elif how == "fifo":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    elif how == "header beyond the end":
        path.write_bytes(struct.pack("<Q", 1 << 62) + raw[8:])
    elif how == "header of a gigabyte":
        path.write_bytes(struct.pack("<Q", 1 << 30) + raw[8:])
    elif how == "zeros":
        path.write_bytes(bytes(len(raw)))
    elif how == "another":
        files.write_blocks(path.parent, path.name, [("0.weights", torch.randn(1000))])


HOWS = ["gone", "cut", "empty", "longer", "link", "fifo", "folder", "header beyond the end", "header of a gigabyte", "zeros", "another"]
