"""Between shards: every shard but 0 keeps a stream to the coordinator; orders come down it, answers go up."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from psjob import contract
from psjob.modes import written
from psjob.process.errors import Fenced
from psjob.shard.hello import hello_body
from psjob.shard.phase import Phase
from psjob.wire import tcp
from psjob.wire.frame import Header, Kind, WireError
from psjob.wire.tcp import Stream, StreamClosed

if TYPE_CHECKING:
    from psjob.shard.server import Server

log = logging.getLogger("psjob.shard")
DIAL_SECONDS = 3.0
AGAIN_SECONDS = 0.1
"""Between two dials."""
BEAT_SECONDS = 2.0
"""The coordinator says something down each stream at least this often."""
SILENCE_SECONDS = 10.0
"""A coordinator without a word for so long is dialled anew: its node may be cut off, and its successor has its name."""
FIRST_SECONDS = 30.0
"""The same for its first word: it listens before it has imported torch."""


class PeerStream:
    """The coordinator's end. Orders are sent by a thread, so that a slow shard never holds the coordinator."""

    def __init__(self, server: Server, stream: Stream, hello: Mapping[str, Any]) -> None:
        self.server, self.stream, self.hello = server, stream, hello
        self.index = int(hello["index"])
        self._out: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        if not 0 < self.index < len(server.place.config.shards):
            raise WireError(f"shard {self.index} is not one of this job's {len(server.place.config.shards)}")

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
        threading.Thread(target=self._send_loop, name=f"to-shard-{self.index}", daemon=True).start()
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


class CoordinatorLink:
    """A shard's end: dial, say hello, obey; dial again when the stream breaks (a new shard 0 may be coming)."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._stream: Stream | None = None
        self._met = False
        self._staleness_told = 0.0

    def start(self) -> None:
        threading.Thread(target=self._run, name="to-coordinator", daemon=True).start()

    def answer(self, body: dict[str, Any]) -> None:
        stream = self._stream
        if stream is None:
            return
        try:
            stream.send_json(self._header(Kind.PEER), body)
        except StreamClosed:
            pass

    def _tell_staleness(self, at_once: bool) -> None:
        """How late pushes are, now and then: the coordinator adds up what all shards see. An order comes every BEAT_SECONDS at least."""
        staleness, now = self.server.store.staleness, time.monotonic()
        if staleness is not None and (at_once or now - self._staleness_told >= BEAT_SECONDS):
            self._staleness_told = now
            self.answer(staleness.word(self.server.store.attempt))

    def _header(self, kind: Kind) -> Header:
        store = self.server.store
        return Header(kind, run=self.server.run, view=store.view, attempt=store.attempt, worker=-1 - store.index)

    def _run(self) -> None:
        place, store = self.server.place, self.server.store
        peer = place.config.shards[0]
        deadline = time.monotonic() + place.config.connect_seconds
        while True:
            for stream in tcp.connect(peer.host, peer.port, DIAL_SECONDS):
                try:
                    serving = store.phase is Phase.SERVING
                    carried = 0 if store.decided is None else store.decided.carried
                    body = hello_body(store.index, store.attempt, store.view, serving, store.recovery, written(store.mode), carried)
                    stream.send_json(self._header(Kind.HELLO), body)
                    self._stream = stream  # what is said before is lost, as on the stream before
                    if store.decided is not None:
                        store.decided.tell_again()
                    limit = FIRST_SECONDS
                    while True:
                        header = stream.recv_header(limit)
                        limit = SILENCE_SECONDS
                        if header.kind is Kind.ERROR:
                            raise WireError(str(stream.recv_json(header).get("error")))
                        self._met = True
                        body = stream.recv_json(header)
                        self.server.control.order(body)
                        self._tell_staleness(at_once=body.get("do") == "finish")
                except StreamClosed:
                    pass
                except (WireError, TimeoutError) as error:
                    log.warning("stream to the coordinator: %s", error)
                except Fenced as fenced:
                    self.server.fenced(fenced)
                finally:
                    self._stream = None
                    stream.close()
            if not self._met and time.monotonic() > deadline:
                self.server.leave(
                    contract.EXIT_RETRY,
                    f"the coordinator at {peer.host}:{peer.port} was not found in {place.config.connect_seconds:.0f} s; starting again",
                )
                return
            time.sleep(AGAIN_SECONDS)
