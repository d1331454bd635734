"""Between shards: every shard but 0 keeps a stream to the coordinator; orders come down it, answers go up."""

from __future__ import annotations

import logging
import queue
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from psjob.contract import MOST_RISE
from psjob.process import supervise
from psjob.wire.frame import Header, Kind, WireError
from psjob.wire.tcp import Stream, StreamClosed

if TYPE_CHECKING:
    from psjob.shard.server import Server

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
