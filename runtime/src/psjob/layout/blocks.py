"""One flat parameter space cut into blocks: which elements of which tensor lie where, and which shard owns them.

The layout follows only from the parameter table, never from the number of shards.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

FLOATS: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
SIZES: Final = {**FLOATS, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
"""Bytes an element, by the dtypes that a parameter may have."""
LIMIT_BYTES: Final = 4 << 20
EDGE: Final = 64
PAGE_BYTES: Final = 4096
"""Large blocks of one tensor are multiples of it, so that the tensor can lie in pages of several shards in one piece."""
SPREAD: Final = 8
"""A model that does not fill so many large blocks is cut in about so many: several shards have work, and a step is still few frames."""
MODEST_BYTES: Final = 64 << 10
"""A block of less costs more by its headers than by its bytes. A model of less than two of these is cut in about two."""
SMALLEST_BYTES: Final = 4096
"""A model of at most so many bytes is one block, of one shard."""
MAX_TENSORS: Final = 100_000
MAX_NAME: Final = 512
RESERVED: Final = "__metadata__"
"""A file of safetensors has no tensor of this name."""
MAX_DIMS: Final = 32
MAX_NUMEL: Final = 1 << 48
MAX_GROUPS: Final = 10_000
MAX_STAGES: Final = 256
FORMAT: Final = 1


@dataclass(frozen=True)
class TensorSpec:
    """A row of the parameter table: `dtype` is one of `SIZES`, `group` the optimizer's parameter group."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int = 0
    stages: tuple[int, ...] = ()
    """Stages of the model that use it, ascending: only their workers push and pull it. Empty: every worker does."""

    @cached_property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        product = 1
        for size in self.shape:
            product *= size
        return product

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * SIZES[self.dtype]

    def to_json(self) -> dict[str, Any]:
        """As a hello and the coordinator's order name it."""
        return {"name": self.name, "shape": list(self.shape), "dtype": self.dtype, "group": self.group} | (
            {"stages": list(self.stages)} if self.stages else {}
        )

    @classmethod
    def from_json(cls, raw: Any) -> TensorSpec:
        """Read what `to_json` wrote. Raises KeyError or TypeError if it is no such object; `check_table` looks at the values."""
        return cls(raw["name"], tuple(raw["shape"]), raw["dtype"], raw["group"], tuple(raw.get("stages", ())))


@dataclass(frozen=True)
class Piece:
    """`length` elements of table row `tensor`, from `tensor_offset` in it, lying at `block_offset` in the block."""

    tensor: int
    tensor_offset: int
    block_offset: int
    length: int


@dataclass(frozen=True)
class Block:
    """A flat run of `length` elements of one dtype and one parameter group."""

    index: int
    dtype: str
    group: int
    length: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.length * SIZES[self.dtype]


