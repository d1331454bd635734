"""A shard's files of a checkpoint: blocks and rows of tables, read back onto any number of shards, and its admission table.

The table says what the shard had taken of each worker, and which process had sent it. Its rows are those of
`psjob.shard.deduplication.Admission.save`, keyed by rank. In the file a worker is six values; the blocks of its open clock
are one bit each. `Base` says which blocks a checkpoint names where they already lie, and which are written again.

Rows are written part by part while they are pushed. A row is int32 words: id (2), the clock it was last seen (2), weights, then the
planes of its rule by name, all as they lie in memory.
In a file are, for table number t, `t.rows.<part>` [rows, words], `t.removed` (ids that went since the file before it in the chain) and
`t.counts.<plane>` (admission).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from psjob import rules
from psjob.checkpoint import files
from psjob.checkpoint.disk import Damage, Moved
from psjob.checkpoint.files import DeferredTensor, FileFact
from psjob.checkpoint.manifest import BlockPlace, Manifest
from psjob.layout.blocks import assign
from psjob.rules.base import BEFORE, BlockState, Rule
from psjob.tables import Partition, RowTable, TableSpec
from psjob.tables import rules as table_rules
from psjob.tables.spec import initial_rows
from psjob.tables.table import COUNTS, Rows

FORMAT: Final = 1
AdmissionRows = Mapping[str, Mapping[str, Any]]


WEIGHTS = "weights"
MAX_FILES: Final = 8
"""So many older files a shard's part of a manifest names at most: each is another that may be damaged."""
_HEAD: Final = 4
PART: Final = 1 << 16
"""Rows that are made at a time for a file of final weights."""


def write_admission(folder: Path, name: str, rows: AdmissionRows) -> FileFact:
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


def open_blocks(made: Manifest, tables: Mapping[int, AdmissionRows]) -> dict[int, set[int]]:
    """By rank, the blocks that hold its push of the very clock at which it continues; `tables` are those of the shards that wrote `made`.

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


def state_bytes(made: Manifest, indices: Iterable[int]) -> int:
    """Bytes that `read_states` reads. Raises Damage if the manifest does not hold a block."""
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
        known = (slot in rule.per_worker and rank in made.workers) if of else slot in (WEIGHTS, BEFORE, *rule.slots)
        if not known or index not in indices:
            expected = f"weights and state of rule {made.rule} for {len(made.workers)} workers and {len(indices)} blocks"
            raise Damage(fact.name, expected, f"a tensor {tensor[:80]!r}")
        held.setdefault(indices[index], []).append(name)
    return held


def state_of(made: Manifest, place: BlockPlace, tensors: dict[str, torch.Tensor]) -> BlockState:
    """The state of a block, whose tensors by name these are. Raises Damage if they are not what the manifest says."""
    block = made.layout.blocks[place.index]
    weights = tensors.pop(WEIGHTS)
    if weights.shape != (block.length,) or str(weights.dtype) != f"torch.{block.dtype}":
        raise Damage(place.file, f"block {place.index} of {block.length} {block.dtype}", f"{tuple(weights.shape)} {weights.dtype}")
    try:
        return BlockState.of(weights, tensors, place.counts)
    except ValueError as error:
        raise Damage(made.name, f"counts and state of block {place.index}", str(error)) from None


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


class RowSource(Protocol):
    """A table at a snapshot. `take` gives the rows of a part and may be called once for each."""

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
    return _HEAD + spec.dim + sum(spec.dim if wide else 1 for wide in table_rules.named(spec.rule).planes.values())


def packed(rows: Rows) -> torch.Tensor:
    """Rows as int32 [n, words]."""
    count = len(rows["ids"])
    return torch.cat([plane.reshape(count, -1).view(torch.int32) for plane in rows.values()], 1)


def unpacked(spec: TableSpec, part: torch.Tensor) -> Rows:
    """What `packed` was given. Raises ValueError if the words are not of such a table."""
    if part.dtype != torch.int32 or part.dim() != 2 or part.shape[1] != words_of(spec):
        raise ValueError(f"rows of {words_of(spec)} int32 words, found {part.dtype} of {tuple(part.shape)}")
    rows: Rows = {
        "ids": part[:, 0:2].reshape(-1).view(torch.int64),
        "seen": part[:, 2:_HEAD].reshape(-1).view(torch.int64),
    }
    at = _HEAD
    for name, wide in {"weights": True, **table_rules.named(spec.rule).planes}.items():
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
        with files.opened_checkpoint_file(folder / file, made.fact(file), moved) as reader:
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
