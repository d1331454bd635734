"""The frame header: whole, checked, and never a reason to allocate.

- Frames and handshakes as a stream reads them, changed in every way that a peer could: refused with a sentence, or read.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psjob.wire import auth
from psjob.wire.auth import Peer, Seal, ShardIdentity
from psjob.wire.frame import (
    COVERED,
    HEADER_BYTES,
    MAX_BODY,
    MAX_HEADER,
    MAX_JSON,
    MAX_VALUES,
    Flag,
    Header,
    Kind,
    WireError,
    continues,
    dump,
    frames,
    load,
    parse,
    run_digest,
)
from psjob.wire.reading import AHEAD, PIECE, ReadRequest, StreamClosed, StreamReading, Wants
from tests.support.fuzzing import EDGES, Change, JsonChange, byte_changes, changed_bytes, changed_json, counts, fuzz, json_changes, written


def test_a_header_comes_back_as_it_was() -> None:
    header = Header(
        Kind.PUSH, Flag.ABSENT | Flag.SKIP, run_digest("run"), 3, 2, -2, 4, 5, 1 << 40, 9, 1, 0, 6, 7, 8, (2, 1 << 33), 0, 12, 99
    )  # fmt: skip
    assert parse(header.pack()) == header
    assert len(header.pack()) == HEADER_BYTES


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_random_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(WireError):
        parse(raw)


@given(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_one_changed_byte_is_noticed(at: int, by: int) -> None:
    raw = bytearray(Header(Kind.HELLO, run=run_digest("run")).pack())
    raw[at] ^= by
    with pytest.raises(WireError):
        parse(raw)


def test_http_is_told_what_this_is() -> None:
    with pytest.raises(WireError, match="not a psjob peer"):
        parse(b"GET / HTTP/1.1\r\n".ljust(HEADER_BYTES, b" "))


@pytest.mark.parametrize(("field", "value", "words"), [("codec", 3, "codec 3"), ("kind", 250, "unknown frame type 250")])
def test_what_was_not_agreed_is_named(field: str, value: int, words: str) -> None:
    header = Header(Kind.HELLO)._replace(**{field: value})
    with pytest.raises(WireError, match=words):
        parse(header.pack())


def test_a_longer_header_is_known_by_its_length() -> None:
    raw = bytearray(Header(Kind.HELLO).pack())
    struct.pack_into("<H", raw, 6, MAX_HEADER + 1)
    with pytest.raises(WireError):
        parse(raw)


@pytest.mark.parametrize("raw", [b"[1]", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_control_body_is_an_object(raw: bytes) -> None:
    with pytest.raises(WireError):
        load(raw)


def test_a_control_body_has_a_limit() -> None:
    with pytest.raises(WireError, match="above the limit of 67108864"):
        dump({"x": "y" * MAX_BODY})


@pytest.mark.parametrize(("size", "count"), [(0, 1), (1, 1), (MAX_JSON, 1), (MAX_JSON + 1, 2), (3 * MAX_JSON, 3)])
def test_a_long_control_body_goes_as_several_frames(size: int, count: int) -> None:
    raw = bytes(size)
    made = list(frames(Header(Kind.HELLO, clock=3), raw))
    assert b"".join(piece for _, piece in made) == raw
    assert [bool(head.flags & Flag.MORE) for head, _ in made] == [True] * (count - 1) + [False]
    assert all(len(piece) <= MAX_JSON and head.clock == 3 for head, piece in made)
    assert all(parse(head.pack()) == head for head, _ in made)


def test_a_body_in_frames_is_of_one_kind_and_bounded() -> None:
    first = Header(Kind.HELLO, Flag.MORE, length=MAX_JSON)
    continues(first, Header(Kind.HELLO, length=MAX_JSON), MAX_BODY - MAX_JSON)
    with pytest.raises(WireError, match="above the limit"):
        continues(first, Header(Kind.HELLO, length=MAX_JSON), MAX_BODY - MAX_JSON + 1)
    with pytest.raises(WireError, match="broken off by PUSH"):
        continues(first, Header(Kind.PUSH), 5)
    with pytest.raises(WireError, match="of 0 bytes says that more follows"):
        continues(first._replace(length=0), Header(Kind.HELLO), 0)


def test_a_body_of_many_small_values_is_refused_before_it_is_read() -> None:
    with pytest.raises(WireError, match="more than 4194304 values"):
        load(b'{"x":[' + b"{}," * MAX_VALUES + b"{}]}")


KEY = b"k" * 32
MOST = 2 * (AHEAD + 2 * PIECE + MAX_HEADER + MAX_JSON) + (1 << 20)
"""Bytes of memory for one stream and the one before it: bodies are allocated PIECE by PIECE as they come, no case sends a MiB, and what is
skipped goes through a MiB."""
BODY = {"role": "worker", "fresh": True, "term": 1, "restore_id": 0, "codecs": ["bf16"], "table": [{"name": "w", "shape": [2], "group": 0}]}
KINDS = tuple(Kind)
FIELDS = tuple(name for name in Header._fields if name not in ("kind", "run", "version"))
Plan = tuple[Kind, list[tuple[str, int]], list[JsonChange] | None, list[Change] | None]
"""A frame: its type, changes of its header's fields, of its JSON and of its packed header."""


