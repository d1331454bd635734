"""What status ports tell, with the shapes of contract.STATUS_KEYS: an entry that is none is left out. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

LARGEST = 1e300
PAIRS = ("buckets", "passed")
"""Lists of [number, number]."""
OBJECTS = ("workers", "hung", "shards", "entries", "stages")
"""Lists of objects."""
DEEPEST = 8
"""Levels of objects; the contract has fewer."""


def shaped(told: Mapping[str, Any], depth: int = DEEPEST) -> dict[str, Any]:
    """The same, whose lists by these names hold what they should; numbers in them are not looked at."""
    return {name: _shaped(name, value, depth) for name, value in told.items()}


def is_number(value: Any) -> TypeGuard[int | float]:
    """A finite number that fits a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _shaped(name: str, value: Any, depth: int) -> Any:
    if name in PAIRS:
        pairs = value if isinstance(value, list) else ()
        return [pair for pair in pairs if isinstance(pair, list) and len(pair) == 2 and all(map(is_number, pair))]
    if name in OBJECTS:
        return [shaped(entry, depth - 1) for entry in (value if isinstance(value, list) else ()) if isinstance(entry, Mapping) and depth]
    if isinstance(value, Mapping):
        return shaped(value, depth - 1) if depth else {}
    return value
