"""Rows of a product of parameters: those that cover it run at once, the rest is `rotating`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from tests.support.soaking import rotating

Row = tuple[Any, ...]


def each_value(*factors: Iterable[Any], skip: Callable[..., bool] = lambda *row: False) -> list[Any]:
    """Rows in which every value of every factor occurs."""
    return _covering(1, factors, skip)


def each_pair(*factors: Iterable[Any], skip: Callable[..., bool] = lambda *row: False) -> list[Any]:
    """Rows in which every two values of two factors occur together; of two factors that is the whole product."""
    return _covering(2, factors, skip)


def _covering(strength: int, factors: Sequence[Iterable[Any]], skip: Callable[..., bool]) -> list[Any]:
    """All rows but those that `skip` names, the covering ones first; greedily, and the same in each process."""
    rows = [row for row in itertools.product(*(list(factor) for factor in factors)) if not skip(*row)]
    open_parts = {part for row in rows for part in _parts(row, strength)}
    made: list[Any] = []
    rest = list(rows)
    while open_parts:
        best = max(rest, key=lambda row: len(open_parts & _parts(row, strength)))
        rest.remove(best)
        open_parts -= _parts(best, strength)
        made.append(pytest.param(*best, id=_id(best)))
    return made + [rotating(*row, id=_id(row)) for row in rest]


def _parts(row: Row, strength: int) -> set[Row]:
    return {tuple((at, repr(row[at])) for at in places) for places in itertools.combinations(range(len(row)), strength)}


def _id(row: Row) -> str:
    return "-".join("x".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in row)
