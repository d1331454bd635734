"""Processes that this one starts: it is woken when one ends, they end with it, and it can kill all of them and theirs."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Final

_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG: Final = 1


class ChildExits:
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


def end_children(but: int = 0) -> None:
    """Kill and reap every descendant `but` one: loader processes would survive the exec and keep files and memory."""
    for _round in range(3):
        children = [pid for pid in descendants_of(os.getpid()) if pid != but]
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    if but and set(descendants_of(os.getpid())) <= {but}:
                        return
                    time.sleep(0.005)
            except ChildProcessError:
                return


def descendants_of(pid: int) -> list[int]:
    """Numbers of all processes below that one, of each the deepest first."""
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            direct = [int(child) for child in listing.read_text().split()]
        except OSError:
            continue
        for child in direct:
            found.extend([*descendants_of(child), child])
    return found
