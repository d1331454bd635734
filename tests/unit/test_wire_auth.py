"""The handshake of a stream and the seals after it: who has the key gets in, and no byte that was said can be changed.

- TLS over memory: whatever the pieces, what is read is what was written, or nothing is.

Places of streams that have proven nothing: bounded, and never all taken from somebody who comes from elsewhere.

- Streams that a process has begun, and that are not served yet.
- Lines of a shard's log on streams that it has refused.
"""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psjob.contract import keys
from psjob.process.config import Encryption, encryption_of
from psjob.shard.acceptor import MOST_LINES, QUIET_SECONDS, SPARE, Acceptor, LogRateLimiter
from psjob.shard.status_server import Nonces
from psjob.wire import auth
from psjob.wire.auth import TLS_PIECE, Peer, Seal, ShardIdentity, Tls, Unproven, first_piece
from psjob.wire.frame import HEADER_BYTES, Header, Kind, WireError, parse, run_digest
from psjob.wire.unauthenticated import UnauthenticatedPeers, network
from tests.support.runkeys import write_certificates

RUN = run_digest("run-1")
WORKERS, SHARDS = b"w" * 32, b"s" * 32
WORKER = Peer("worker", 3, 2)
KEY = keys.worker_key(WORKERS, 3, 2)
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
    "another rank": keys.worker_key(WORKERS, 4, 2),
    "another start": keys.worker_key(WORKERS, 3, 1),
    "a later start": keys.worker_key(WORKERS, 3, 3),
    "another run": keys.worker_key(b"x" * 32, 3, 2),
    "a shard of that number": keys.shard_key(SHARDS, 3, 2),
    "a shard from the workers' key": keys.shard_key(WORKERS, 3, 2),
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
        (b"PSJA\x01\x00" + bytes(auth.GREETING_BYTES - 6), "protocol version 1, this side speaks 3"),
        (b"PSJA\x03\x00\x07" + bytes(auth.GREETING_BYTES - 7), "role 7 is not known"),
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


Ends = tuple[Encryption, Encryption]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """What shard 0 has, and what shard 1 has."""
    folder = tmp_path_factory.mktemp("run")
    write_certificates(folder, 2)
    return encryption_of("tls", folder / "ca.pem", folder / "shard-0.pem"), encryption_of("tls", folder / "ca.pem", folder / "shard-1.pem")


def shaken(dials: ssl.SSLContext | None, accepts: ssl.SSLContext | None, name: str = "shard-0") -> tuple[Tls, Tls]:
    """The two ends after their handshake. Raises what either raises."""
    assert dials is not None and accepts is not None
    dialler, shard = Tls(dials, name), Tls(accepts, None)
    said, over = dialler.shake(b"")
    while not over:
        answer, _ = shard.shake(said)
        said, over = dialler.shake(answer)
    assert shard.shake(said) == (b"", True), "the dialler has the last word"
    return dialler, shard


def read(end: Tls, size: int) -> bytes:
    place = bytearray(size)
    return bytes(place[: end.read([memoryview(place)])])


@settings(max_examples=30)
@given(st.data(), st.lists(st.binary(max_size=40_000), max_size=4))
def test_what_was_written_is_read_in_pieces_of_any_size(run: Ends, data: st.DataObject, parts: list[bytes]) -> None:
    for writer, reader in (ends := shaken(run[0].dials, run[0].accepts), ends[::-1]):
        wire, came = writer.encrypt(parts), b""
        while wire:
            cut = data.draw(st.integers(1, len(wire)))
            reader.feed(memoryview(wire[:cut]))
            wire = wire[cut:]
            while got := read(reader, data.draw(st.integers(1, 50_000))):
                came += got
            assert not reader.behind
        assert came == b"".join(parts)


@settings(max_examples=40)
@given(st.integers(0, 2**20), st.integers(1, 255))
def test_a_changed_byte_is_never_read(run: Ends, at: int, by: int) -> None:
    writer, reader = shaken(run[0].dials, run[0].accepts)
    wire = bytearray(writer.encrypt([b"weights " * 100]))
    wire[at % len(wire)] ^= by
    reader.feed(memoryview(wire))
    try:
        assert read(reader, 1000) == b"", "a longer length: the rest of the record is waited for"
    except OSError:
        pass


