"""Lets the module of psjob that knows a library begin as soon as the script imports that library, before the script asks it for anything.

A script computes with what a library says of all processes long before it attaches. No library is imported here.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

HOMES: Final = {"accelerate": "psjob.integrations.accelerate", "lightning": "psjob.integrations.fabric"}
"""By package of a library, the module of psjob that knows it. Such a module has `begin()`."""


class Watch:
    """A finder of modules that finds nothing by itself: it lets what others find begin."""

    def __init__(self) -> None:
        self._asking = False

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Of a library in HOMES what the other finders say; None of all else."""
        if name not in HOMES or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            _after(spec.loader, name)
        return spec


def _after(loader: Any, name: str) -> None:
    """Let psjob's module begin when this loader has run the library's."""
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        run(module)
        _begin(name)

    loader.exec_module = exec_module


def _begin(name: str) -> None:
    importlib.import_module(HOMES[name]).begin()


def begin() -> None:
    """From now on; for libraries that are imported already, now."""
    for name in HOMES:
        if name in sys.modules:
            _begin(name)
    if not any(isinstance(finder, Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, Watch())
