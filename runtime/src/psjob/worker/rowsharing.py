"""Memory that a worker and the shards of its host lend each other for rows: what it pushes, and what it has asked for."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

from psjob.layout import memory
from psjob.wire import handover
from psjob.wire.frame import WireError
from psjob.wire.rows import ALIGNED, LENT_ANSWERS, LENT_PUSHES
from psjob.wire.shared import Region


class RowSharing:
    """Empty until a shard offers. Each shard has answers of its own; pushes to all lie in one region."""

    def __init__(self, shards: int) -> None:
        self._answers: list[Region | None] = [None] * shards
        self._pushes: Region | None = None
        self._places: dict[tuple[int, int], tuple[int, int]] = {}
        """Offset and length of what was pushed in the clock in hand, by shard and table."""
        self._used = 0
        self._lock = threading.Lock()

    def take(self, index: int, offer: Mapping[str, Any]) -> None:
        """Hand over the memory of pushes to shard `index` and take that of its answers. Raises OSError or WireError."""
        if int(offer["bytes"]) != LENT_ANSWERS:
            raise WireError(f"shard {index} lends {offer['bytes']} bytes for rows, expected {LENT_ANSWERS}")
        self.lose(index)  # what it lent before is not where it puts answers once it has been asked again, whatever comes of that
        with self._lock:
            if self._pushes is None:
                self._pushes = Region.lend(LENT_PUSHES)
        self._answers[index] = Region.borrow(handover.fetch(str(offer["name"]), str(offer["token"]), self._pushes.fd), LENT_ANSWERS)

    def lose(self, index: int) -> None:
        """The stream over which shard `index` told of its memory has ended."""
        self._answers[index] = None

    def answers(self, index: int) -> Region | None:
        """The memory in which shard `index` puts rows; None: it sends them."""
        return self._answers[index]

    def begin(self) -> None:
        """A clock begins: every shard has applied what was pushed in the one before."""
        with self._lock:
            self._places.clear()
            self._used = 0

    def stage(self, index: int, table: int, ids: torch.Tensor, grads: torch.Tensor) -> tuple[int, int] | None:
        """Offset and length of a push that lies where shard `index` reads it, put there once a clock. None: it has to be sent."""
        with self._lock:
            if self._answers[index] is None or self._pushes is None:
                return None
            key, length = (index, table), ids.nbytes + grads.nbytes
            if key not in self._places:
                if self._used + length > self._pushes.size:
                    return None
                memory.lent(self._pushes, self._used, ids.numel(), "int64").copy_(ids)
                dtype = str(grads.dtype).removeprefix("torch.")
                memory.lent(self._pushes, self._used + ids.nbytes, grads.numel(), dtype).copy_(grads.view(-1))
                if self._pushes.withdrawn:
                    return None  # the region may have become private before all of it was there
                self._places[key] = (self._used, length)
                self._used += -(-length // ALIGNED) * ALIGNED
            return self._places[key]

    def withdraw(self) -> None:
        """As Arena.withdraw: nothing that this process writes from now on reaches a shard."""
        if self._pushes is not None:
            self._pushes.withdraw()
