"""What a worker of a stage tells of itself once a second: how much it waits and for whom, and the memory that it holds."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

import torch

from psjob.process import limits
from psjob.wire.frame import Kind
from psjob.worker.idle import RECENT

if TYPE_CHECKING:
    from psjob.worker.session import WorkerSession

TELL_SECONDS: Final = 1.0
WAIT_SECONDS: Final = 2.0
"""A shorter wait is not told: stages wait for each other in every step."""


class StageGauge:
    """Of one session, for the script's thread."""

    def __init__(self, session: WorkerSession) -> None:
        self._session = session
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
        session, resident, peak = self._session, limits.resident(), limits.peak()
        if not session.joined:
            return
        self._told, self._waited = now, what is not None
        body: dict[str, Any] = {"idle": session.idle.recent(now, seconds), "rss": resident, "peak": peak, "devicePeak": device_peak()}
        if self._late:
            body["delay"] = fmean(self._late)
        if what is not None:
            body |= {"waits": what, "for": self._for, "seconds": seconds}
        session.links[0].send_json(session.header(Kind.MEASURED, clock=session.clock), body)


def device_peak() -> int | None:
    """The most bytes that tensors of this process have held on its CUDA device; None where it has used none."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return int(torch.cuda.max_memory_allocated())
