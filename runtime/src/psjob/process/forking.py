"""What a process needs that forks others: to be woken when one of them ends, and that they end with it."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from typing import Final

_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG: Final = 1


class Ends:
    """Can be read when a child of this process has ended. One at a time, in the main thread."""

    def __init__(self) -> None:
        self._read, self._written = socket.socketpair()
        self._written.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)

    def fileno(self) -> int:
        return self._read.fileno()

    def heard(self) -> None:
        """Take what was said so far."""
        self._read.recv(4096)

    def close(self) -> None:
        """In a child: its own children are its own matter."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._read.close()
        self._written.close()


def end_with(parent: int) -> None:
    """Has the kernel kill this process when process `parent`, its own, ends in whatever way; ends it if that has gone already."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
