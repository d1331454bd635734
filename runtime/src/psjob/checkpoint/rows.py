"""Rows of tables in files: written part by part while they are pushed, read back onto any number of shards.

A row is int32 words: id (2), the clock it was last seen (2), weights, then the planes of its rule by name, all as they lie in memory.
In a file are, for table number t, `t.rows.<part>` [rows, words], `t.removed` (ids that went since the file before it in the chain) and
`t.counts.<plane>` (admission).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import torch

from psjob.checkpoint import files
from psjob.checkpoint.disk import Moved
from psjob.checkpoint.files import DeferredTensor, FileFact
from psjob.checkpoint.manifest import Manifest
from psjob.checkpoint.problems import Damage
from psjob.tables import Partition, RowTable, TableSpec, rules
from psjob.tables.spec import initial_rows
from psjob.tables.table import COUNTS, Rows

_HEAD: Final = 4
PART: Final = 1 << 16
"""Rows that are made at a time for a file of final weights."""


class RowSource(Protocol):
    """A table at a cut. `take` gives the rows of a part and may be called once for each."""

    @property
    def spec(self) -> TableSpec: ...
    @property
    def removed(self) -> torch.Tensor: ...
    @property
    def counts(self) -> Rows: ...
    def sizes(self) -> list[int]: ...
    def take(self, part: int) -> Rows: ...


def write_rows(folder: Path, name: str, sources: Sequence[RowSource], metadata: Mapping[str, str], moved: Moved | None = None) -> FileFact:
    """Write one shard's tables, in order of their numbers. Raises CheckpointProblem, and what `take` and `moved` raise."""
    entries: list[tuple[str, torch.Tensor | DeferredTensor]] = []
    for number, source in enumerate(sources):
        words = words_of(source.spec)
        for part, size in enumerate(source.sizes()):
            entries.append((f"{number}.rows.{part}", DeferredTensor("int32", (size, words), functools.partial(_taken, source, part))))
        entries.append((f"{number}.removed", source.removed))
        entries.extend((f"{number}.counts.{plane}", tensor) for plane, tensor in source.counts.items())
    return files.write_blocks(folder, name, entries, metadata, moved)


def bytes_of(spec: TableSpec, rows: int) -> int:
    """Size of so many rows in a file."""
    return 4 * words_of(spec) * rows


def table_bytes(made: Manifest, shard: int, shards: int) -> int:
    """Bytes that `read_tables` reads."""
    if made.rows is None:
        return 0
    chains = [made.rows.chains[shard]] if _same_owners(made, shards) else made.rows.chains
    return sum(span.length for chain in chains for name in chain for span in made.fact(name).tensors.values())


def read_tables(folder: Path, made: Manifest, shard: int, shards: int, moved: Moved | None = None) -> list[tuple[RowTable, int]]:
    """Tables of `shard` among `shards`, with the version n of each; none where the manifest has no rows. Raises Damage."""
    if made.rows is None:
        return []
    mine = Partition.even(shards).buckets(shard)
    tables = {number: RowTable(spec) for number, spec in enumerate(made.rows.specs)}
    same = _same_owners(made, shards)
    for owner, chain in enumerate(made.rows.chains):
        if not same:
            _read_chain(folder, made, chain, tables, mine, moved)
        elif owner == shard:
            _read_chain(folder, made, chain, tables, None, moved)
    versions = made.rows.versions[shard] if same else tuple(max(of) for of in zip(*made.rows.versions, strict=True))
    for table in tables.values():
        table.mark()
    return list(zip(tables.values(), versions, strict=True))


def final_rows(folder: Path, made: Manifest) -> list[tuple[str, DeferredTensor]]:
    """Tensors of `final.safetensors`: `<table>.weight` with every row where the number of rows is known; otherwise the rows that exist,
    by ascending id, and their `<table>.ids`. Raises Damage."""
    found: list[tuple[str, DeferredTensor]] = []
    for number, spec in enumerate(made.rows.specs if made.rows is not None else ()):
        if spec.num_rows is not None:
            found.append(
                (
                    f"{spec.name}.weight",
                    DeferredTensor(spec.dtype, (spec.num_rows, spec.dim), functools.partial(_dense, folder, made, number)),
                )
            )
            continue
        order = torch.cat([rows["ids"] for rows in _rows(folder, made, number)]).argsort()
        for name, plane, shape in (("ids", "ids", ()), ("weight", "weights", (spec.dim,))):
            make = functools.partial(_ordered, folder, made, number, plane, order)
            found.append((f"{spec.name}.{name}", DeferredTensor("int64" if name == "ids" else spec.dtype, (len(order), *shape), make)))
    return found


