"""The part of its time in which a worker's script waits: what sync pays for slow workers, and a pipeline for its bubble.

`Idle` counts it. `StageGauge` tells it once a second for a worker of a stage: how much it waits and for whom, and the memory that it holds.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any, Final

import torch

from psjob.process import limits
from psjob.wire.frame import IDLE_PARTS

RECENT: Final = 32
"""Steps that `Idle.recent` is made of, at most."""


def share(waited: float, counted: float) -> float:
    """The part of `counted` seconds in which somebody waited, 0 to 1; 0 of no time."""
    return min(1.0, max(0.0, waited / counted)) if counted > 0 else 0.0


class Idle:
    """For the script's thread. Counted from the end of the first step: until then workers wait for each other's imports."""

    def __init__(self) -> None:
        self.waited = 0.0
        """Seconds in all."""
        self.told = (0, 0)
        """(milliseconds counted, IDLE_PARTS of them waited) at the last edge; (0, 0): there was no step yet."""
        self._first: int | None = None
        self._began: tuple[float, float] | None = None
        self._edges: deque[tuple[float, float]] = deque(maxlen=RECENT + 1)
        """Of the last steps: when they ended, and what was waited until then."""

    def at(self, clock: int, now: float) -> None:
        """The script stands before step `clock` at `now`, monotonic seconds."""
        if self._first is None:
            self._first = clock
        if clock == self._first:
            return
        self._edges.append((now, self.waited))
        if self._began is None:
            self._began = now, self.waited
        counted, waited = now - self._began[0], self.waited - self._began[1]
        if counted >= 0.001:
            self.told = int(1000 * counted), round(IDLE_PARTS * share(waited, counted))

    def recent(self, now: float, waits: float = 0.0) -> float | None:
        """The part of the last RECENT steps, and of the time since, that was waited; None before the second step has ended.

        `waits`: seconds of a wait that is under way, which `waited` does not hold yet.
        """
        if len(self._edges) < 2 and not (self._edges and waits):
            return None
        begun, before = self._edges[0]
        return share(self.waited + waits - before, now - begun)


TELL_SECONDS: Final = 1.0
WAIT_SECONDS: Final = 2.0
"""A shorter wait is not told: stages wait for each other in every step."""


class StageGauge:
    """Of one session, for the script's thread. `send` sends what it tells; nothing goes out before the worker has joined."""

    def __init__(self, idle: Idle, send: Callable[[dict[str, Any]], None]) -> None:
        self._idle, self._send = idle, send
        self._told = 0.0
        self._waited = False
        """Was a wait the last that was told?"""
        self._for: int | None = None
        self._late: deque[int] = deque(maxlen=RECENT)
        """By how many updates the last ones were late, without flush."""
        self._over = False
        """Has the script ended? It waits for the others' ends then, which is no part of any step."""

    @contextlib.contextmanager
    def waits_for(self, rank: int) -> Iterator[None]:
        """What is waited for meanwhile comes from that worker."""
        self._for = rank
        try:
            yield
        finally:
            self._for = None
            if self._waited:
                self._tell(time.monotonic(), None, 0.0)

    def updated(self, late: int) -> None:
        """An update was pushed, on gradients of weights so many updates old. In a flush nobody says it."""
        self._late.append(late)

    def edge(self, now: float, last: bool = False) -> None:
        """The script stands between two steps; `last`: after its last one."""
        self._over = last
        if last or self._waited or now - self._told >= TELL_SECONDS:
            self._tell(now, None, 0.0)

    def waits(self, what: str, began: float, now: float) -> None:
        """The script has waited for `what` since `began`, and still does."""
        if not self._over and now - began >= WAIT_SECONDS and now - self._told >= TELL_SECONDS:
            self._tell(now, what, now - began)

    def _tell(self, now: float, what: str | None, seconds: float) -> None:
        self._told, self._waited = now, what is not None
        body: dict[str, Any] = {
            "idle": self._idle.recent(now, seconds), "rss": limits.resident(), "peak": limits.peak(), "devicePeak": device_peak(),
        }  # fmt: skip
        if self._late:
            body["delay"] = fmean(self._late)
        if what is not None:
            body |= {"waits": what, "for": self._for, "seconds": seconds}
        self._send(body)


def device_peak() -> int | None:
    """The most bytes that tensors of this process have held on its CUDA device; None where it has used none."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return int(torch.cuda.max_memory_allocated())
