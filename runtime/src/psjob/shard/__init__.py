"""A shard: receives, admits, applies, replies, snapshots. `python -m psjob.shard` is the process.

The word has a second meaning that scripts use: `psjob.shard(loader)`, a worker's slice of the data. Python binds the name
of a subpackage on its parent, so this module is callable and passes the call on; both meanings hold in one process.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, loader: Any) -> Any:
        from psjob.data import shard

        return shard(loader)


sys.modules[__name__].__class__ = _Callable