@dataclass(frozen=True)
class Layout:
    """The table and its blocks; every element of the table is in exactly one piece."""

    table: tuple[TensorSpec, ...]
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, table: Sequence[TensorSpec], limit_bytes: int = LIMIT_BYTES) -> Layout:
        """Cut `table` in blocks of at most `limit_bytes` (64 elements where that is more). Raises ValueError on a bad table."""
        rows = tuple(table)
        check_table(rows)
        limit = min(limit_bytes, _usual(sum(spec.nbytes for spec in rows)))
        drafts: list[_Draft] = []
        shared: dict[tuple[str, int, tuple[int, ...]], _Draft] = {}
        for index, spec in enumerate(rows):
            cap = max(EDGE, limit // SIZES[spec.dtype] // EDGE * EDGE)
            kind = (spec.dtype, spec.group, spec.stages)
            if spec.numel > cap:
                for start, length in _even(spec.numel, cap, _edge(cap, spec.dtype)):
                    drafts.append(_Draft(spec.dtype, spec.group))
                    drafts[-1].add(index, start, length)
            elif spec.numel:
                draft = shared.get(kind)
                if draft is None or draft.length + spec.numel > cap:
                    draft = shared[kind] = _Draft(spec.dtype, spec.group)
                    drafts.append(draft)
                draft.add(index, 0, spec.numel)
        return cls(rows, tuple(Block(i, d.dtype, d.group, d.length, tuple(d.pieces)) for i, d in enumerate(drafts)))

    @property
    def nbytes(self) -> int:
        """Size of all parameters in bytes."""
        return sum(block.nbytes for block in self.blocks)

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(json.dumps(self.to_json(), separators=(",", ":"), sort_keys=True).encode()).hexdigest()

    def digest(self) -> str:
        """Sha256 in hex of table and blocks: equal for equal layouts only."""
        return self._digest

    def stages_of(self, block: Block) -> tuple[int, ...]:
        """Stages whose workers push and pull this block; empty: all do. No block holds tensors of different ones."""
        return self.table[block.pieces[0].tensor].stages

    def of_stage(self, stage: int | None) -> tuple[Block, ...]:
        """The blocks that a worker of this stage pushes and pulls; all of them where the model has no stages (None)."""
        if stage is None:
            return self.blocks
        return tuple(block for block in self.blocks if not (own := self.stages_of(block)) or stage in own)

    def pieces_of(self, tensor: int) -> list[tuple[Block, Piece]]:
        """If a row of the table lies, in the order of its elements."""
        return self._pieces[tensor]

    @cached_property
    def _pieces(self) -> list[list[tuple[Block, Piece]]]:
        found: list[list[tuple[Block, Piece]]] = [[] for _ in self.table]
        for block in self.blocks:
            for piece in block.pieces:
                found[piece.tensor].append((block, piece))
        for places in found:
            places.sort(key=lambda place: place[1].tensor_offset)
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers; `from_json` gives an equal layout back."""
        return {
            "format": FORMAT,
            "table": [[s.name, list(s.shape), s.dtype, s.group, *([list(s.stages)] if s.stages else [])] for s in self.table],
            "blocks": [
                [b.dtype, b.group, b.length, [[p.tensor, p.tensor_offset, p.block_offset, p.length] for p in b.pieces]] for b in self.blocks
            ],
        }

    @classmethod
    def from_json(cls, obj: object) -> Layout:
        """Read what `to_json` wrote. Raises ValueError with a sentence on anything that is not a whole, consistent layout."""
        if not isinstance(obj, dict) or obj.get("format") != FORMAT:
            raise ValueError(f"layout: expected an object of format {FORMAT}")
        table, blocks = obj.get("table"), obj.get("blocks")
        if not isinstance(table, list) or not isinstance(blocks, list):
            raise ValueError("layout: table and blocks must be lists")
        if len(table) > MAX_TENSORS:
            raise ValueError(f"layout: {len(table)} tensors, at most {MAX_TENSORS}")
        rows = tuple(_row(index, row) for index, row in enumerate(table))
        check_table(rows)
        layout = cls(rows, tuple(_block(index, row) for index, row in enumerate(blocks)))
        _check_cover(layout)
        return layout


def check_aliases(aliases: Mapping[Any, Any], table: Sequence[TensorSpec]) -> None:
    """Raise ValueError, naming the alias, unless each is a name of its own for a tensor of `table`: {alias: name in the table}."""
    if len(aliases) > MAX_TENSORS:
        raise ValueError(f"{len(aliases)} further names of tensors, at most {MAX_TENSORS} are allowed")
    names = {spec.name for spec in table}
    for alias, name in aliases.items():
        _check_name("a further name of a tensor", alias)
        if alias in names:
            raise ValueError(f"{alias!r} is a further name of a tensor, and the name of another one")
        if not isinstance(name, str) or name not in names:
            raise ValueError(f"{alias!r} is a further name of {str(name)[:80]!r}, which is no tensor of the parameter table")


def _check_name(what: str, name: object) -> None:
    if not isinstance(name, str) or not name or len(name) > MAX_NAME or not name.isprintable():
        raise ValueError(f"{what}: a name is 1..{MAX_NAME} printable characters, got {str(name)[:80]!r}")
    if name == RESERVED:
        raise ValueError(f"{what}: files of tensors keep the name {RESERVED!r} for themselves; give it another one")


def check_table(table: Sequence[TensorSpec]) -> None:
    """Raise ValueError, naming the tensor, the value and the limit, unless `table` can be laid out."""
    if len(table) > MAX_TENSORS:
        raise ValueError(f"the parameter table has {len(table)} tensors, at most {MAX_TENSORS} are allowed")
    seen: set[str] = set()
    total = 0
    for index, spec in enumerate(table):
        _check_name(f"tensor {index} of the table", spec.name)
        if spec.name in seen:
            raise ValueError(f"tensor {spec.name!r} is in the parameter table twice")
        seen.add(spec.name)
        if spec.dtype not in SIZES:
            raise ValueError(f"tensor {spec.name!r} has dtype {spec.dtype!r}; a parameter may be one of {', '.join(SIZES)}")
        if not _count(spec.group, MAX_GROUPS):
            raise ValueError(f"tensor {spec.name!r} has parameter group {spec.group!r}, expected 0..{MAX_GROUPS}")
        if len(spec.shape) > MAX_DIMS:
            raise ValueError(f"tensor {spec.name!r} has {len(spec.shape)} dimensions, at most {MAX_DIMS} are allowed")
        if not _counts(spec.shape, MAX_NUMEL):
            raise ValueError(f"tensor {spec.name!r} has shape {spec.shape!r}; each size is a whole number from 0 to {MAX_NUMEL}")
        if spec.stages and (not _counts(spec.stages, MAX_STAGES - 1) or list(spec.stages) != sorted(set(spec.stages))):
            raise ValueError(f"tensor {spec.name!r} is of stages {spec.stages!r}; expected ascending numbers from 0 to {MAX_STAGES - 1}")
        total += spec.numel
        if total > MAX_NUMEL:
            raise ValueError(f"the parameter table up to {spec.name!r} has {total} elements, at most {MAX_NUMEL} are allowed")


def assign(layout: Layout, shards: int) -> tuple[int, ...]:
    """Shard of each block, balanced by bytes: the largest block first to the emptiest shard. Raises ValueError when `shards` < 1."""
    if shards < 1:
        raise ValueError(f"a job has at least 1 shard, got {shards}")
    loads = [0] * shards
    owner = [0] * len(layout.blocks)
    for block in sorted(layout.blocks, key=lambda block: (-block.nbytes, block.index)):
        shard = min(range(shards), key=lambda index: (loads[index], index))
        owner[block.index] = shard
        loads[shard] += block.nbytes
    return tuple(owner)


def live_ranges(block: Block, skipped: frozenset[int]) -> list[tuple[int, int]]:
    """Merged (offset, length) ranges of the block that belong to no table row in `skipped`."""
    ranges: list[tuple[int, int]] = []
    for piece in block.pieces:
        if piece.tensor in skipped:
            continue
        if ranges and sum(ranges[-1]) == piece.block_offset:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + piece.length)
        else:
            ranges.append((piece.block_offset, piece.length))
    return ranges


@dataclass
class _Draft:
    """A block that still grows."""

    dtype: str
    group: int
    length: int = 0
    pieces: list[Piece] = field(default_factory=list)

    def add(self, tensor: int, start: int, length: int) -> None:
        self.pieces.append(Piece(tensor, start, self.length, length))
        self.length += length


def _usual(total: int) -> int:
    """How large a block of a model of `total` bytes may be, in bytes, where no limit is lower."""
    return max(SMALLEST_BYTES, min(MODEST_BYTES, -(-total // 2)), -(-total // SPREAD))


def _edge(cap: int, dtype: str) -> int:
    """If a tensor may be cut, in elements: at whole pages once these are small beside a block."""
    page = PAGE_BYTES // SIZES[dtype]
    return page if cap >= 16 * page else EDGE


def _even(numel: int, cap: int, edge: int) -> list[tuple[int, int]]:
    """Cut `numel` elements in about equal parts of at most `cap`, each but the last a multiple of `edge`."""
    cap = cap // edge * edge
    parts = -(-numel // cap)
    step = -(-numel // (parts * edge)) * edge
    return [(start, min(step, numel - start)) for start in range(0, numel, step)]


def _count(value: object, limit: int) -> bool:
    return type(value) is int and 0 <= value <= limit


def _counts(values: tuple[Any, ...], limit: int) -> bool:
    """As `_count`, of all of them: a table has many, and a call for each takes longer."""
    return not values or (set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= limit)


def _row(index: int, row: object) -> TensorSpec:
    if (
        not isinstance(row, list)
        or len(row) not in (4, 5)
        or not isinstance(row[0], str)
        or not isinstance(row[1], list)
        or not isinstance(row[2], str)
        or not all(isinstance(stages, list) and stages for stages in row[4:])
    ):
        raise ValueError(f"layout: row {index} of the table is not [name, shape, dtype, group] or these and the row's stages")
    name, shape, dtype, group = row[:4]
    return TensorSpec(name, tuple(shape), dtype, group, tuple(*row[4:]))


def _block(index: int, row: object) -> Block:
    if not isinstance(row, list) or len(row) != 4 or not isinstance(row[3], list):
        raise ValueError(f"layout: block {index} is not [dtype, group, length, pieces]")
    pieces = []
    for piece in row[3]:
        if not isinstance(piece, list) or len(piece) != 4 or not all(_count(value, MAX_NUMEL) for value in piece):
            raise ValueError(f"layout: a piece of block {index} is not four whole numbers")
        pieces.append(Piece(*piece))
    return Block(index, row[0], row[1], row[2], tuple(pieces))


def _check_cover(layout: Layout) -> None:
    """Raise ValueError unless the blocks hold every element of the table exactly once, each in a block of its kind."""
    spans: list[list[tuple[int, int]]] = [[] for _ in layout.table]
    for block in layout.blocks:
        at = 0
        for piece in block.pieces:
            if piece.tensor >= len(layout.table):
                raise ValueError(f"layout: block {block.index} names row {piece.tensor}, the table has {len(layout.table)}")
            spec = layout.table[piece.tensor]
            if (spec.dtype, spec.group, spec.stages) != (block.dtype, block.group, layout.stages_of(block)):
                raise ValueError(f"layout: block {block.index} mixes {block.dtype} of group {block.group} with {spec.name!r}")
            if piece.block_offset != at or piece.length < 1 or piece.tensor_offset % EDGE:
                raise ValueError(f"layout: block {block.index} has a gap, an overlap or a piece at a wrong offset at element {at}")
            at += piece.length
            spans[piece.tensor].append((piece.tensor_offset, piece.tensor_offset + piece.length))
        if at == 0 or at != block.length:
            raise ValueError(f"layout: block {block.index} says {block.length!r} elements, its pieces have {at}")
    for spec, found in zip(layout.table, spans, strict=True):
        found.sort()
        edges = [(0, 0), *found, (spec.numel, spec.numel)]
        if any(left[1] != right[0] for left, right in pairwise(edges)):
            raise ValueError(f"layout: the blocks do not hold every element of {spec.name!r} exactly once")
