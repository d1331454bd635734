"""The frame: one fixed header, then raw bytes.

Every field is checked before a byte of payload is read or allocated. What a longer header adds is skipped, so that a
later version may grow it. Control bodies are JSON: at most `MAX_JSON` bytes a frame, a longer one as several frames with
`Flag.MORE`. Tensor bodies are raw little-endian arrays whose exact size the receiver knows from the registered table.

Sizes of the frames that carry a table's rows, the same for those who send and those who check.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zlib
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, Final, NamedTuple

from psjob.contract import WIRE

MAGIC: Final = b"PSJ1"
VERSION: Final = WIRE
MAX_JSON: Final = 1 << 20
"""Largest control body of one frame, bytes."""
MAX_BODY: Final = 64 << 20
"""Largest control body of several frames, bytes."""
MAX_VALUES: Final = 4 << 20
"""Most values of a control body: each becomes an object of many more bytes than were sent."""
MAX_LEVELS: Final = 32
"""How deep lists and objects of a control body may be nested."""
MAX_RECORD: Final = 256 << 20
"""Largest resume record on the wire, bytes."""
IDLE_PARTS: Final = 10_000
"""Of a worker's time: what a RECORD tells waiting in."""

HELD_SECONDS: Final = 1e-6
UPDATED_SECONDS: Final = 1e-5
MOST_HELD: Final = (1 << 32) - 1
MOST_UPDATED: Final = (1 << 16) - 1

# magic, version, header length, type, codec, flags, run, term, attempt, worker, start, rewinds, clock, request, generation,
# table, info, block, part offset, version (attempt, n), length, payload crc, room for a seal; then the crc of all of these, which a
# sealed header does not have.
_BODY: Final = struct.Struct("<4sHHBBH16sIIiIIqIIHHIQIQQI16s")
_CRC: Final = struct.Struct("<I")
HEADER_BYTES: Final = _BODY.size + _CRC.size
TAG_BYTES: Final = 16
COVERED: Final = _BODY.size - TAG_BYTES
"""Bytes of a header that its seal covers (`psjob.wire.auth`)."""
TAG: Final = slice(COVERED, COVERED + TAG_BYTES)
"""Where the seal lies."""
MAX_HEADER: Final = 512