def words_of(spec: TableSpec) -> int:
    """Int32 words of a row."""
    return _HEAD + spec.dim + sum(spec.dim if wide else 1 for wide in rules.named(spec.rule).planes.values())


def packed(rows: Rows) -> torch.Tensor:
    """Rows as int32 [n, words]."""
    count = len(rows["ids"])
    return torch.cat([plane.reshape(count, -1).view(torch.int32) for plane in rows.values()], 1)


def unpacked(spec: TableSpec, part: torch.Tensor) -> Rows:
    """What `packed` was given. Raises ValueError where the words are not of such a table."""
    if part.dtype != torch.int32 or part.dim() != 2 or part.shape[1] != words_of(spec):
        raise ValueError(f"rows of {words_of(spec)} int32 words, found {part.dtype} of {tuple(part.shape)}")
    rows: Rows = {
        "ids": part[:, 0:2].reshape(-1).view(torch.int64),
        "seen": part[:, 2:_HEAD].reshape(-1).view(torch.int64),
    }
    at = _HEAD
    for name, wide in {"weights": True, **rules.named(spec.rule).planes}.items():
        plane = part[:, at : at + (spec.dim if wide else 1)].contiguous()
        plane = plane.view(spec.torch_dtype if name == "weights" else torch.float32)
        rows[name] = plane if wide else plane.view(-1)
        at += spec.dim if wide else 1
    return rows


def _taken(source: RowSource, part: int) -> torch.Tensor:
    return packed(source.take(part))


def _same_owners(made: Manifest, shards: int) -> bool:
    """Has each of `shards` shards the buckets that it had when `made` was written?"""
    assert made.rows is not None
    return shards == len(made.rows.chains) and made.rows.partition == Partition.even(shards)


def _read_chain(
    folder: Path, made: Manifest, chain: Sequence[str], tables: Mapping[int, RowTable], buckets: torch.Tensor | None,
    moved: Moved | None = None,
) -> None:  # fmt: skip
    """Bring `tables`, by number, to what a chain of files holds of them."""
    for file in chain:
        with files.opened(folder / file, made.fact(file), moved) as reader:
            try:
                for number, table in tables.items():
                    table.remove(reader.read(f"{number}.removed"))
                    for rows in _parts(reader, table.spec, number):
                        table.load(rows, buckets)
                    if f"{number}.counts.{COUNTS[0]}" in reader.entries:
                        table.load_counts({plane: reader.read(f"{number}.counts.{plane}") for plane in COUNTS}, buckets)
            except ValueError as error:
                raise Damage(file, "rows of its tables", str(error)[:300]) from None


def _parts(reader: files.Reader, spec: TableSpec, number: int) -> Iterator[Rows]:
    part = 0
    while f"{number}.rows.{part}" in reader.entries:
        yield unpacked(spec, reader.read(f"{number}.rows.{part}"))
        part += 1


def _rows(folder: Path, made: Manifest, number: int) -> Iterator[Rows]:
    """All rows of a table, one shard's at a time."""
    assert made.rows is not None
    for chain in made.rows.chains:
        table = RowTable(made.rows.specs[number])
        _read_chain(folder, made, chain, {number: table}, None)
        yield table.export()


def _dense(folder: Path, made: Manifest, number: int) -> torch.Tensor:
    """All rows of a table whose number of rows is known: those that were never made have their first values."""
    assert made.rows is not None
    spec = made.rows.specs[number]
    assert spec.num_rows is not None
    whole = torch.empty(spec.num_rows, spec.dim, dtype=spec.torch_dtype, device="cpu")
    for start in range(0, spec.num_rows, PART):
        end = min(start + PART, spec.num_rows)
        whole[start:end] = initial_rows(spec, torch.arange(start, end, device="cpu"))
    for rows in _rows(folder, made, number):
        whole.index_copy_(0, rows["ids"], rows["weights"])
    return whole


def _ordered(folder: Path, made: Manifest, number: int, plane: str, order: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows[plane] for rows in _rows(folder, made, number)])[order]