@settings(max_examples=40)
@given(st.lists(st.integers(0, 3 * TLS_PIECE), max_size=5))
def test_pieces_are_all_of_the_parts_in_order(sizes: list[int]) -> None:
    rest: list[memoryview] = [memoryview(bytes([number]) * size) for number, size in enumerate(sizes)]
    whole, taken = b"".join(rest), b""
    while rest:
        piece, rest = first_piece(rest)
        assert sum(map(len, piece)) == TLS_PIECE or not rest
        taken += b"".join(piece)
    assert taken == whole


def test_who_answers_must_be_the_shard_that_was_dialled(run: Ends, tmp_path: Path) -> None:
    with pytest.raises(Unproven, match=r"not that of shard-0: .*mismatch"):
        shaken(run[0].dials, run[1].accepts, "shard-0")
    write_certificates(tmp_path, 1)
    other = encryption_of("tls", tmp_path / "ca.pem", tmp_path / "shard-0.pem")
    with pytest.raises(Unproven, match=r"not that of shard-0: .*signature failure|not that of shard-0: .*issuer"):
        shaken(run[0].dials, other.accepts)


def test_an_older_tls_is_refused(run: Ends) -> None:
    assert run[0].accepts is not None
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode, old.maximum_version = False, ssl.CERT_NONE, ssl.TLSVersion.TLSv1_2
    with pytest.raises(Unproven, match=r"no TLS 1\.3"):
        Tls(run[0].accepts, None).shake(Tls(old, "shard-0").shake(b"")[0])


@pytest.mark.parametrize(
    "raw", [b"PSJA" + bytes(60), b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\x16" * 200], ids=["psjob", "http", "zeros", "records"]
)
def test_what_is_no_tls_is_refused_in_a_sentence(run: Ends, raw: bytes) -> None:
    for context, name in ((run[0].accepts, None), (run[0].dials, "shard-0")):
        assert context is not None
        end = Tls(context, name)
        end.shake(b"")
        with pytest.raises(Unproven, match=r"no TLS 1\.3 with the process that is there"):
            end.shake(raw)


def test_a_shard_computes_in_one_cheap_group_alone(run: Ends, tmp_path: Path) -> None:
    """Others cost it up to 100 ms of a thread, before anything is proven."""
    write_certificates(tmp_path, 1)
    dear = encryption_of("tls", tmp_path / "ca.pem", None)
    assert dear.dials is not None and run[0].accepts is not None
    dear.dials.set_ecdh_curve("secp521r1")
    with pytest.raises(Unproven, match=r"no TLS 1\.3"):
        Tls(run[0].accepts, None).shake(Tls(dear.dials, "shard-0").shake(b"")[0])


def test_the_place_is_taken_from_the_oldest_of_the_host_that_has_most() -> None:
    places: UnauthenticatedPeers[int] = UnauthenticatedPeers(3)
    assert [places.add(one, host) for one, host in enumerate("aab")] == [None, None, None]
    assert places.add(3, "b") == 0, "a has most"
    assert places.add(4, "b") == 2, "now b has"
    assert places.drop(1) and not places.drop(1)
    assert places.add(5, "c") is None and len(places) == 3


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans())), st.integers(1, 5))
def test_there_are_never_more_than_places(steps: list[tuple[str, bool]], most: int) -> None:
    places: UnauthenticatedPeers[int] = UnauthenticatedPeers(most)
    there: list[int] = []
    for one, (host, comes) in enumerate(steps):
        if comes:
            victim = places.add(one, host)
            if victim is not None:
                there.remove(victim)
            there.append(one)
        elif there:
            assert places.drop(there.pop())
        assert len(places) == len(there) <= most
        assert sum(places._silent.counts.values()) == len(there)


def test_who_has_spoken_stays_while_a_thousand_hosts_say_nothing() -> None:
    places: UnauthenticatedPeers[int] = UnauthenticatedPeers(8)
    for one in range(4):
        places.add(one, "10.0.0.1")
        places.rename(one, one - 100)
    gone = [places.add(one, f"10.{one}.0.1") for one in range(200)]
    assert gone[:4] == [None] * 4 and gone[4:] == list(range(196))
    assert all(places.drop(one - 100) for one in range(4))


