"""What tests of pure code may not do: import torch, start a process, speak to a socket."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

REFUSED = {
    "subprocess.Popen": "starts a process",
    "os.system": "starts a process",
    "os.fork": "forks",
    "os.forkpty": "forks",
    "os.posix_spawn": "starts a process",
    "os.exec": "becomes another program",
    "socket.bind": "listens on a socket",
    "socket.connect": "connects to a socket",
    "socket.sendto": "sends to a socket",
}
_watching = False
_others: set[int] = set()
"""Threads that earlier tests of this process have left: what they do is not the test's."""


@pytest.fixture(autouse=True)
def pure() -> Iterator[None]:
    """For the conftest of a folder: each of its tests fails where it does more than compute."""
    global _watching, _others
    _others = {thread.ident for thread in threading.enumerate() if thread.ident is not None} - {threading.get_ident()}
    _watching = True
    yield
    _watching = False


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if not _watching or threading.get_ident() in _others:
        return
    if event == "import" and str(arguments[0]).partition(".")[0] == "torch":
        pytest.fail("a test of `make test-unit` imports torch; it belongs in tests/tensors")
    if event in REFUSED:
        told = f" ({arguments[0]!r})" if arguments else ""
        pytest.fail(f"a test of `make test-unit` {REFUSED[event]}{told}; it belongs in tests/live")


sys.addaudithook(_refuse)
