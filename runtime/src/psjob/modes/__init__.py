"""Modes: when a push counts, and who may go on. Pure."""

from psjob.modes.asynchronous import Async
from psjob.modes.base import Mode
from psjob.modes.sync import Sync

__all__ = ["Async", "Mode", "Sync", "named"]

_MODES: dict[str, type[Sync] | type[Async]] = {"sync": Sync, "async": Async}


def named(name: str) -> Mode:
    """The mode of that name. Raises ValueError with the names that exist."""
    try:
        return _MODES[name]()
    except KeyError:
        raise ValueError(f"training.mode is {name!r}; this version has {', '.join(_MODES)}") from None
