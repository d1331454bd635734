"""What tells a thread that one of its descriptors has bytes or room: epoll, or poll where a system has none; and a bell to wake it by."""

from __future__ import annotations

import contextlib
import os
import select

BYTES, ROOM = select.POLLIN, select.POLLOUT
"""The bits of epoll are the same."""


class Poller:
    """Belongs to one thread. An end of the other side is reported for every descriptor, also for one that waits for nothing (0)."""

    def __init__(self) -> None:
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._poll = select.poll()
        waits = self._epoll or self._poll
        self.modify, self.unregister, self._register = waits.modify, waits.unregister, waits.register

    def register(self, fd: int, wanted: int) -> None:
        """Raises ValueError for a descriptor that is closed, OSError where the system can watch no more."""
        if fd < 0:
            raise ValueError("a closed descriptor cannot be watched")
        self._register(fd, wanted)

    def poll(self, seconds: float) -> list[tuple[int, int]]:
        """(descriptor, bits) of those that have something to tell; waits for the first, as long as it takes where `seconds` is negative."""
        if self._epoll is not None:
            return self._epoll.poll(seconds)
        return self._poll.poll(None if seconds < 0 else 1000 * seconds)

    def close(self) -> None:
        """Nothing is watched any more."""
        if self._epoll is not None:
            self._epoll.close()


class Bell:
    """Wakes a thread that watches `fd`. `ring` may be called by any thread."""

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
            self.fd = self._in = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self.fd, self._in = os.pipe()
            for end in (self.fd, self._in):
                os.set_blocking(end, False)

    def ring(self) -> None:
        """Wake the thread."""
        with contextlib.suppress(BlockingIOError):  # it was rung often enough
            os.write(self._in, (1).to_bytes(8, "little"))

    def hear(self) -> None:
        """Forget that it was rung."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def close(self) -> None:
        """Give its descriptors back."""
        for end in {self.fd, self._in}:
            os.close(end)
