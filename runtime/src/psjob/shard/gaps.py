"""Work beside training is done between pushes where it can be: a core, or the memory's bandwidth, is the pushes' first."""

from __future__ import annotations

import time
from collections.abc import Callable

CALM = 0.01
"""Seconds without a push after which nobody is held up."""
SHARE = 3
"""Where pushes never cease, a quarter of the time is worked."""


class PushGaps:
    """For one thread. `pushed` tells when the last push came, by the monotonic clock."""

    def __init__(self, pushed: Callable[[], float]) -> None:
        self._pushed = pushed
        self._since = time.monotonic()

    def wait(self) -> None:
        """Wait until no push has come for a moment, but at most SHARE times as long as the caller has worked since the last call."""
        now = time.monotonic()
        until = now + SHARE * (now - self._since)
        while now < until and now - self._pushed() < CALM:
            time.sleep(CALM / 4)
            now = time.monotonic()
        self._since = now
