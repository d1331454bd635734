"""Resume records longer than a frame go to the coordinator in pieces behind the steps, by a thread that ends with them."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from psjob.process import supervise
from psjob.wire.frame import Kind

if TYPE_CHECKING:
    from psjob.worker.session import WorkerSession

WAIT_SECONDS = 0.5


class HandIn:
    """Sends the pieces that the session's machine names."""

    def __init__(self, session: WorkerSession) -> None:
        self._session = session
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """There is something to send."""
        with self._session.cond:
            if self._thread is None:
                self._thread = supervise.start(self._run, "records")

    def join(self, seconds: float) -> None:
        """Wait for the thread, which ends once the session has ended."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def _run(self) -> None:
        session, machine, link = self._session, self._session.machine, self._session.links[0]
        while True:
            with session.cond:
                if machine.records.through or session.ended:
                    self._thread = None
                    return
                piece = machine.next_piece(time.monotonic())
                if piece is None:
                    session.cond.wait(WAIT_SECONDS)
                    continue
            clock, crc, size = piece.record
            header = session.header(Kind.RECORD_PIECE, clock=clock, part=piece.offset, version=(crc, size))
            link.send(header._replace(generation=piece.idle[0], request=piece.idle[1]), bytes(piece.data))
