"""One thing that is wrong with a manifest."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from psjob_operator.printable import printable

LONGEST_VALUE = 80


@dataclass(frozen=True)
class Problem:
    """What is wrong, where, and what to do. `str()` is one line, in the form and words of the API server."""

    field: str
    """Path, such as spec.ps.shards; empty for the document itself."""
    value: Any
    """What stands there; None where nothing does."""
    limit: str
    remedy: str = ""
    admitted: bool = False
    """The API server takes the manifest all the same: `psjob validate` and the operator say it."""

    def __str__(self) -> str:
        """`spec.ps.shards: Invalid value: 0: must be 1..256; …`."""
        where = f"{self.field}: " if self.field else ""
        value = f"Invalid value: {shown(self.value)}: " if self.value is not None else ""
        return printable(f"{where}{value}{self.limit}{f'; {self.remedy}' if self.remedy else ''}")


def shown(value: Any) -> str:
    """The value on one line, cut where it is long; of lists and objects the kind alone, as the API server does."""
    if isinstance(value, dict):
        return '"object"'
    if isinstance(value, (list, tuple)):
        return '"array"'
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


def field_path(loc: Iterable[int | str]) -> str:
    """Where a field lies, as `a.b[0].c`, from pydantic's steps to it."""
    path = ""
    for step in loc:
        path += f"[{step}]" if isinstance(step, int) else f"{'.' if path else ''}{step}"
    return path
