"""Resume records of a worker in pieces: taken together for the coordinator, and given back."""

from __future__ import annotations

import threading
import zlib
from typing import TYPE_CHECKING

from psjob.protocol.recorddelta import RecordDelta, RecordsOnStream
from psjob.protocol.records import PIECE, RecordId, RecordIn
from psjob.wire.event_loop import Sending
from psjob.wire.frame import MAX_RECORD, Header, Kind, WireError
from psjob.wire.reading import Wants

if TYPE_CHECKING:
    from psjob.shard.session import Session


class RecordsHere:
    """Records by rank, as far as they have come. They outlive the streams that bring them, so that a break does not begin one anew."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_rank: dict[int, RecordIn] = {}

    def take(self, rank: int, record: RecordId, offset: int, data: bytes | bytearray) -> tuple[int, bytes | None]:
        """A piece came: how much of its record is here, and the record where `RecordIn.take` gives it."""
        with self._lock:
            here = self._by_rank.setdefault(rank, RecordIn())
            whole = here.take(record, offset, data)
            return here.count, whole


class RecordFrames:
    """The record frames of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._stream = RecordsOnStream()

    def whole(self, header: Header) -> Wants[None]:
        """A RECORD of the worker. Raises WireError."""
        record = bytes((yield from self._session.stream.body(header)))  # above PIECE a worker sends it in pieces
        self._stream.last = record if len(record) <= PIECE else None
        self._session.to_coordinator(header, {}, record)

    def delta(self, header: Header) -> Wants[None]:
        """A RECORD_DELTA of the worker. Raises WireError where it does not go with the record before."""
        session, (crc, size) = self._session, header.version
        data = bytes((yield from session.stream.body(header, PIECE)))
        if size > PIECE:
            raise WireError(f"a record of {size} bytes in one frame; above {PIECE} it comes in pieces")
        try:
            record = self._stream.take(RecordDelta(header.part, crc, size, data))
        except ValueError as error:
            raise WireError(f"worker {session.rank}: {error}") from None
        session.to_coordinator(header._replace(kind=Kind.RECORD, part=header.generation), {}, record)

    def piece(self, header: Header) -> Wants[None]:
        """A RECORD_PIECE of the worker. Raises WireError where it is none that a coordinator takes."""
        session, record = self._session, RecordId(header.clock, *header.version)
        if session.server.coordinator is None or not 0 < record.size <= MAX_RECORD:
            raise WireError(f"a piece of a record of {record.size} bytes; shard 0 takes records of 1 to {MAX_RECORD}")
        body = yield from session.stream.body(header, PIECE)
        count, whole = session.server.records.take(session.rank, record, header.part, body)
        if whole is not None:
            session.to_coordinator(header._replace(kind=Kind.RECORD, part=header.generation), {}, whole)
        session.tell(Kind.RECORD_HAS, clock=record.clock, version=header.version, part=count)

    def give_back(self, header: Header, blob: bytes) -> None:
        """Send a record in pieces, other frames between them, from where the worker's hello says that it has it."""
        session, stream, view = self._session, self._session.stream, memoryview(blob)
        record = RecordId(header.clock, zlib.crc32(blob), len(blob))
        has = session.hello.get("has")
        began = has[3] if isinstance(has, list) and len(has) == 4 and has[:3] == list(record) and type(has[3]) is int else 0

        def send(at: int) -> Sending:
            data = view[at : at + PIECE]
            head = header._replace(kind=Kind.RECORD_PIECE, part=at, version=(record.crc, record.size))
            if at + PIECE < len(view):
                stream.put(lambda: send(at + PIECE))
            return Sending(stream.framed(head, data))

        stream.put(lambda: send(min(max(0, began), len(blob))))
