"""What a worker knows of one shard."""

from __future__ import annotations

from collections.abc import Sequence

from psjob.protocol.worker.requests import Requests


class LinkState:
    """Of shard `index`, which listens at `address`."""

    def __init__(self, index: int, address: str) -> None:
        self.index, self.address = index, address
        self.requests = Requests()
        self.attempt = 0
        """Of the shard that welcomed this worker last; 0: none did."""
        self.welcomed = False
        self.released = 0
        """The newest cut that this shard has copied its part of."""
        self.waiting = ""
        """What it said last of why it does not answer."""
        self.since: float | None = None
        """When it was first looked for."""


def newest(found: Sequence[tuple[int, int]]) -> int:
    """Which of the processes that answer at one name is the newest: `found` are their (view, attempt)."""
    return max(range(len(found)), key=lambda at: (found[at], at))