def plans(random: Random) -> list[Plan]:
    """Up to eight frames."""
    made = []
    for _ in range(random.randrange(1, 9)):
        fields = [(random.choice((*FIELDS, "length", "flags")), random.choice(EDGES)) for _ in range(random.choice((0, 1, 1, 2)))]
        in_json, in_bytes = random.random() < 0.4, random.random() < 0.3
        changes = json_changes(random) if in_json else None
        made.append((random.choice(KINDS), fields, changes, byte_changes(random) if in_bytes else None))
    return made


def packed(plan: Plan) -> tuple[bytes, bytes]:
    """(header, what follows it)."""
    kind, fields, changes, in_bytes = plan
    payload = dump(BODY) if changes is None else written(changed_json(BODY, changes))
    header = Header(kind, run=run_digest("run")).sized(payload)
    raw = Header.pack(header._replace(**dict(_fitting(fields))))
    return raw if in_bytes is None else changed_bytes(raw, in_bytes), payload


SIZES = {"flags": 8, "codec": 8, "table": 16, "info": 16, "part": 64, "request": 32, "length": 64, "worker": -32, "clock": -64}


def _fitting(fields: list[tuple[str, int]]) -> Iterator[tuple[str, Any]]:
    """Numbers as they fit into a header."""
    for name, value in fields:
        bits = SIZES.get(name, 32)
        yield name, value % (1 << bits) if bits > 0 else (value + (1 << -bits - 1)) % (1 << -bits) - (1 << -bits - 1)


class Once:
    """A socket from which so many bytes come, and then the end of the stream."""

    def __init__(self, raw: bytes) -> None:
        self._left = memoryview(raw)

    def getpeername(self) -> tuple[str, int]:
        return ("10.0.0.9", 1)

    def recvmsg_into(self, parts: list[memoryview], _: int, flags: int) -> tuple[int]:
        done = 0
        for part in parts:
            size = min(len(part), len(self._left))
            part[:size] = self._left[:size]
            self._left = self._left[size:]
            done += size
        return (done,)


def drive(wants: Wants[Any]) -> Any:
    """What a generator comes to, of bytes that are all there."""
    try:
        want = next(wants)
        while True:
            assert isinstance(want, ReadRequest)
            try:
                while not want.receive(0):
                    pass
            except StreamClosed as error:
                want = wants.throw(error)
            else:
                want = next(wants)
    except StopIteration as end:
        return end.value


def read_on(stream: StreamReading, heard: list[Header]) -> Wants[None]:
    """Each frame as a shard reads frames of its type, until the stream ends."""
    while True:
        header = yield from stream.next_header(None)
        heard.append(header)
        if header.kind in (Kind.PUSH, Kind.EARLY, Kind.ROW_PUSH):
            yield from stream.payload(header, [memoryview(bytearray(min(header.length, 256)))])
        elif header.kind in (Kind.RECORD, Kind.RECORD_PIECE, Kind.RECORD_DELTA):
            yield from stream.body(header, PIECE)
        elif header.kind in (Kind.LOOKUP, Kind.ROW_IDS):
            yield from stream.skip(header._replace(length=min(header.length, MAX_JSON)))
        elif header.kind is Kind.HELLO:
            yield from stream.hello(header)
        else:
            yield from stream.json(header)


@counts(1000, 900_000)
@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
def test_changed_frames_are_read_or_refused(cases: int, sealed: bool) -> None:
    """After a refusal the next frame comes on a stream of its own, as it must."""

    def read(made: list[Plan]) -> int:
        frames = [packed(plan) for plan in made]
        while frames:
            raw, seal = bytearray(), Seal(KEY)
            for head, payload in frames:
                raw += (seal.on(head) if sealed and len(head) >= COVERED else head) + payload
            stream = StreamReading(Once(bytes(raw)))  # type: ignore[arg-type]
            stream.opening = Seal(KEY) if sealed else None
            heard: list[Header] = []
            with pytest.raises((WireError, StreamClosed)):
                drive(read_on(stream, heard))
            frames = frames[max(1, len(heard)) :]
        return len(made)

    fuzz(cases // 2, plans, read, MOST)


PEER = Peer("worker", 3, 2)
STANDING = ShardIdentity(1, 4, 9)
GREETING = auth.greeting(PEER, run_digest("run"), bytes(32))
CHALLENGE = auth.challenge(KEY, GREETING, STANDING, bytes(32))


@counts(250, 100_000)
def test_changed_handshakes_prove_nothing(cases: int) -> None:
    """What each end reads of a stranger: a greeting, a challenge, a proof."""
    proof = auth.proof(KEY, GREETING + CHALLENGE)

    def read(changes: list[Change]) -> None:
        greeting = changed_bytes(GREETING, changes).ljust(auth.GREETING_BYTES, b"\0")[: auth.GREETING_BYTES]
        challenge = changed_bytes(CHALLENGE, changes).ljust(auth.CHALLENGE_BYTES, b"\0")[: auth.CHALLENGE_BYTES]
        said = changed_bytes(proof, changes).ljust(auth.PROOF_BYTES, b"\0")[: auth.PROOF_BYTES]
        with contextlib.suppress(WireError):
            auth.read_greeting(greeting)
        for right, changed in ((CHALLENGE, challenge), (proof, said)):
            with contextlib.nullcontext() if changed == right else pytest.raises(WireError):
                if right is CHALLENGE:
                    assert auth.read_challenge(KEY, GREETING, changed, 1) == STANDING
                else:
                    auth.check_proof(KEY, GREETING + CHALLENGE, changed)

    fuzz(cases, byte_changes, read, 1 << 20)
