"""What a turn needs to know of this installation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psjob_operator.render import NOBODY, Peer


@dataclass(frozen=True)
class Settings:
    """By the options of `psjob-operator run`."""

    runtime_image: str
    instance: str
    progress_seconds: float = 60.0
    shard_user: int | None = NOBODY
    """Of render.pod."""
    auto_encryption: str = "auto"
    """Of ObservedState."""
    askers: Sequence[Peer] = ()
    """Who may reach the status port of shards, by the NetworkPolicies that runs are given; empty: runs are given none."""
