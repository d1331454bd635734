"""Between shards: every shard but 0 keeps a stream to the coordinator; orders come down it, answers go up.

What waits for one thread, in its order. What is not urgent wakes nobody: it is taken with what comes next, or when the thread looks.
"""

from __future__ import annotations

import logging
import queue
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from psjob.contract import MOST_RISE
from psjob.process import supervise
from psjob.wire.frame import Header, Kind, WireError
from psjob.wire.tcp import Stream, StreamClosed

if TYPE_CHECKING:
    from psjob.shard.server import Server


MANY = 256
"""So many that wait wake the thread all the same."""
T = TypeVar("T")


class Mailbox(Generic[T]):
    """Any thread may put; one takes."""

    def __init__(self) -> None:
        self._waiting: deque[T] = deque()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._asleep = False

    def put(self, item: T, urgent: bool = True) -> None:
        """Behind all that was put before; only what is urgent ends a wait of `get`."""
        self._waiting.append(item)
        if self._asleep and (urgent or len(self._waiting) > MANY):
            self._asleep = False
            self._wakes.put(None)

    def get(self, timeout: float) -> T:
        """The next one; waits `timeout` seconds for one that is urgent. Raises queue.Empty."""
        self._asleep = True  # before it is looked: what is put from here on either is seen or wakes
        if not self._waiting:
            try:
                self._wakes.get(timeout=timeout)
            except queue.Empty:
                pass
        self._asleep = False
        return self.get_nowait()

    def get_nowait(self) -> T:
        """The next one. Raises queue.Empty."""
        try:
            return self._waiting.popleft()
        except IndexError:
            raise queue.Empty from None

    def qsize(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def empty(self) -> bool:
        """Does none wait?"""
        return not self._waiting


log = logging.getLogger("psjob.shard")
BEAT_SECONDS = 2.0
"""The coordinator says something down each stream at least this often."""


class PeerStream:
    """The coordinator's end. Orders are sent by a thread, so that a slow shard never holds the coordinator."""

    def __init__(self, server: Server, stream: Stream, hello: Mapping[str, Any]) -> None:
        self.server, self.stream, self.hello = server, stream, hello
        self.index = int(hello["index"])
        self._out: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        view, own = int(hello["view"]), server.store.view
        if view > own + MOST_RISE:
            raise WireError(f"shard {self.index} says view {view}, this one is of view {own}; a view rises by {MOST_RISE} at most")

    def run(self) -> None:
        coordinator = self.server.coordinator
        assert coordinator is not None
        hello, order = self.hello, self._out.put
        if hello.get("early"):
            coordinator.announced(int(hello["view"]))
            return
        if self.stream.gone():
            return  # the shard has dialled again meanwhile; an old hello must not displace the new one
        link = coordinator.shard(self.index, hello, order)
        supervise.start(self._send_loop, f"to-shard-{self.index}")
        try:
            while True:
                header = self.stream.recv_header(None)
                if header.kind is not Kind.PEER:
                    raise WireError(f"{header.kind.name} is not a shard's message")
                coordinator.answer(self.index, self.stream.recv_json(header))
        finally:
            self._out.put(None)
            coordinator.lost(self.index, link)

    def _send_loop(self) -> None:
        header = Header(Kind.PEER, run=self.server.run, view=self.server.store.view, attempt=self.server.store.attempt)
        while True:
            try:
                body = self._out.get(timeout=BEAT_SECONDS)
            except queue.Empty:
                body = {"do": "nothing"}
            if body is None:
                return
            try:
                self.stream.send_json(header, body)
            except StreamClosed:
                return