def test_where_all_have_spoken_the_place_is_taken_from_the_crowded_network() -> None:
    places: UnauthenticatedPeers[str] = UnauthenticatedPeers(4)
    for name, host in (("a", "10.0.0.1"), ("b", "10.1.0.1"), ("c", "10.1.0.2"), ("d", "10.1.0.3")):
        places.add(name, host)
        places.rename(name, name + "!")
    assert places.add("e", "10.2.0.1") == "b!" and places.add("f", "10.2.0.2") == "c!"


def test_first_words_of_one_network_leave_a_newcomer_its_place() -> None:
    places: UnauthenticatedPeers[int] = UnauthenticatedPeers(8)
    for one in range(100):
        places.add(one, f"10.0.0.{one}")
        places.rename(one, 1000 + one)
    places.add(-1, "10.1.0.1")
    for one in range(100, 200):
        assert places.add(one, f"10.0.0.{one}") not in (-1, None)
        places.rename(one, 1000 + one)
    assert places.drop(-1)


@pytest.mark.parametrize(
    ("host", "counted"),
    [
        ("127.1.2.3", "127.1.2.0/24"),
        ("::ffff:127.1.2.3", "127.1.2.0/24"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("a-name", "a-name"),
    ],
)
def test_hosts_are_counted_by_their_network(host: str, counted: str) -> None:
    assert network(host) == counted


def test_a_nonce_is_good_once_and_for_a_time() -> None:
    nonces = Nonces(10.0)
    first, second = nonces.make(100.0), nonces.make(100.0)
    assert first != second and first.isalnum(), "it goes into a header"
    assert nonces.spend(first, 110.0) and not nonces.spend(first, 105.0)
    assert not nonces.spend(second, 110.1)
    for strange in ("", "1.2.3", first[:-1] + "x", "9" + first, Nonces(10.0).make(100.0)):
        assert not nonces.spend(strange, 101.0)


def test_used_nonces_are_forgotten_when_they_are_too_old() -> None:
    nonces = Nonces(1.0)
    for second in range(100):
        assert nonces.spend(nonces.make(float(second)), float(second))
    assert len(nonces._used) <= 2


def test_each_stream_that_a_process_begins_too_many_closes_another() -> None:
    """Also before those that were closed have come to their ends."""
    acceptor = Acceptor.__new__(Acceptor)
    acceptor.here = cast(Any, SimpleNamespace(config=SimpleNamespace(streams=1)))
    acceptor._lock, acceptor._begun, acceptor._large = threading.Lock(), {}, {}
    peer, closed = Peer("worker", 0, 1), list[int]()
    beginnings = [acceptor._beginning(peer, cast(Any, Begun(partial(closed.append, at)))) for at in range(10)]
    for beginning in beginnings:
        beginning.__enter__()
    assert closed == list(range(10 - 1 - SPARE))
    for beginning in reversed(beginnings):
        beginning.__exit__(None, None, None)
    assert not acceptor._begun


class Begun:
    """A stream, as far as it is known here."""

    def __init__(self, close: Callable[[], None]) -> None:
        self.close = close


def test_a_host_has_one_line_a_minute() -> None:
    notices = LogRateLimiter()
    assert [notices.told("a", now) for now in (0.0, 1.0, QUIET_SECONDS - 0.1, QUIET_SECONDS)] == [0, None, None, 2]
    assert notices.told("b", QUIET_SECONDS) == 0


def test_all_hosts_together_have_a_bounded_number_of_lines() -> None:
    """Also where there are more of them than are remembered."""
    notices, lines = LogRateLimiter(), []
    for number in range(30_000):  # of 3,000 hosts, in three minutes
        now = number / 30_000 * 3 * QUIET_SECONDS
        if notices.told(f"host {number % 3000}", now) is not None:
            lines.append(now)
        assert len(notices._told) <= MOST_LINES
    for begin in lines:
        assert sum(begin <= line < begin + QUIET_SECONDS for line in lines) <= MOST_LINES
    assert len(lines) >= 2 * MOST_LINES


def test_what_had_no_line_is_told_by_its_number() -> None:
    notices = LogRateLimiter()
    said = [notices.told(f"host {number}", 0.0) for number in range(MOST_LINES + 7)]
    assert said == [0] * MOST_LINES + [None] * 7
    assert notices.told("another", QUIET_SECONDS) == 7