class Kind(IntEnum):
    """Frame types. Numbers never change their meaning."""

    HELLO = 1
    WELCOME = 2
    WAITING = 3
    ERROR = 4
    INIT = 5
    PUSH = 6
    PARAM = 7
    """A block, as the answer to a PUSH or PULL. That waited `generation` HELD_SECONDS for other workers, and `table` UPDATED_SECONDS for
    its update; the largest number of either stands for all above."""
    PULL = 8
    RECORD = 9
    """A resume record. Of its last `part` milliseconds the worker's script has waited `request` IDLE_PARTS; `part` 0: not known."""
    MARK = 10
    RELEASE = 11
    LEAVE = 12
    LEFT = 13
    FINISHED = 14
    REWIND = 15
    REPORT = 16
    CHECKPOINT = 17
    PEER = 18
    INFO = 19
    STOP = 20
    STOPPED = 21
    STATE = 22
    EARLY = 23
    """A gradient before its step: kept for its stream under `request`, and nothing else, until a HELD push names it."""
    CODEC = 24
    RECORD_PIECE = 25
    """`length` bytes at `part` of a resume record whose crc32 and size are `version`; none: only the question how much of it came.

    To the coordinator `generation` and `request` are what `part` and `request` are of a RECORD."""
    RECORD_HAS = 26
    """`part` bytes of the record of `clock` and `version`, as in RECORD_PIECE, have come."""
    HEARTBEAT = 27
    """The worker's script has made a step that pushes nothing: an inner one of mode local, or one that its record makes it make again.

    `passes`: so many passes over its data it has run through again on its way to its place."""
    HUNG = 28
    """To a worker: others have waited too long for its step; it writes down where it stands, and ends."""
    RECORD_DELTA = 29
    """To the coordinator: a resume record as what it changes of the one that this stream brought before, by RECORD or RECORD_DELTA.

    The payload stands between the first `part` bytes of that one and its end; crc32 and size of the record are `version`, and the other
    fields are as in RECORD_PIECE."""
    INPUTS = 30
    """To the coordinator, of a script that makes steps without `ps.shard`: a crc32 of what each of its first steps was made of."""
    NEIGHBOUR = 31
    """To a worker of a stage: a worker that it shares micro-batches with, where it listens, and the key of their link."""
    STEP_LOST = 32
    """To the coordinator: a worker of another stage was lost with what this one needs of its step."""
    MEASURED = 33
    """To the coordinator, at step `clock`: where the time of the last `steps` went, in seconds by part. Of a worker of a stage also: the
    part of its time in which it waits, for whom, and its memory."""
    DIGEST = 34
    """To the coordinator: sums over what a worker's weights are after a step, which are to be those of the others."""
    LOOKUP = 40
    """Ids of a table (raw int64, ascending) whose rows are wanted at `version` or later; none: only the word that it is reached."""
    ROWS = 41
    """The rows of a LOOKUP (raw float32, in its order), or nothing: a ROW_PUSH has been applied."""
    ROW_PUSH = 42
    """A clock's gradients of a table's rows on one shard: ids as in LOOKUP, then one row of float32 for each."""
    ROW_INIT = 43
    """First values of rows, laid out as in ROW_PUSH; the last frame of a table has Flag.STORE."""
    ROW_IDS = 44
    """Which rows of a table are there: asked with the id (raw int64) above which they are wanted, or with none for the first ones.

    The answer has ids (raw int64, ascending), at most `ID_PAGE`; fewer are the last ones."""
    STANDS = 50
    """Between workers of neighbouring stages: the sender is at step `clock`, and needs nothing of steps before. It joined at `part`.

    With Flag.ABSENT its script has ended after that many steps."""
    ACTIVATION = 51
    """What a stage gives the next one of micro-batch `block` of step `clock`: `part` bytes of head, then tensors (layout/structures)."""
    GRADIENT = 52
    """Gradients of an ACTIVATION, and of parameters that earlier stages have too; laid out as that is.

    With Flag.LENT, of both: head and tensors lie at `part` of lent memory, and `request` of their bytes are the head."""
    LENDS = 53
    """Of two neighbours, to the one that dialled: the local socket, and a token, by which they hand each other memory for this stream."""
    COPIED = 54
    """What lay at `part` of the memory that the receiver of this lends has been copied, and is not read again."""


class Flag:
    """What a frame says beside its type: bits of a plain number, since the operators of an IntFlag take a microsecond each."""

    NONE: Final = 0
    ABSENT: Final = 1
    """A push without a gradient: this rank has no batch at this clock."""
    SKIP: Final = 2
    """The gradient held inf or nan under a GradScaler: the step is skipped for all."""
    STORE: Final = 4
    """Worker-side update. Of a push: the payload replaces the weights. Of a reply at a snapshot: this worker is to store its weights."""
    HELD: Final = 16
    """Of a push without payload: its gradient is the early data whose number is in `part`."""
    BEFORE: Final = HELD
    """Of a PULL: the weights of one update ago are wanted."""
    SNAPSHOT: Final = 8
    """The reply's version is the step of a snapshot: send the resume record for it."""
    LENT: Final = 32
    """The payload does not follow: it lies in memory that its sender lends, at `part`. Of a request also: so may its answer."""
    PLACE: Final = 64
    """Of a LOOKUP: the rows may be put into the memory that the shard lends for them, at `part`."""
    MORE: Final = 128
    """Of a control body: the next frame of this stream has the same type, and continues with the body."""


_STRINGS: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_AS_LISTS: Final = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_KINDS: Final = {int(kind): kind for kind in Kind}
ROW_KINDS: Final = (Kind.LOOKUP, Kind.ROW_PUSH, Kind.ROW_INIT, Kind.ROW_IDS)
"""What a worker sends of rows."""


class WireError(Exception):
    """The peer broke the protocol; the stream must be closed. The text names what was read and what was expected."""


