"""Modes: which pushes count, and who may go on. Pure."""

from typing import Final

from psjob.modes.asynchronous import Async
from psjob.modes.backup import Backup
from psjob.modes.base import Batch, Mode, Push, Served
from psjob.modes.bounded import Bounded
from psjob.modes.local import Local
from psjob.modes.softsync import Softsync
from psjob.modes.sync import Sync
from psjob.modes.threshold import Threshold

__all__ = [
    "Async", "Backup", "Batch", "Bounded", "Local", "MODES", "Mode", "Push", "Served", "Softsync", "Sync", "Threshold", "named",
]  # fmt: skip

MODES: Final[dict[str, type[Mode]]] = {mode.name: mode for mode in (Sync, Backup, Bounded, Softsync, Async, Threshold, Local)}
"""All of them; the simulator runs each."""
_SERVED: Final[dict[str, Served]] = {"sync": Sync(), "async": Async()}


def named(name: str) -> Served:
    """The mode of that name that jobs run. Raises ValueError with the names that exist."""
    try:
        return _SERVED[name]
    except KeyError:
        raise ValueError(f"training.mode is {name!r}; this version has {', '.join(_SERVED)}") from None
