"""Streams that a process has begun, and that are not served yet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from psjob.shard.acceptor import SPARE, Acceptor
from psjob.wire.auth import Peer


def test_each_stream_that_a_process_begins_too_many_closes_another() -> None:
    """Also before those that were closed have come to their ends."""
    acceptor = Acceptor.__new__(Acceptor)
    acceptor.here = cast(Any, SimpleNamespace(config=SimpleNamespace(streams=1)))
    acceptor._lock, acceptor._begun, acceptor._large = threading.Lock(), {}, {}
    peer, closed = Peer("worker", 0, 1), list[int]()
    beginnings = [acceptor._beginning(peer, cast(Any, Begun(partial(closed.append, at)))) for at in range(10)]
    for beginning in beginnings:
        beginning.__enter__()
    assert closed == list(range(10 - 1 - SPARE))
    for beginning in reversed(beginnings):
        beginning.__exit__(None, None, None)
    assert not acceptor._begun


class Begun:
    """A stream, as far as it is known here."""

    def __init__(self, close: Callable[[], None]) -> None:
        self.close = close
