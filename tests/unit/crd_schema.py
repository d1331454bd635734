"""The nodes of a CRD's schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def nodes(part: dict[str, Any], at: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield at, part
    for name, child in part.get("properties", {}).items():
        yield from nodes(child, f"{at}.{name}" if at else name)
    for inner in ("items", "additionalProperties"):
        if isinstance(part.get(inner), dict):
            yield from nodes(part[inner], f"{at}[]")