class Header(NamedTuple):
    """One frame's header. `worker` is a rank, or -1 - index for a shard. `length` counts payload bytes."""

    kind: Kind
    flags: int = Flag.NONE
    run: bytes = b"\0" * 16
    term: int = 0
    attempt: int = 0
    worker: int = 0
    start: int = 0
    rewinds: int = 0
    clock: int = 0
    request: int = 0
    generation: int = 0
    table: int = 0
    info: int = 0
    """Version of the hyperparameters this push was made with, counted by its worker."""
    block: int = 0
    part: int = 0
    version: tuple[int, int] = (0, 0)
    """(attempt, n): of a push the version its gradient was computed on, of a reply the one served."""
    codec: int = 0
    """What the payload is written in (psjob.codecs), 0: the block's own bytes. Refused where hello did not agree on it."""
    length: int = 0
    crc: int = 0
    """crc32 of the payload, 0 where it was not summed."""

    def pack(self) -> bytes:
        body = _BODY.pack(
            MAGIC, VERSION, HEADER_BYTES, self.kind, self.codec, self.flags, self.run, self.term, self.attempt, self.worker,
            self.start, self.rewinds, self.clock, self.request, self.generation, self.table, self.info, self.block, self.part,
            self.version[0], self.version[1], self.length, self.crc, b"\0" * 16,
        )  # fmt: skip
        return body + _CRC.pack(zlib.crc32(body))

    def sized(self, payload: bytes | memoryview, sums: bool = True) -> Header:
        """This header with the length of `payload` and, if `sums`, its crc."""
        return self._replace(length=len(payload), crc=zlib.crc32(payload) if sums and len(payload) else 0)

    def lent(self, offset: int, length: int) -> Header:
        """This header for a payload that does not follow, but lies in the memory that its sender lends."""
        return self._replace(flags=self.flags | Flag.LENT, part=offset, length=length)


