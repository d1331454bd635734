"""Resume records go to the coordinator: small ones at once, longer ones in pieces behind the steps, by a thread that ends with them."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from psjob.process import supervise
from psjob.protocol.records import PIECE, RecordId, RecordsOut
from psjob.wire.frame import Header, Kind

if TYPE_CHECKING:
    from psjob.worker.session import WorkerSession

WAIT_SECONDS = 0.5


class HandIn:
    """What a worker hands in. Guarded by the session's condition."""

    def __init__(self, session: WorkerSession) -> None:
        self._session = session
        self._queue = RecordsOut()
        self._thread: threading.Thread | None = None

    @property
    def through(self) -> bool:
        """Has the coordinator's process all that was handed in?"""
        return self._queue.through

    def hand_in(self, clock: int, blob: bytes, cut: bool, idle: tuple[int, int]) -> None:
        """Send a record, or queue it; `cut`: a checkpoint needs it. `idle`: milliseconds, and how many IDLE_PARTS of them it has waited."""
        session = self._session
        if len(blob) <= PIECE:
            session.links[0].send(session.header(Kind.RECORD, clock=clock, part=idle[0], request=idle[1]), blob)
            return
        with session.cond:
            self._queue.add(clock, blob, cut, idle)
            self._begin()

    def relinked(self) -> None:
        """The coordinator's stream is a new one; call with the condition held."""
        self._queue.relinked()
        self._begin()

    def has(self, header: Header) -> None:
        """The coordinator's process says how much of a record it has."""
        with self._session.cond:
            self._queue.has(RecordId(header.clock, *header.version), header.part, time.monotonic())
            self._session.cond.notify_all()

    def join(self, seconds: float) -> None:
        """Wait for the thread, which ends once the session has ended."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _begin(self) -> None:
        if self._thread is None and not self._queue.through:
            self._thread = supervise.start(self._send, "records")

    def _send(self) -> None:
        session = self._session
        while True:
            with session.cond:
                if self._queue.through or session.ended:
                    self._thread = None
                    return
                link = session.links[0]
                stepping = any(one.outstanding or one.unsent for one in session.links)
                piece = self._queue.next(time.monotonic(), stepping) if link.welcomed else None
                if piece is None:
                    session.cond.wait(WAIT_SECONDS)
                    continue
            clock, crc, size = piece.record
            header = session.header(Kind.RECORD_PIECE, clock=clock, part=piece.offset, version=(crc, size))
            link.send(header._replace(generation=piece.idle[0], request=piece.idle[1]), bytes(piece.data))
