"""TLS over memory: whatever the pieces, what is read is what was written, or nothing is."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psjob.process.config import Encryption, encryption
from psjob.wire.auth import TLS_PIECE, Tls, Unproven, pieces
from tests.runkeys import write_certificates

Ends = tuple[Encryption, Encryption]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """What shard 0 has, and what shard 1 has."""
    folder = tmp_path_factory.mktemp("run")
    write_certificates(folder, 2)
    return encryption("tls", folder / "ca.pem", folder / "shard-0.pem"), encryption("tls", folder / "ca.pem", folder / "shard-1.pem")


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
        piece, rest = pieces(rest)
        assert sum(map(len, piece)) == TLS_PIECE or not rest
        taken += b"".join(piece)
    assert taken == whole


def test_who_answers_must_be_the_shard_that_was_dialled(run: Ends, tmp_path: Path) -> None:
    with pytest.raises(Unproven, match=r"not that of shard-0: .*mismatch"):
        shaken(run[0].dials, run[1].accepts, "shard-0")
    write_certificates(tmp_path, 1)
    other = encryption("tls", tmp_path / "ca.pem", tmp_path / "shard-0.pem")
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
    dear = encryption("tls", tmp_path / "ca.pem", None)
    assert dear.dials is not None and run[0].accepts is not None
    dear.dials.set_ecdh_curve("secp521r1")
    with pytest.raises(Unproven, match=r"no TLS 1\.3"):
        Tls(run[0].accepts, None).shake(Tls(dear.dials, "shard-0").shake(b"")[0])
