"""Streams that a process has begun, and whose hello has not come."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

from psjob.shard.acceptor import SPARE, Acceptor
from psjob.wire.auth import Peer


class Begun:
    """A stream by which nothing comes."""

    def __init__(self, closed: list[int], number: int) -> None:
        self._closed, self._number = closed, number

    def next_header(self, _seconds: float) -> Iterator[None]:
        while True:
            yield

    def close(self) -> None:
        self._closed.append(self._number)


def test_each_stream_that_a_process_begins_too_many_closes_another() -> None:
    """Also before those that were closed have come to their ends."""
    acceptor = Acceptor.__new__(Acceptor)
    acceptor.here = cast(Any, SimpleNamespace(config=SimpleNamespace(streams=1)))
    acceptor._lock, acceptor._begun = threading.Lock(), {}
    peer, closed = Peer("worker", 0, 1), list[int]()
    hellos = [acceptor._hello(peer, cast(Any, Begun(closed, number))) for number in range(10)]
    for hello in hellos:
        next(hello)
    assert closed == list(range(10 - 1 - SPARE))
    late = acceptor._hello(peer, cast(Any, Begun(closed, 10)))
    for hello in reversed(hellos):
        hello.close()
    next(late)
    assert len(acceptor._begun[peer]) == 1, "those that end later take no other's place"
    late.close()
    assert not acceptor._begun
