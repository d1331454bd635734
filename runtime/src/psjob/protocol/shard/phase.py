"""How far a shard is from serving."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """How far this shard is from serving."""

    BLANK = "blank"
    """No layout yet: a new run, or a shard that waits to be told what to restore."""
    INIT = "initialising"
    HELD = "restored"
    SERVING = "serving"
