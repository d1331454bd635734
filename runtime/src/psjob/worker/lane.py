"""One stream of a link: blocks are gathered and sent, received and landed, beside those of the other lanes."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from psjob.layout import memory
from psjob.process import supervise
from psjob.protocol.recorddelta import RecordsOnStream
from psjob.wire.frame import Header, Kind, WireError
from psjob.wire.tcp import Stream, StreamClosed
from psjob.wire.words import one_line
from psjob.worker.turns import Turn

if TYPE_CHECKING:
    from psjob.layout.packing import Packs
    from psjob.worker.link import ShardLink

CLOSE_SECONDS = 5.0
log = logging.getLogger("psjob.worker")


class WorkerLane:
    """`stream` to the shard of `link`. Until `start` blocks are sent by the caller and somebody else reads."""

    def __init__(self, link: ShardLink, stream: Stream) -> None:
        self.link, self.stream = link, stream
        self.turn = Turn()
        self._out: queue.PriorityQueue[tuple[int, int, Header | None]] = queue.PriorityQueue()
        self._count = itertools.count()
        self._threads: list[threading.Thread] = []
        self._records = RecordsOnStream()
        self._recording = threading.Lock()

    @cached_property
    def landing(self) -> Packs:
        """For the thread that reads."""
        return self.link.session.exchange.make_packs()

    @cached_property
    def _leaving(self) -> Packs:
        """For the thread that sends blocks."""
        return self.link.session.exchange.make_packs()

    def start(self, reads: bool) -> None:
        """Send blocks in a thread of the lane's own, and read in another if `reads`."""
        name = f"lane-{self.link.index}-{self.stream.peer}"
        works = [self._send_loop, self._read] if reads else [self._send_loop]
        self._threads = [supervise.start(work, name) for work in works]

    def send_block(self, header: Header) -> None:
        """Send a request and what it carries, now or, once the lane was started, in its turn."""
        exchange = self.link.session.exchange
        lent = self.link.shared and exchange.sharing.steady and not exchange.beside  # a header alone: not worth waking a thread for
        if self._threads and not lent:
            self._out.put((exchange.order(header.block), next(self._count), header))
        else:
            self._send_now(header)

    def send(self, header: Header, payload: bytes | torch.Tensor | None = None, rides: bool = False) -> None:
        """Send a frame; `rides` as in `Stream.send`.

        Where the stream has ended it is forgotten: what must not be lost is said again after the next welcome.
        """
        try:
            self.stream.send(self.link.dated(header), memory.view(payload) if isinstance(payload, torch.Tensor) else payload or b"", rides)
        except StreamClosed:
            pass

    def send_record(self, header: Header, record: bytes, idle: tuple[int, int], rides: bool) -> None:
        """As `send`, of a resume record of at most a piece: what it changes of the one before on this stream. `idle` as in AtEdge."""
        with self._recording:
            delta = self._records.delta(record)
            if delta is None:
                self.send(header._replace(kind=Kind.RECORD, part=idle[0], request=idle[1]), record, rides)
            else:
                told = header._replace(kind=Kind.RECORD_DELTA, part=delta.begin, version=(delta.crc, delta.size))
                self.send(told._replace(generation=idle[0], request=idle[1]), delta.data, rides)

    def send_control(self, header: Header, raw: bytes) -> None:
        """As `send`, of a control body."""
        try:
            self.stream.send_control(self.link.dated(header), raw)
        except StreamClosed:
            pass

    def send_parts(self, header: Header, parts: Sequence[memoryview]) -> None:
        """As `send`, of a payload that lies in several places."""
        try:
            self.stream.send_parts(self.link.dated(header), parts)
        except StreamClosed:
            pass

    def send_lent(self, header: Header, offset: int, length: int) -> None:
        """As `send`, of a payload that lies in memory which this worker lends."""
        try:
            self.stream.send_lent(self.link.dated(header), offset, length)
        except StreamClosed:
            pass

    def close(self) -> None:
        """Close the stream and wait for the lane's threads."""
        self.stream.close()
        self._out.put((-1, 0, None))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(CLOSE_SECONDS)

    def _send_now(self, header: Header) -> None:
        exchange = self.link.session.exchange
        try:
            place = exchange.stage(self.link, header)
            if place is not None:
                self.send_lent(header, *place)
                return
            frame = exchange.outgoing(self, header, self._leaving[header.block])
            if frame is not None:
                self.send(*frame)
        finally:
            exchange.sent(header)

    def _send_loop(self) -> None:
        while (header := self._out.get()[2]) is not None:
            if not self.stream.closed:
                self._send_now(header)

    def _read(self) -> None:
        try:
            self.link.read(self)
        except (StreamClosed, TimeoutError) as error:
            log.debug("lane to shard %d: %s", self.link.index, error)
        except WireError as error:
            log.warning("lane to shard %d: %s", self.link.index, one_line(error, 1000))
        self.link.close()
