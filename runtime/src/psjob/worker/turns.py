"""Who reads a stream: its link's thread, or the script's own thread while it waits for answers, which saves it being woken by the other."""

from __future__ import annotations

import contextlib
import queue
import select
import threading
import time
from typing import TYPE_CHECKING

from psjob.wire.frame import WireError
from psjob.wire.tcp import StreamClosed

if TYPE_CHECKING:
    from psjob.worker.lane import WorkerLane
    from psjob.worker.link import ShardLink
    from psjob.worker.session import WorkerSession

REST_SECONDS = 0.01
"""So long a link's thread leaves its stream to the script after the last answer. What else comes meanwhile is read so much later."""
MOST_BYTES = 512 << 10
"""Of a model. The answers of a larger one begin to come while its last pushes are sent: two threads do both at once."""
LISTEN_SECONDS = 0.5
SLICE_SECONDS = 0.05


class Turn:
    """Of one stream."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        """What the script's thread met as it read; for the link's."""
        self._reading = threading.Lock()
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._rests = False

    # -- the link's thread -----------------------------------------------------------------------

    def take(self) -> None:
        """Wait until the script does not read. Raises what it met; the turn is this thread's then too."""
        while not self._reading.acquire(blocking=False):
            self._sleep()
        if self.failure is not None:
            raise self.failure

    def give(self) -> None:
        """Read no more."""
        self._reading.release()

    def rest(self) -> None:
        """Leave the stream to the script until it calls, or for REST_SECONDS. Raises as `take`."""
        self._reading.release()
        self._sleep()
        self.take()

    def _sleep(self) -> None:
        self._rests = True
        with contextlib.suppress(queue.Empty):
            self._calls.get(timeout=REST_SECONDS)
        self._rests = False

    # -- the script's ------------------------------------------------------------------------------

    def borrow(self) -> bool:
        """Read from here on, if the link's thread does not; `give` ends it."""
        return self._reading.acquire(blocking=False)

    def call(self) -> None:
        """The script waits, and does not read by itself."""
        if self._rests:
            self._rests = False
            self._calls.put(None)


def listen(session: WorkerSession) -> None:
    """Read the answers that are owed, in the script's thread, where every link that owes some leaves its stream to it.

    Returns once they are here, or after LISTEN_SECONDS, or where a stream ends: the caller waits for what is missing then.
    """
    owing = [link for link in session.links if link.outstanding]
    lanes: list[tuple[ShardLink, WorkerLane]] = []
    began = time.monotonic()
    try:
        for link in owing:
            lane = link.main
            if lane is None or not lane.turn.borrow():
                return
            lanes.append((link, lane))
        _read(session, lanes)
    finally:
        for _, lane in lanes:
            lane.turn.give()
        session.idle.waited += time.monotonic() - began


def _read(session: WorkerSession, lanes: list[tuple[ShardLink, WorkerLane]]) -> None:
    deadline = time.monotonic() + LISTEN_SECONDS
    poll = select.poll()
    found = {}
    for link, lane in lanes:
        fd = lane.stream.sock.fileno()
        if lane.turn.failure is not None or fd < 0:
            return
        poll.register(fd, select.POLLIN)
        found[fd] = link, lane
    while any(link.outstanding for link, _ in lanes) and session.machine.ending is None and time.monotonic() < deadline:
        ready = [pair for pair in lanes if pair[1].stream.ahead()] or [found[fd] for fd, _ in poll.poll(1000 * SLICE_SECONDS)]
        for link, lane in ready:
            try:
                link.take(lane)
            except (StreamClosed, TimeoutError, WireError) as error:
                lane.turn.failure = error
                return
            except BaseException:  # an interrupted script: the rest of a frame is no frame
                lane.turn.failure = StreamClosed(f"{lane.stream.peer}: the script was interrupted while it read")
                raise
