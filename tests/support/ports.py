"""Ports for servers of tests, which no other test has had lately.

Threads and processes of a test that is over may dial its ports once more. With a port that the kernel gives they would come to the servers
of another test, which know them: all tests have the same keys.
"""

from __future__ import annotations

import itertools
import os
import socket
from typing import Final

PORTS: Final = range(12_000, 32_000)
"""Below those that the kernel gives to who asks for none."""
STRIDE: Final = 977
_taken = itertools.count()


def free() -> socket.socket:
    """A socket that holds such a port of 127.0.0.1; a server may listen there meanwhile."""
    for _ in PORTS:
        port = PORTS[(os.getpid() * STRIDE + next(_taken)) % len(PORTS)]
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
            return sock
        except OSError:  # something listens there
            sock.close()
    raise OSError(f"no port of {PORTS} is free")
