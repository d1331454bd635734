"""A small run on disk, for the checkpoint tests.

- A store with a table of rows, and its checkpoints.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from psjob import rules
from psjob.checkpoint import files, manifest
from psjob.checkpoint.files import FileFact
from psjob.checkpoint.manifest import BlockPlace, Manifest, RowPlaces
from psjob.checkpoint.states import write_admission
from psjob.layout.blocks import Layout, TensorSpec, assign
from psjob.rules.base import BlockState, check_hyperparameters
from psjob.shard.table import RowSnapshots
from psjob.tables import Partition, RowTable, TableSpec
from psjob.tables.rules import named
from tests.tensors import checkpoint_parts as parts

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


SPECS = (
    TableSpec("users", 4, "adam", admit_after=2, evict_after=40),
    TableSpec("words", 3, "rowwise_adagrad", num_rows=300, init="uniform", scale=0.1, seed=4),
    TableSpec("counts", 2, "sum", dtype="int32", init="identity"),
)


@dataclass
class Served:
    number: int
    table: RowTable
    n: int = 0
    lock: Any = field(default_factory=threading.Lock)


class World:
    """Shards with tables, and what a coordinator does with their snapshots."""

    def __init__(self, folder: Path, shards: int = 2, seed: int = 0) -> None:
        self.folder, self.partition = folder, Partition.even(shards)
        self.shards = [[Served(number, RowTable(spec)) for number, spec in enumerate(SPECS)] for _ in range(shards)]
        self.snapshots = [RowSnapshots(folder, "run-1") for _ in range(shards)]
        self.chance = torch.Generator().manual_seed(seed)
        self.clock, self.base = 0, None
        self.made: Manifest | None = None
        self.snapshot = 0

    def push(self, most: int = 120, least: int = 0) -> None:
        """One clock: some ids of every table, on the shards that have them."""
        for number, spec in enumerate(SPECS):
            ids = torch.randperm(300, generator=self.chance)[
                : int(torch.randint(least, max(most, least + 1), (), generator=self.chance)) + 1
            ]
            if spec.num_rows is None:
                ids = ids * 7919 - 1_000_000
            grads = torch.randn(len(ids), spec.dim, generator=self.chance)
            if spec.dtype == "int32":
                grads = grads.mul_(1e6).int()
            owner = self.partition.shard_of(ids)
            for shard, cells in enumerate(self.shards):
                mine = owner == shard
                with cells[number].lock:
                    cells[number].table.push(ids[mine], grads[mine], check_hyperparameters(named(spec.rule), {}), self.clock)
                    cells[number].table.evict(self.clock)
                    cells[number].n += 1
        self.clock += 1

    def hold(self) -> None:
        self.snapshot += 1
        for cells, snapshots in zip(self.shards, self.snapshots, strict=True):
            snapshots.begin(cells, self.base)
            for cell in cells:
                assert not snapshots.complete()
                with cell.lock:
                    snapshots.hold(cell)
            assert snapshots.complete()

    def write(self) -> list[dict[str, Any]]:
        stems = [f"v000001-c{self.snapshot:06d}-shard{shard:03d}-a1" for shard in range(len(self.shards))]
        return [body for rows, stem in zip(self.snapshots, stems, strict=True) if (body := rows.write(self.snapshot, stem)) is not None]

    def commit(self, bodies: Sequence[dict[str, Any]], final: bool = False) -> Manifest:
        """A manifest as the coordinator makes it."""
        new = [FileFact.from_json(body["file"]) for body in bodies]
        known = {fact.name: fact for fact in (*(self.made.rows.files if self.made is not None and self.made.rows else ()), *new)}
        named = sorted({name for body in bodies for name in body["chain"]})
        rows = RowPlaces(
            SPECS, self.partition, tuple(tuple(body["chain"]) for body in bodies), tuple(tuple(body["versions"]) for body in bodies),
            tuple(known[name] for name in named),
        )  # fmt: skip
        made = replace(parts.save(self.folder, self.clock, snapshot=self.snapshot, shards=len(self.shards), final=final), rows=rows)
        manifest.commit(self.folder, made)
        self.made, self.base = made, self.snapshot
        return made

    def checkpoint(self, final: bool = False) -> Manifest:
        self.hold()
        return self.commit(self.write(), final)

    def truth(self) -> list[dict[int, list[float]]]:
        return [together([cells[number].table for cells in self.shards]) for number in range(len(SPECS))]


def together(tables: Sequence[RowTable]) -> dict[int, list[float]]:
    """Every row of some shards by id: clock, weights, state."""
    found: dict[int, list[float]] = {}
    for table in tables:
        planes = table.export()
        names = [name for name in planes if name != "ids"]
        for at, i in enumerate(planes["ids"].tolist()):
            assert i not in found
            found[i] = [x for name in names for x in planes[name][at].reshape(-1).tolist()]
    return found
