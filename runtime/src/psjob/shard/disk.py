"""The disk work of a shard: one thread, first in, first out, which says how far it is and can be told to stop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from psjob.process import supervise
from psjob.process.supervise import Pulse


class Stopped(Exception):
    """The transfer is not wanted any more."""


class Transfer:
    """Bytes `done` of `total` that one job writes or reads."""

    def __init__(self, total: int) -> None:
        self.done, self.total = 0, total
        self.stopped = False

    def moved(self, count: int) -> None:
        """So many bytes more. Raises Stopped."""
        self.done += count
        self.check()

    def check(self) -> None:
        """Raise Stopped where the transfer is not wanted any more."""
        if self.stopped:
            raise Stopped


class DiskThread:
    """Its thread begins with the first job."""

    def __init__(self) -> None:
        self.pulse = Pulse("disk")
        self.transfer: Transfer | None = None
        """What is under way."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._left = 0
        self._changed = threading.Condition()
        self._begun = False

    def put(self, job: Callable[[], None]) -> None:
        """Do `job` after all that was put before. What it raises ends the process."""
        with self._changed:
            self._left += 1
            begin, self._begun = not self._begun, True
        self._jobs.put(job)
        if begin:
            supervise.start(self._run, "disk")

    def close(self) -> None:
        """End the thread once all is done that was put before."""
        self._jobs.put(None)

    def moving(self) -> tuple[int, int]:
        """Bytes done and in all of what is under way; zeros where nothing is."""
        transfer = self.transfer
        return (0, 0) if transfer is None else (transfer.done, transfer.total)

    @property
    def busy(self) -> bool:
        """Is a job waiting or under way?"""
        return self._left > 0

    def wait(self) -> None:
        """Come back when nothing is left to do."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left)

    def _run(self) -> None:
        torch.set_num_threads(1)
        self.pulse.bind()
        while True:
            self.pulse.idle()
            job = self._jobs.get()
            if job is None:
                return
            self.pulse.beat()
            try:
                job()
            finally:
                self.transfer = None
                with self._changed:
                    self._left -= 1
                    self._changed.notify_all()