def parse(raw: bytes | memoryview, sealed: bool = False) -> Header:
    """The header in the first `HEADER_BYTES` of `raw`. `sealed`: it has a seal and no crc, and the caller checks it.

    Raises:
        WireError: not a psjob frame, another version, a damaged header, an unknown type, or a codec where none can be.
    """
    if len(raw) < HEADER_BYTES:
        raise WireError(f"frame header is cut: {len(raw)} bytes, expected {HEADER_BYTES}")
    (magic, version, size, kind, codec, flags, run, term, attempt, worker, start, rewinds, clock, request, generation, table, info, block,
     part, vattempt, vn, length, crc, _reserved) = _BODY.unpack_from(raw)  # fmt: skip
    if magic != MAGIC:
        raise WireError(f"not a psjob peer: the first bytes are {bytes(raw[:4])!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise WireError(f"protocol version {version}, this side speaks {VERSION}; run the same psjob version on both sides")
    if not sealed and _CRC.unpack_from(raw, _BODY.size)[0] != zlib.crc32(raw[: _BODY.size]):
        raise WireError("frame header is damaged: its checksum does not match")
    if not HEADER_BYTES <= size <= MAX_HEADER:
        raise WireError(f"header length {size} is outside {HEADER_BYTES}..{MAX_HEADER}")
    if codec and kind not in (Kind.PUSH, Kind.EARLY, Kind.PARAM):
        raise WireError(f"codec {codec} on a frame of type {kind}; only gradients and weights are encoded")
    try:
        return Header(
            _KINDS[kind], flags & 0xFF, run, term, attempt, worker, start, rewinds, clock, request, generation, table, info, block, part,
            (vattempt, vn), codec, length, crc,
        )  # fmt: skip
    except KeyError:
        raise WireError(f"unknown frame type {kind}") from None


def extra_header_bytes(raw: bytes | memoryview) -> int:
    """How many header bytes follow that this version does not know."""
    size: int = struct.unpack_from("<H", raw, 6)[0]
    return size - HEADER_BYTES


def run_digest(run: str) -> bytes:
    """The 16 bytes that stand for a run in every header."""
    return hashlib.blake2b(run.encode(), digest_size=16).digest()


def dump(body: Any) -> bytes:
    """A control body. Raises WireError above `MAX_BODY`: the caller sends too much, not the peer."""
    raw = json.dumps(body, separators=(",", ":")).encode()
    if len(raw) > MAX_BODY:
        raise WireError(f"control message of {len(raw)} bytes is above the limit of {MAX_BODY}")
    return raw


def frames(header: Header, raw: bytes) -> Iterator[tuple[Header, memoryview]]:
    """The frames that carry a control body: one up to `MAX_JSON`, else as many as it takes. They continuee right after the other."""
    view = memoryview(raw)
    for at in range(0, len(raw) or 1, MAX_JSON):
        more = Flag.MORE if at + MAX_JSON < len(raw) else Flag.NONE
        yield header._replace(flags=header.flags | more), view[at : at + MAX_JSON]


def continues(before: Header, header: Header, so_far: int, most: int = MAX_BODY) -> None:
    """Check that the frame `header` continues with a body of which `so_far` bytes came, the last of them by `before`. Raises WireError."""
    if header.kind is not before.kind:
        raise WireError(f"a body of {before.kind.name} in several frames was broken off by {header.kind.name}")
    if before.length != MAX_JSON:
        raise WireError(f"{before.kind.name} of {before.length} bytes says that more follows; such a frame has {MAX_JSON}")
    if so_far + header.length > most:
        raise WireError(f"{before.kind.name} of at least {so_far + header.length} bytes is above the limit of {most}")


def load(raw: bytes | bytearray | memoryview, most: int = MAX_VALUES) -> dict[str, Any]:
    """The JSON object of a control body. Raises WireError when it is none, or has more than `most` values."""
    raw = bytes(raw)
    if len(raw) > most and _values(raw) > most and _values(_STRINGS.sub(b"", raw)) > most:
        raise WireError(f"control body of {len(raw)} bytes has more than {most} values")
    try:
        body = json.loads(raw) if raw else {}
    except (ValueError, RecursionError) as error:
        raise WireError(f"control body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise WireError(f"control body is a {type(body).__name__}, expected an object")
    if raw.count(b"[") + raw.count(b"{") > MAX_LEVELS and _deep(raw):
        raise WireError(f"control body is nested deeper than {MAX_LEVELS} levels")
    return body


def _values(raw: bytes) -> int:
    return sum(map(raw.count, (b",", b"[", b"{")))


def _deep(raw: bytes) -> bool:
    """Is something in this JSON nested deeper than MAX_LEVELS? Whoever reads, compares or prints it would run out of stack.

    Its brackets say it: each turn takes the innermost ones away. That takes milliseconds a MiB, where a look at each list takes many.
    """
    brackets = _STRINGS.sub(b"", raw).translate(_AS_LISTS, _NO_BRACKETS)
    for _ in range(MAX_LEVELS):
        brackets = brackets.replace(b"[]", b"")
        if not brackets:
            return False
    return True


ID_BYTES: Final = 8
LOOKUP_BYTES: Final = 4 << 20
"""A lookup asks for at most so many bytes of rows; a larger one is several."""
MAX_PUSH_BYTES: Final = 1 << 30
"""A clock's rows of one table and shard, ids and gradients."""
ID_PAGE: Final = LOOKUP_BYTES // ID_BYTES
"""Ids that one ROW_IDS answers with, at most."""
LOOKUPS: Final = 12
"""Lookups on their way between a worker and one shard."""
LENT_ANSWERS: Final = LOOKUPS * LOOKUP_BYTES
"""Memory that a shard lends to a worker of its host for rows, a place for each lookup."""
LENT_PUSHES: Final = 1 << 30
"""Memory that a worker lends for what it pushes in a clock, to all shards. Like the other it costs what is touched of it."""
ROWS_ALIGNED: Final = 64
"""What is lent begins at a multiple of so many bytes."""


def row_bytes(dim: int) -> int:
    """One row in a ROW_PUSH or ROW_INIT: its id and `dim` elements of 4 bytes."""
    return ID_BYTES + 4 * dim


def lookup_limit(dim: int) -> int:
    """How many ids one LOOKUP may have, which is also how many rows of first values a ROW_INIT has."""
    return max(1, LOOKUP_BYTES // (4 * dim))


def push_limit(dim: int) -> int:
    """How many rows one ROW_PUSH may have."""
    return max(1, MAX_PUSH_BYTES // row_bytes(dim))
