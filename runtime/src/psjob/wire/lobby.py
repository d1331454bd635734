"""Where those wait who have dialled and not yet said their first words: of each there is a descriptor, and nothing else is made.

The kernel tells of who has said them all (SO_RCVLOWAT), or has gone. Belongs to the thread of one loop.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from psjob.wire.reading import STRANGER_SECONDS

if TYPE_CHECKING:
    from psjob.wire.loop import Loop


class Lobby:
    """`gone` is called with each socket that is closed in here."""

    def __init__(self, loop: Loop, gone: Callable[[socket.socket], object]) -> None:
        self._loop, self._gone = loop, gone
        self._waiting: dict[socket.socket, float] = {}
        """When each has dialled; oldest first."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sock: socket.socket, enter: Callable[[socket.socket, float], object]) -> None:
        """It has dialled; `enter` is given it once it has spoken, and when it had dialled. Raises OSError where no more can be watched."""
        self._loop.listen(sock.fileno(), partial(self._speaks, sock, enter))
        self._waiting[sock] = time.monotonic()

    def close(self, sock: socket.socket) -> None:
        """Hang up."""
        self._leave(sock)
        sock.close()
        self._gone(sock)

    def look(self, now: float) -> None:
        """Hang up on who has not spoken in time."""
        for sock, since in list(self._waiting.items()):
            if now - since < STRANGER_SECONDS:
                break
            self.close(sock)

    def _speaks(self, sock: socket.socket, enter: Callable[[socket.socket, float], object]) -> None:
        try:
            said = sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:  # the poller told of another one, which had this descriptor before
            return
        except OSError:
            said = b""
        if said:
            enter(sock, self._leave(sock))
        else:
            self.close(sock)

    def _leave(self, sock: socket.socket) -> float:
        self._loop.unlisten(sock.fileno())
        return self._waiting.pop(sock)
