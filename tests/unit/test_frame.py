"""The frame header: whole, checked, and never a reason to allocate."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psjob.wire.frame import (
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
