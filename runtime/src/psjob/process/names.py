"""Words with two meanings: a subpackage, and what a script calls.

Python binds a subpackage's name on its parent when it is first imported, so `psjob.shard` may come to mean the package
while scripts call `psjob.shard(loader)`. A module made callable here passes the call on, and both meanings hold.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        home, function = self.__dict__["_called_as"]
        return getattr(importlib.import_module(home), function)(*args, **kwargs)


def callable_as(package: str, home: str, function: str) -> None:
    """Make the imported module `package` call `function` of module `home`."""
    module = sys.modules[package]
    module.__dict__["_called_as"] = (home, function)
    module.__class__ = _Callable
