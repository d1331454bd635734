"""What a table is: its shape, its rule, how rows begin and when they come and go."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

import torch

from psjob.tables import rules

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
