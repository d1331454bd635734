"""The handshake of a stream and the seals after it: who has the key gets in, and no byte that was said can be changed."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psjob.contract import keys
from psjob.wire import auth
from psjob.wire.auth import Peer, Seal, ShardIdentity, Unproven
from psjob.wire.frame import HEADER_BYTES, Header, Kind, WireError, parse, run_digest

RUN = run_digest("run-1")
WORKERS, SHARDS = b"w" * 32, b"s" * 32
WORKER = Peer("worker", 3, 2)
KEY = keys.worker(WORKERS, 3, 2)
STANDING = ShardIdentity(1, 4, 9)


def said(key: bytes = KEY, peer: Peer = WORKER) -> tuple[bytes, bytes]:
    """A greeting and the challenge to it."""
    greeting = auth.greeting(peer, RUN, os.urandom(32))
    return greeting, auth.challenge(key, greeting, STANDING, os.urandom(32))


def test_who_has_the_key_is_known_and_hears_who_answers() -> None:
    greeting, challenge = said()
    assert auth.read_greeting(greeting) == (WORKER, RUN)
    assert auth.read_challenge(KEY, greeting, challenge, 1) == STANDING
    auth.check_proof(KEY, greeting + challenge, auth.proof(KEY, greeting + challenge))


OTHERS = {
    "another rank": keys.worker(WORKERS, 4, 2),
    "another start": keys.worker(WORKERS, 3, 1),
    "a later start": keys.worker(WORKERS, 3, 3),
    "another run": keys.worker(b"x" * 32, 3, 2),
    "a shard of that number": keys.shard(SHARDS, 3, 2),
    "a shard from the workers' key": keys.shard(WORKERS, 3, 2),
    "the key that it comes from": WORKERS,
    "no key": b"",
    "zeros": bytes(32),
}


@pytest.mark.parametrize("key", OTHERS.values(), ids=OTHERS)
def test_any_other_key_proves_nothing_to_either_side(key: bytes) -> None:
    greeting, challenge = said()
    with pytest.raises(Unproven):
        auth.check_proof(KEY, greeting + challenge, auth.proof(key, greeting + challenge))
    with pytest.raises(Unproven):
        auth.read_challenge(KEY, greeting, auth.challenge(key, greeting, STANDING, os.urandom(32)), 1)


def test_what_one_side_said_does_not_serve_the_other() -> None:
    """A stranger that sends a proof back to who made it, or plays an old one, has proven nothing."""
    greeting, challenge = said()
    again, other = said()
    for proof in (challenge[-auth.PROOF_BYTES :], auth.proof(KEY, again + other), auth.proof(KEY, greeting + other)):
        with pytest.raises(Unproven):
            auth.check_proof(KEY, greeting + challenge, proof)
    with pytest.raises(Unproven):
        auth.read_challenge(KEY, greeting, other, 1)
    with pytest.raises(Unproven, match="number 1 answers where number 0 was dialled"):
        auth.read_challenge(KEY, greeting, challenge, 0)


@given(st.integers(0, auth.GREETING_BYTES + auth.CHALLENGE_BYTES - 1), st.integers(1, 255))
def test_no_byte_of_what_was_said_can_be_changed(at: int, change: int) -> None:
    greeting, challenge = said()
    whole = bytearray(greeting + challenge)
    whole[at] ^= change
    theirs, answer = bytes(whole[: len(greeting)]), bytes(whole[len(greeting) :])
    with pytest.raises(WireError):
        auth.read_challenge(KEY, theirs, answer, 1)
        raise AssertionError("the dialler took it")
    with pytest.raises(Unproven):
        auth.check_proof(KEY, bytes(whole), auth.proof(KEY, greeting + challenge))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (bytes(auth.GREETING_BYTES), "not an authenticated psjob peer"),
        (Header(Kind.HELLO).pack()[: auth.GREETING_BYTES], "the first bytes are b'PSJ1'"),
        (b"PSJA\x01\x00" + bytes(auth.GREETING_BYTES - 6), "protocol version 1, this side speaks 2"),
        (b"PSJA\x02\x00\x07" + bytes(auth.GREETING_BYTES - 7), "role 7 is not known"),
    ],
)
def test_a_greeting_that_is_none_is_named(raw: bytes, words: str) -> None:
    with pytest.raises(WireError, match=words):
        auth.read_greeting(raw)


def pairs() -> tuple[Seal, Seal]:
    """Both ends of one direction."""
    transcript = b"".join(said())
    return auth.seals(KEY, transcript)[0], auth.seals(KEY, transcript)[0]


def test_headers_in_their_order_are_taken() -> None:
    mine, theirs = pairs()
    for clock in range(5):
        raw = mine.on(Header(Kind.PUSH, clock=clock).pack())
        theirs.check(raw)
        assert len(raw) == HEADER_BYTES and parse(raw, sealed=True) == Header(Kind.PUSH, clock=clock)


def changed(raw: bytes) -> bytes:
    return raw[:60] + bytes([raw[60] ^ 1]) + raw[61:]


WRONG: dict[str, Callable[[bytes, bytes], list[bytes]]] = {
    "left out": lambda first, second: [second],
    "sent twice": lambda first, second: [first, first],
    "in another order": lambda first, second: [second, first],
    "changed": lambda first, second: [changed(first)],
    "a stranger's": lambda first, second: [Header(Kind.PUSH).pack()],
    "of another seal": lambda first, second: [first[:-20] + second[-20:]],
}


@pytest.mark.parametrize("frames", WRONG.values(), ids=WRONG)
def test_a_header_that_is_not_the_next_one_is_refused(frames: Callable[[bytes, bytes], list[bytes]]) -> None:
    mine, theirs = pairs()
    first, second = (mine.on(Header(Kind.PUSH, clock=clock).pack()) for clock in range(2))
    with pytest.raises(WireError, match="seal does not fit"):
        for raw in frames(first, second):
            theirs.check(raw)


def test_each_direction_and_stream_has_seals_of_its_own() -> None:
    transcript, other = b"".join(said()), b"".join(said())
    raw = Header(Kind.PULL).pack()
    made = {seal.on(raw) for it in (transcript, other) for seal in auth.seals(KEY, it)}
    assert len(made) == 4
