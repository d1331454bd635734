"""What a script hears about its loop before a restart shows it, once a process, on rank 0."""

from __future__ import annotations

import sys
from typing import Final

from psjob.process import config

AGAIN: Final = (
    "without ps.epochs this loop begins a second pass over its data. After a restart it begins at its first line, and what follows a pass "
    "runs again for each pass that was finished. Write `for epoch in ps.epochs(n)`, and keep in ps.state what the loop carries"
)
ELSE: Final = (
    "this loop over the data is left, and has an `else`. A worker that starts again is given nothing for a pass that was left, so the "
    "`else` runs for it. Set a variable before `break`, and ask for it behind the loop"
)
_told: set[str] = set()


def tell(kind: str, sentence: str) -> None:
    """Say it, if nothing of this kind was said."""
    place = config.place()
    if kind not in _told and place is not None and place.rank == 0:
        _told.add(kind)
        print(f"psjob: {sentence}", file=sys.stderr, flush=True)
