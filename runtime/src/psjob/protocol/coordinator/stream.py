"""A worker's stream to shard 0, as a value: decisions name it, and only the driver can speak on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from psjob.layout.blocks import TensorSpec


@dataclass(frozen=True)
class Stream:
    """A worker's stream to shard 0: whose it is, and what its hello says. `id` is given once in the life of a process."""

    id: int
    rank: int
    incarnation: tuple[int, int]
    fresh: bool
    """This process has no place in the job yet."""
    mode: str
    """The one that its process runs, as `modes.written` writes it."""
    recovery: int = 0
    """The newest restore that this process has come through."""
    rule: str = ""
    table: tuple[TensorSpec, ...] = ()
    tables: tuple[Mapping[str, Any], ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    layout: str = ""
    """Digest of the blocks that this process would cut its parameters in, or has been told; empty: not known."""
    problem: str | None = None
    """Why its hello can be no job's: a sentence for the person who runs the script."""
    listens: tuple[str, int] | None = None
    """Host and port at which it waits for workers of neighbouring stages."""
    acked: int = 0
    """Of its clocks, how many shard 0 has acknowledged to this process."""
