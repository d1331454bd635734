"""A store with a table of rows, and its checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from psjob.checkpoint import manifest
from psjob.checkpoint.files import FileFact
from psjob.checkpoint.manifest import Manifest, RowPlaces
from psjob.rules.base import check_hyperparameters
from psjob.shard.table import RowSnapshots
from psjob.tables import Partition, RowTable, TableSpec
from psjob.tables.rules import named
from tests.tensors import checkpoint_parts as parts

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
