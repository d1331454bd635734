"""The stream of a shard to the coordinator: dialled and read in one thread, written by another, decided on by `psjob.protocol.shard`."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from psjob.process import supervise
from psjob.protocol.shard import events as e
from psjob.protocol.shard import orders
from psjob.protocol.shard.actions import Hello
from psjob.shard.hello import hello_body
from psjob.wire import tcp
from psjob.wire.frame import Header, Kind, WireError
from psjob.wire.handshake import greet
from psjob.wire.tcp import Stream, StreamClosed
from psjob.wire.words import one_line

if TYPE_CHECKING:
    from psjob.shard.server import Server

DIAL_SECONDS = 3.0
NOTICE_SECONDS = 30.0
log = logging.getLogger("psjob.shard")


class CoordinatorLink:
    """At most one stream at a time is in use; nobody who says something waits for it. `post` takes what came."""

    def __init__(self, server: Server, post: Callable[[e.Event], None]) -> None:
        self._server, self._post = server, post
        self._peer = server.place.config.shards[0]
        self._dials: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._out: queue.SimpleQueue[tuple[Stream, Kind, Mapping[str, Any]] | None] = queue.SimpleQueue()
        self._over = False
        self._number = 0
        self._told = -NOTICE_SECONDS
        """When it was logged last that who was dialled is not the coordinator."""
        self._stream: Stream | None = None
        self._addresses: Iterator[Stream] | None = None
        """What is left of the addresses that the coordinator's name had."""

    def start(self) -> None:
        """Be ready to dial."""
        supervise.start(self._read_loop, "to-coordinator")
        supervise.start(self._send_loop, "coordinator-sender")

    def dial(self, after: float) -> None:
        """Open a stream in so many seconds."""
        self._dials.put(after)

    def hello(self, action: Hello) -> None:
        """The first frame of a stream."""
        store, stream = self._server.store, self._stream
        if stream is not None and action.stream == self._number:
            body = hello_body(store.index, store.attempt, action.view, action.serving, action.recovery, action.mode, action.carried)
            self._out.put((stream, Kind.HELLO, body))

    def say(self, body: Mapping[str, Any]) -> None:
        """An answer; on a stream that breaks it is lost."""
        stream = self._stream
        if stream is not None:
            self._out.put((stream, Kind.PEER, body))

    def hang_up(self, number: int) -> None:
        """Close a stream; what waits to be sent by it goes."""
        stream = self._stream
        if stream is not None and number == self._number:
            stream.close()

    def close(self) -> None:
        """Dial no more, and end the threads."""
        self._over = True
        self._dials.put(0.0)
        self._out.put(None)
        self.hang_up(self._number)

    def _read_loop(self) -> None:
        while not self._over:
            time.sleep(self._dials.get())
            stream = None if self._over else self._next()
            if stream is None:
                self._post(e.Unreached())
                continue
            if not self._greeted(stream):
                stream.close()
                self._post(e.Unreached())
                continue
            self._number += 1
            self._stream = stream
            if self._over:  # `close` came before there was a stream to close
                stream.close()
                return
            self._post(e.Connected(self._number))
            why = self._read(stream, self._number)
            self._stream = None
            stream.close()
            self._post(e.Lost(self._number, why))

    def _next(self) -> Stream | None:
        """The next address of the coordinator's name that can be dialled; after the last one the name is looked up again."""
        stream = None if self._addresses is None else next(self._addresses, None)
        if stream is None:
            self._addresses = tcp.connect(self._peer.host, self._peer.port, DIAL_SECONDS)
            stream = next(self._addresses, None)
        if stream is None:
            self._addresses = None
        return stream

    def _greeted(self, stream: Stream) -> bool:
        """Prove who dials; whether the coordinator answered and has proven itself too."""
        try:
            greet(stream, self._server.place, 0)
        except (StreamClosed, TimeoutError):
            return False
        except WireError as error:
            if time.monotonic() - self._told > NOTICE_SECONDS:
                self._told = time.monotonic()
                log.warning("stream to the coordinator at %s: %s", stream.peer, one_line(error, 1000))
            return False
        return True

    def _read(self, stream: Stream, number: int) -> str:
        """Read orders until the stream ends; why, where that is worth a line in the log."""
        try:
            while True:
                header = stream.recv_header(None)
                if header.kind is Kind.ERROR:
                    return one_line(stream.recv_json(header).get("error"), 1000)
                self._addresses = None  # this one was right
                self._post(e.Ordered(orders.read(stream.recv_json(header)), number))
        except StreamClosed:
            return ""
        except (WireError, TimeoutError) as error:
            return str(error)

    def _send_loop(self) -> None:
        while (item := self._out.get()) is not None:
            stream, kind, body = item
            store = self._server.store
            header = Header(kind, run=self._server.run, view=store.view, attempt=store.attempt, worker=-1 - store.index)
            try:
                stream.send_json(header, body)
            except StreamClosed:
                stream.close()
