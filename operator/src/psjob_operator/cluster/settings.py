"""What a turn needs to know of this installation."""

from __future__ import annotations

from dataclasses import dataclass

from psjob_operator.render import NOBODY


@dataclass(frozen=True)
class Settings:
    """By the options of `psjob-operator run`."""

    runtime_image: str
    instance: str
    progress_seconds: float = 60.0
    shard_user: int | None = NOBODY
    """Of render.pod."""
    auto_encryption: str = "auto"
    """Of Snapshot."""
