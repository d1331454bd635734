"""Packets that arrive later: a tun device whose packets are read, kept and written back, since a kernel may be built without netem."""

from __future__ import annotations

import collections
import fcntl
import math
import os
import select
import struct
import threading
import time

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
LARGEST = 65536


def new_tun(device: str) -> int:
    """The open file of a new tun device in the caller's network namespace; the device goes when it is closed."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
    return tun


class Delay:
    """Gives each packet back to the device `tun` when it has been here for so many seconds. `stop` closes it and drops the rest."""

    def __init__(self, tun: int, seconds: float) -> None:
        self.tun, self.seconds = tun, seconds
        self._held: collections.deque[tuple[float, bytes]] = collections.deque()
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._run, name="delay", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        os.close(self._stopped)
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._stop)
        os.close(self.tun)

    def _run(self) -> None:
        poll = select.poll()  # select takes no descriptor above 1,023
        for fd in (self.tun, self._stop):
            poll.register(fd, select.POLLIN)
        while True:
            wait = math.ceil(1000 * max(0.0, self._held[0][0] - time.monotonic())) if self._held else None
            ready = {fd for fd, _ in poll.poll(wait)}
            if self._stop in ready:
                return
            if self.tun in ready:
                self._take()
            while self._held and self._held[0][0] <= time.monotonic():
                os.write(self.tun, self._held.popleft()[1])

    def _take(self) -> None:
        due = time.monotonic() + self.seconds
        while True:
            try:
                self._held.append((due, os.read(self.tun, LARGEST)))
            except BlockingIOError:
                return
