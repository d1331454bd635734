"""What a table is: its shape, its rule, how rows begin, when they come and go, and which shard has which row.

`initial_rows` gives the values with which a row begins: a function only of (seed, table, id), the same on every shard and after every
restore. A counter-based generator: one 64-bit hash of the id gives each row two 32-bit keys, and a 32-bit hash of (key, column) gives
the numbers. So no row depends on another or on when it was first asked for. `splitmix64` mixes whole numbers so that near ids end far
apart, the same on every machine: torch's int64 and int32 wrap.

`Partition`: id → bucket by a hash that never changes, bucket → shard by a table that is sent.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

import torch

from psjob.tables import rules

GOLDEN: Final = -7046029254386353131
"""0x9E3779B97F4A7C15 as int64: 2^64 over the golden ratio, the step of splitmix64."""


def splitmix64(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014) of int64s."""
    x = x + GOLDEN
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return x ^ _shift(x, 31)


def seed_of(*parts: str | int) -> int:
    """An int64 from words and numbers: the first 8 bytes of their sha256."""
    digest = hashlib.sha256("\0".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _shift(x: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right, zeros coming in."""
    return (x >> by) & ((1 << (64 - by)) - 1)


_PART: Final = 1 << 16
_STEP: Final = -1640531527
"""0x9E3779B9 as int32."""


def initial_rows(spec: TableSpec, ids: torch.Tensor) -> torch.Tensor:
    """First values of rows `ids` (int64), of the table's dtype and shape [n, dim]."""
    rule = rules.named(spec.rule)
    if isinstance(rule, rules.Combine):
        return torch.full((len(ids), spec.dim), rule.identity(spec.torch_dtype), dtype=spec.torch_dtype, device="cpu")
    out = torch.zeros(len(ids), spec.dim, dtype=torch.float32, device="cpu")
    if spec.init == "zeros" or not spec.scale:
        return out
    pairs = (spec.dim + 1) // 2
    seed = seed_of(spec.seed, spec.name)
    step = max(1, _PART // spec.dim)
    for start in range(0, len(ids), step):
        keys = splitmix64(splitmix64(ids[start : start + step] ^ seed)).view(torch.int32).view(-1, 2)
        first, second = _uniform(keys[:, 0], pairs), _uniform(keys[:, 1], pairs)
        if spec.init == "uniform":
            low, high = first.mul_(2).sub_(1), second.mul_(2).sub_(1)
        else:  # Box and Muller, A note on the generation of random normal deviates, 1958
            radius = first.neg_().add_(1).log_().mul_(-2).sqrt_()  # of 1 - u, which is never 0
            angle = second.mul_(2 * math.pi)
            low, high = radius * angle.cos(), radius.mul_(angle.sin_())
        part = out[start : start + step]
        part[:, :pairs] = low
        part[:, pairs:] = high[:, : spec.dim - pairs]
    return out.mul_(spec.scale)


def _uniform(keys: torch.Tensor, columns: int) -> torch.Tensor:
    """Multiples of 2^-24 in [0, 1) for each (key, column): lowbias32 (Wellons, Prospecting for hash functions, 2018)."""
    x = keys[:, None] + torch.arange(columns, dtype=torch.int32, device="cpu").mul_(_STEP)
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - (1 << 32))
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
    return x.bitwise_and_(0xFFFFFF).float().mul_(2.0**-24)


BUCKETS: Final = 1024
"""Four for each of the most shards that a job may have."""
_BITS: Final = BUCKETS.bit_length() - 1


def bucket_of(ids: torch.Tensor) -> torch.Tensor:
    """The bucket of each id (int64), from 0 to BUCKETS - 1; the same in every run, whatever the number of shards."""
    return (splitmix64(ids) >> (64 - _BITS)) & (BUCKETS - 1)


@dataclass(frozen=True)
class Partition:
    """`owners[bucket]` is a shard. The table with the higher generation holds. Raises ValueError if it is not whole."""

    generation: int
    owners: tuple[int, ...]

    def __post_init__(self) -> None:
        if type(self.generation) is not int or self.generation < 1:
            raise ValueError(f"a partition's generation is a whole number from 1, got {self.generation!r}")
        if len(self.owners) != BUCKETS or not all(type(shard) is int and shard >= 0 for shard in self.owners):
            raise ValueError(f"a partition names a shard for each of {BUCKETS} buckets, got {len(self.owners)}")

    @classmethod
    def even(cls, shards: int, generation: int = 1) -> Partition:
        """Buckets dealt out in turn."""
        return cls(generation, tuple(bucket % shards for bucket in range(BUCKETS)))

    def buckets(self, shard: int) -> torch.Tensor:
        """A mask of BUCKETS: which of them `shard` has."""
        return torch.tensor(self.owners, device="cpu") == shard

    def shard_of(self, ids: torch.Tensor) -> torch.Tensor:
        """The shard of each id, as int64."""
        return torch.tensor(self.owners, device="cpu")[bucket_of(ids)]

    def to_json(self) -> dict[str, Any]:
        """For a welcome or a manifest."""
        return {"generation": self.generation, "owners": list(self.owners)}

    @classmethod
    def from_json(cls, obj: object) -> Partition:
        """Read what `to_json` gave. Raises ValueError with a sentence."""
        if not isinstance(obj, dict) or not isinstance(obj.get("owners"), list):
            raise ValueError("a partition is {generation, owners: [shard of each bucket]}")
        return cls(obj.get("generation", 0), tuple(obj["owners"]))


NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,127}")
MAX_DIM: Final = 65536
MAX_ADMIT: Final = 255
"""A count of admission has one byte."""
INITS: Final = ("normal", "uniform", "zeros")
IDENTITY: Final = "identity"
"""How rows begin that are joined by a monoid."""
DTYPES: Final = ("float32", "int32")
LOW, HIGH = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True)
class TableSpec:
    """One table of rows of `dim` numbers. Raises ValueError, naming table, field, value and limit, where a field cannot be.

    `num_rows` None takes every int64 as an id, otherwise ids are 0 to num_rows - 1. `init` with `scale`: normal (standard deviation
    scale), uniform (from -scale to scale) or zeros; identity, and dtype int32, are for rules that join, and for no other.
    A row exists from the `admit_after`-th step on that names it; it goes when `evict_after` clocks in a row did not (None: never).
    """

    name: str
    dim: int
    rule: str
    num_rows: int | None = None
    dtype: str = "float32"
    init: str = "normal"
    scale: float = 1.0
    seed: int = 0
    admit_after: int = 1
    evict_after: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not NAME.fullmatch(self.name):
            raise ValueError(f"a table's name matches {NAME.pattern}, got {str(self.name)[:80]!r}")
        _whole(self, "dim", 1, MAX_DIM)
        if self.num_rows is not None:
            _whole(self, "num_rows", 1, HIGH)
        if self.dtype not in DTYPES:
            raise ValueError(f"table {self.name}: dtype is float32 or int32, got {str(self.dtype)[:40]!r}; other types are not built")
        joins = isinstance(rules.named(self.rule), rules.Combine)
        if joins != (self.init == IDENTITY) or (self.dtype == "int32" and (not joins or self.rule == "logsumexp")):
            raise ValueError(
                f"table {self.name}: rule {self.rule} does not go with init {str(self.init)[:40]} and dtype {self.dtype}; rules that join "
                f"rows ({', '.join(rules.COMBINES)}) begin with their identity, and int32 is for them, without logsumexp"
            )
        if self.init not in (*INITS, IDENTITY):
            raise ValueError(f"table {self.name}: init is one of {', '.join(INITS)}, got {str(self.init)[:40]!r}")
        if isinstance(self.scale, bool) or not isinstance(self.scale, int | float) or not math.isfinite(self.scale) or self.scale < 0:
            raise ValueError(f"table {self.name}: scale is a finite number from 0, got {self.scale!r}")
        _whole(self, "seed", LOW, HIGH)
        _whole(self, "admit_after", 1, MAX_ADMIT)
        if self.evict_after is not None:
            _whole(self, "evict_after", 1, HIGH)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the rows; their state is float32."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def evict_every(self) -> int:
        """Clocks between two looks for rows that are too old: an eighth of `evict_after`, at least 1; 0 where none goes."""
        return 0 if self.evict_after is None else max(1, self.evict_after // 8)

    def to_json(self) -> dict[str, Any]:
        """For a message or a manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, obj: object) -> TableSpec:
        """Read what `to_json` gave. Raises ValueError with a sentence."""
        if not isinstance(obj, Mapping):
            raise ValueError(f"a table is an object, got {type(obj).__name__}")
        known = {field.name for field in fields(cls)}
        unknown = sorted(str(key)[:40] for key in obj if key not in known)
        missing = sorted({"name", "dim", "rule"} - set(obj))
        if unknown or missing:
            raise ValueError(f"a table has the fields {', '.join(sorted(known))}; unknown: {unknown[:3]}, missing: {missing}")
        return cls(**obj)


def _whole(spec: TableSpec, name: str, low: int, high: int) -> None:
    value = getattr(spec, name)
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"table {str(spec.name)[:80]}: {name} is a whole number from {low} to {high}, got {str(value)[:40]}")
