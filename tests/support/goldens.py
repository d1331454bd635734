"""Digests of recorded runs: a restructuring that changes none of them has changed no behaviour.

A digest holds times, senders, receivers and values, and no name: a class, a field or a word of a text may be renamed. Of a mapping it
holds the values (and keys that are numbers) in an order of their own; of a text, the numbers in it. `PSJOB_RECORD=1` writes the table
anew: do so only in a commit that changes behaviour on purpose, and say why there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_suffix(".json")
RECORD = os.environ.get("PSJOB_RECORD") == "1"


def check(name: str, digest: Digest) -> None:
    """Compare a run with the table, or write it there."""
    made, table = digest.hexdigest(), json.loads(TABLE.read_text()) if TABLE.exists() else {}
    if RECORD:
        TABLE.write_text(json.dumps(dict(sorted({**table, name: made}.items())), indent=1) + "\n")
        return
    assert table.get(name) == made, f"the run {name!r} is not the recorded one: behaviour has changed"


class Digest:
    """SHA-256 over values in the order in which they are added."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, *values: Any) -> None:
        """Add values, in plain form."""
        self._hash.update(repr(plain(values)).encode())

    def hexdigest(self) -> str:
        """The first 16 hex digits."""
        return self._hash.hexdigest()[:16]


def plain(value: Any) -> Any:
    """The value without names: numbers, bytes and tuples of such."""
    if value is None or isinstance(value, bool | float | bytes):
        return value
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str):
        return tuple(map(int, re.findall(r"\d+", value)))
    if isinstance(value, Mapping):
        return tuple(sorted((repr((_number(key), plain(one))) for key, one in value.items())))
    if isinstance(value, set | frozenset):
        return tuple(sorted(repr(plain(one)) for one in value))
    if is_dataclass(value):
        return tuple(plain(getattr(value, field.name)) for field in fields(value))
    return tuple(plain(one) for one in value)


def _number(key: object) -> int | None:
    return int(key) if isinstance(key, int) or (isinstance(key, str) and key.isdecimal()) else None
