"""Memory that two workers of neighbouring stages lend each other for one stream: payloads lie there, the stream carries where.

Each side writes into a region of its own and reads the other's. The reader copies a payload at once and says so; only then are its
bytes written again. A payload that is given again, on another stream, is copied again, into the memory of that stream.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from psjob.wire import handover
from psjob.wire.frame import Flag, Header, WireError, dump
from psjob.wire.handover import Counter
from psjob.wire.pooled import Pooled, Sending
from psjob.wire.reading import StreamClosed
from psjob.wire.ring import Ring
from psjob.wire.shared import Region, copy_in
from psjob.wire.tcp import Stream
from psjob.wire.words import one_line

BYTES: Final = 64 << 20
"""That each side lends. Only pages that hold a payload at some time take memory. What finds no room goes over the stream."""
LEAST: Final = 256 << 10
"""A payload below this many bytes goes over the stream."""
MOST_OFFER: Final = 4096
"""Bytes of an offer's body."""
log = logging.getLogger("psjob.worker")


class Lending:
    """What one side lends for one stream. Raises OSError where the system has no such memory."""

    def __init__(self) -> None:
        self.region = Region.lend(BYTES)
        self.ring = Ring(BYTES)
        self._lock = threading.Lock()

    def place(self, parts: Sequence[memoryview], size: int) -> int | None:
        """Copy a payload of `size` bytes to where the neighbour reads it; its offset. None: there is no room."""
        with self._lock:
            offset = self.ring.take(size)
        if offset is not None:
            copy_in(parts, self.region.buffer(offset, size))
        return offset

    def copied(self, offset: int) -> None:
        """The neighbour has copied what lies at `offset`. Raises WireError where nothing lies there."""
        with self._lock:
            self.ring.copied(offset)


class StageSharing:
    """Of a worker of a stage, with all its neighbours. `lends`: may it lend memory to those of its host?"""

    def __init__(self, rank: int, lends: bool) -> None:
        self._rank, self._lends = rank, lends
        self.placed = 0
        """Payloads that went through lent memory."""
        self._lock = threading.Lock()
        self._counter: Counter | None = None
        self._offered: dict[Stream, str] = {}
        """By stream that is open, the token that its dialler may come with."""
        self._lent: dict[Stream, Lending] = {}
        self._barred: set[int] = set()
        """Neighbours whose memory could not be had once."""

    def open(self) -> None:
        """Wait for neighbours that come for memory."""
        if self._lends:
            self._counter = Counter(f"worker-{self._rank}-lends")

    def offer(self, stream: Stream, header: Header, rank: int) -> None:
        """Offer memory to a neighbour of this host that has dialled, in a frame with this header."""
        counter = self._counter
        if counter is None or stream.apart or not isinstance(stream, Pooled):
            return

        def give(fd: int) -> Region:
            region, lending = Region.borrow(fd, BYTES), Lending()
            with self._lock:
                if stream not in self._offered:
                    raise WireError(f"the stream of worker {rank} has ended meanwhile")
                self._lend(stream, rank, lending, region)
            return lending.region

        token = counter.expect(give)
        with self._lock:
            self._offered[stream] = token
        stream.put_frame(header, dump({"name": counter.address, "token": token}))

    def take(self, stream: Stream, rank: int, offer: Mapping[str, Any]) -> None:
        """A neighbour that this worker has dialled offers memory: come for it.

        Raises:
            StreamClosed: it cannot be had. On the next stream it is left alone: this side may not have it, and the other one use it.
            WireError: the offer is not in shape, or a second one.
        """
        name, token = offer.get("name"), offer.get("token")
        shaped = isinstance(name, str) and isinstance(token, str) and (name + token).isascii() and "\0" not in name
        if not shaped or stream in self._lent or isinstance(stream, Pooled):
            raise WireError(f"worker {rank} offers memory at {str(name)[:40]!r}, expected one offer to the one that dialled")
        if not self._lends or stream.apart or rank in self._barred:
            return
        try:
            lending = Lending()
            region = Region.borrow(handover.fetch(str(name), str(token), lending.region.fd), BYTES)
        except (OSError, WireError) as error:
            self._barred.add(rank)
            log.warning("worker %d: its memory is out of reach: %s", rank, one_line(error, 200))
            raise StreamClosed(f"worker {rank}: its memory is out of reach") from error
        with self._lock:
            self._lend(stream, rank, lending, region)

    def send(self, stream: Stream, header: Header, parts: Sequence[memoryview]) -> bool:
        """Send a payload, whose head has `part` bytes, by where it lies. False: its bytes have to be sent. Raises StreamClosed."""
        size, lending = sum(map(len, parts)), self._lent.get(stream)
        if lending is None or size < LEAST or (offset := lending.place(parts, size)) is None:
            return False
        with self._lock:
            self.placed += 1
        told = header._replace(request=header.part).lent(offset, size)
        if isinstance(stream, Pooled):
            sending = Sending([told])
            stream.put(lambda: sending)
        else:
            stream.write(told)
        return True

    def copied(self, stream: Stream, offset: int) -> None:
        """The neighbour has copied what lay at `offset`. Raises WireError where nothing does."""
        lending = self._lent.get(stream)
        if lending is None:
            raise WireError("COPIED on a stream for which no memory is lent")
        lending.copied(offset)

    def drop(self, stream: Stream) -> None:
        """The stream has ended; nobody reads of it any more."""
        with self._lock:
            token = self._offered.pop(stream, None)
            self._lent.pop(stream, None)
            stream.borrowed = None
        if token is not None and (counter := self._counter) is not None:
            counter.forget(token)

    @property
    def open_streams(self) -> int:
        """Streams for which memory is lent now."""
        return len(self._lent)

    def close(self) -> None:
        """No neighbour is waited for any more."""
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.close()

    def forget(self) -> None:
        """In a forked process: close the copies."""
        if self._counter is not None:
            self._counter.close_copy()

    def _lend(self, stream: Stream, rank: int, lending: Lending, region: Region) -> None:
        stream.borrowed, self._lent[stream] = region, lending
        log.info("payloads of %d bytes and more from and to worker %d go over shared memory", LEAST, rank)


def head_of(header: Header) -> int:
    """Bytes of a payload's head."""
    return header.request if header.flags & Flag.LENT else header.part
