"""Where the shards of a run listen, and what the command of each process stands behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from psjob_operator.plan.observed_state import Role


class Listening(NamedTuple):
    """The addresses of a shard, the same for all its attempts."""

    host: str
    data: int
    status: int


class Sites(Protocol):
    """What a run needs to know of the network that its processes are in."""

    @property
    def shards(self) -> Sequence[Listening]:
        """The shards' addresses in index order."""

    def command(self, role: Role, index: int, argv: Sequence[str]) -> Sequence[str]:
        """The words that start `argv` as this process, in place: the process that runs them becomes that of `argv`."""

    def close(self) -> None:
        """The run has ended."""
