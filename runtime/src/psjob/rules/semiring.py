"""Commutative semirings: two operations that make sums of products, with whose help pushes compute more than gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from psjob.rules import arrays
from psjob.rules.arrays import Array
from psjob.rules.reduction import MONOIDS, Monoid


@dataclass(frozen=True)
class Semiring:
    """`plus` joins pushes; `times` makes them, and distributes over it. `one` changes nothing when multiplied; `plus.identity` is zero.

    Shards need `plus` alone: workers multiply.
    """

    plus: Monoid
    times: arrays.Joining
    one: float

    def combine(self, row: Sequence[float], rows: Sequence[Array], out: Array) -> None:
        """out = row[0] times rows[0] plus row[1] times rows[1] …: a product of a vector and a matrix by the matrix's rows."""
        terms = [arrays.join(self.times, arrays.full_like(x, value), x, arrays.full_like(x, 0)) for value, x in zip(row, rows, strict=True)]
        self.plus(terms, out)


SEMIRINGS: Final[dict[str, Semiring]] = {
    "plus-times": Semiring(MONOIDS["sum"], "multiply", 1.0),
    "max-plus": Semiring(MONOIDS["max"], "add", 0.0),
    "min-plus": Semiring(MONOIDS["min"], "add", 0.0),
    "max-min": Semiring(MONOIDS["max"], "minimum", float("inf")),
    "or-and": Semiring(MONOIDS["or"], "logical_and", 1.0),
}
"""Sums of products · critical paths · shortest paths (in numbers without -inf) · widest paths · reachability (in 0 and 1)."""
