"""The CPU as a device like a GPU behind a slow bus: a copy is begun by a call, and made later, in its turn, by another thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from psjob.layout.blocks import Layout
from psjob.layout.packing import Pack
from psjob.worker.delay import DelayedStaging
from psjob.worker.overlap import AwaitedStaging
from psjob.worker.staging import Pieces, Staging

DEADLINE = 60.0
LEAVE_SECONDS = 0.002


class Done:
    """An event as torch.cuda's."""

    def __init__(self) -> None:
        self._done = threading.Event()

    def synchronize(self) -> None:
        assert self._done.wait(DEADLINE), "a copy was not made"

    def come(self) -> None:
        self._done.set()


class CopyQueue:
    """Copies in one direction, one after the other, each so many seconds after the one before."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def begin(self, copy: Callable[[], object]) -> None:
        self._queue.put(copy)

    def event(self) -> Done:
        done = Done()
        self._queue.put(done.come)
        return done

    def _run(self) -> None:
        torch.set_num_threads(1)
        with torch.no_grad():
            while True:
                copy = self._queue.get()
                if copy is None:
                    return
                time.sleep(self._seconds)
                copy()

    def end(self) -> None:
        self._queue.put(None)


class SlowStaging(Staging):
    """A copy into the model takes `seconds`.

    `compute_waits` stands for what a GPU does by itself: kernels that read the model wait for the weights that have landed.
    """

    at_once = False
    """What reads the model next has no hook: the optimizer of a worker that steps by itself."""

    def __init__(self, layout: Layout, seconds: float) -> None:
        super().__init__(layout, torch.device("cpu"), True)
        self._begin_slow(seconds)

    def _begin_slow(self, seconds: float) -> None:
        self._leave, self._come = CopyQueue(LEAVE_SECONDS), CopyQueue(seconds)
        self._settled: list[Done] = []

    def put(self, row: int, gradient: torch.Tensor | None, only: int | None = None, into: Pieces | None = None) -> None:
        copy = super().put
        self._leave.begin(lambda: copy(row, gradient, only, into))

    def keep_back(self) -> None:
        self._leave.event().synchronize()

    def all_put(self) -> Any:
        return self._leave.event()

    def take(self, block: int, targets: Sequence[torch.Tensor | None], source: Pack | None = None) -> None:
        pack = source or self._weights[block]
        self._come.begin(lambda: pack.scatter(targets))
        self._landed[block] = self._come.event()  # type: ignore[assignment]

    def settle(self, blocks: Iterable[int]) -> None:
        self._settled += [event for block in blocks if (event := self._landed.get(block)) is not None]  # type: ignore[misc]
        if self.at_once:
            self.compute_waits()

    def kernel(self, act: Callable[[], object]) -> None:
        """Do something that reads the weights that have landed, behind the copies that were begun, while the script continues."""
        self._come.begin(act)

    def compute_waits(self) -> None:
        events, self._settled = self._settled, []
        for event in events:
            event.synchronize()

    def end(self) -> None:
        self._leave.end()
        self._come.end()


class SlowDelayedStaging(SlowStaging, DelayedStaging):
    """The same for `Delayed`."""

    def __init__(self, layout: Layout, seconds: float, delay: int) -> None:
        DelayedStaging.__init__(self, layout, torch.device("cpu"), delay)
        self._begin_slow(seconds)


class SlowAwaitedStaging(SlowStaging, AwaitedStaging):
    """The same for `Overlap`."""

    def __init__(self, layout: Layout, seconds: float) -> None:
        AwaitedStaging.__init__(self, layout, torch.device("cpu"), True)
        self._begin_slow(seconds)
