"""Which workers this shard's answers wait for, told to the coordinator once a second where the job has a step timeout."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from psjob.shard.server import Server

TELL_SECONDS = 1.0


class Awaited:
    """`tell` belongs to one thread."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._told = 0.0
        self._any = False

    def tell(self, now: float) -> None:
        """Tell the coordinator which workers are waited for, and for how long. Shard 0 also tells the clocks of all workers."""
        server = self._server
        if server.place.config.step_timeout is None or now - self._told < TELL_SECONDS:
            return
        self._told = now
        seconds = awaited(server, now)
        if not server.store.index:
            server.control.answer({"did": "awaited", "seconds": seconds, "clocks": server.store.clocks()})
        elif seconds or self._any:
            server.control.answer({"did": "awaited", "seconds": seconds})
        self._any = bool(seconds)


def awaited(server: Server, now: float) -> dict[int, float]:
    """By rank, for how many seconds an answer waits for its push."""
    store, found = server.store, dict[int, float]()
    for cell in store.all_cells():
        if not cell.waiters:
            continue
        with cell.lock:
            waiter = min(cell.waiters, key=lambda one: one.since, default=None)
            missing = [] if waiter is None else store.awaited(cell, waiter)[0]
        if waiter is None:
            continue
        if not missing and server.coordinator is not None:
            missing = server.coordinator.missing()  # of whom another shard has not all
        for rank in missing:
            if rank != waiter.rank:
                found[rank] = max(found.get(rank, 0.0), now - waiter.since)
    return found
