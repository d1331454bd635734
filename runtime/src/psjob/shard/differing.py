"""The lines about pushes that come again with other bytes: the first of each worker, then one a minute at most."""

from __future__ import annotations

import logging

log = logging.getLogger("psjob.shard")
NOTICE_SECONDS = 60.0
"""From one line about a worker to the next."""


class DifferingPushes:
    """Each is counted, few are told. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._told: dict[int, float] = {}
        self._since: dict[int, int] = {}
        """By rank: how many came since its last line."""

    def came(self, rank: int, clock: int, name: str, now: float) -> None:
        """Worker `rank` pushed step `clock` of a block or table called `name` again, with other bytes."""
        self._since[rank] = self._since.get(rank, 0) + 1
        if rank in self._told and now - self._told[rank] < NOTICE_SECONDS:
            return
        more = f" ({self._since[rank]} such pushes since the last line)" if rank in self._told else ""
        self._told[rank], self._since[rank] = now, 0
        log.error(
            "worker %d pushed step %d of %s again with other bytes than those that count; the new ones are left out%s. A process that was "
            "started again may compute other bits (a GPU's atomics do); from one process this is a fault",
            rank, clock, name, more,
        )  # fmt: skip
