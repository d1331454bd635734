"""The keys that a process was handed, see `contract.KEYS`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from psjob.contract import keys
from psjob.process.errors import Refused

MOST_BYTES = 4096
"""Of a key file."""


@dataclass(frozen=True, repr=False)
class Keys:
    """By the names of `contract.KEYS`; empty where this process has none of that name."""

    worker: bytes = b""
    shard: bytes = b""
    workers: bytes = b""
    shards: bytes = b""
    questions: bytes = b""

    @property
    def own(self) -> bytes:
        """What this process proves with who it is. Raises Refused where it has nothing."""
        if not (self.worker or self.shard):
            raise Refused("this process has no key of its run; it was not started by an operator or by psjob run of this version")
        return self.worker or self.shard


def read(path: str, role: str, index: int) -> Keys:
    """The keys in that file. Raises ValueError where it lacks what a process of this place needs; the text holds no key."""
    with Path(path).open("rb") as file:
        found = keys.read(file.read(MOST_BYTES).decode("ascii"))
    needed = {"worker"} if role == "worker" else {"shard", "workers", "questions"} | ({"shards"} if index == 0 else set())
    if found.keys() != needed:
        raise ValueError(
            f"it has keys {', '.join(sorted(found)) or 'of no name'}, a {role} of index {index} has {', '.join(sorted(needed))}"
        )
    return Keys(**found)
