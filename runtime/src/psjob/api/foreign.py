"""Objects of other libraries that stand for torch's, and the module that knows them. No library is imported here."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from psjob.process.startup import HOMES


def home(thing: object) -> Any | None:
    """The module that knows objects of this type; None for those of torch."""
    return _imported(type(thing).__module__.partition(".")[0])


def in_use() -> list[Any]:
    """The modules of all libraries that the script has imported."""
    return [known for library in HOMES if library in sys.modules and (known := _imported(library)) is not None]


def _imported(library: str) -> Any | None:
    return importlib.import_module(HOMES[library]) if library in HOMES else None
