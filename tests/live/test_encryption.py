"""Streams that are encrypted, over real sockets: bit-equal, closed to whoever dials without, and dark to whoever listens between."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psjob.process.config import Encryption, encryption_of
from psjob.wire import tcp
from psjob.wire.auth import TLS_PIECE, Unproven
from psjob.wire.handshake import STRANGER_SECONDS, greet
from psjob.wire.reading import STRANGER_BYTES
from psjob.wire.tcp import StreamClosed
from tests.live.live_shards import SECONDS, Shards, Worker, all_well, eventually, serving
from tests.support.relay import Relay, chunks
from tests.support.runkeys import write_certificates

pytestmark = pytest.mark.usefixtures("last_words")
STEPS = 6


def worker_of(shards: Shards, rank: int, size: int = 200) -> Worker:
    torch.manual_seed(7)
    model = nn.Linear(size, size)
    return Worker(shards, rank, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def train(worker: Worker, steps: int = STEPS) -> None:
    """The gradient is one of rank, step and weights: a push that is lost, doubled or damaged shows."""
    for step in range(steps):
        for p in worker.model.parameters():
            p.grad = torch.sin(p.detach() * (step + 1 + worker.rank))
        worker.optimizer.step()


def encrypted(worker: Worker) -> set[bool]:
    return {lane.stream.tls is not None for link in worker.session.links for lane in link.lanes}


class Listener(Relay):
    """Somebody on the network between the workers and shard 0: hears everything, and changes one byte if it is told to."""

    def __init__(self, port: int) -> None:
        self.heard = bytearray()
        self.changes = 0
        """Chunks in which a byte is still to be changed."""
        super().__init__(port, self._hear, self._hear)

    def _hear(self, source: socket.socket) -> Iterator[bytes]:
        for chunk in chunks(source):
            raw = bytearray(chunk)
            self.heard += raw
            if self.changes and len(raw) > 2000:
                self.changes -= 1
                raw[1500] ^= 1
            yield raw


@contextmanager
def between(shards: Shards) -> Iterator[Listener]:
    """From now on workers reach shard 0 through it."""
    first, *others = shards.config.shards
    relay = Listener(first.port)
    shards.config = replace(shards.config, shards=(replace(first, port=relay.port), *others))
    try:
        yield relay
    finally:
        relay.close()


def trained(folder: Path, changes: int = 0, **more: Any) -> tuple[list[torch.Tensor], Listener]:
    """Two workers train; the weights in the end, and who was between them and shard 0."""
    with serving(folder, workers=2, shards=2, transport="tcp", **more) as shards, between(shards) as relay:
        workers = [worker_of(shards, rank) for rank in range(2)]

        def work(worker: Worker) -> None:
            assert encrypted(worker) == {more.get("encryption") == "tls"}
            if worker.rank == 0:
                relay.changes = changes
            train(worker)

        all_well(workers, work)
        assert relay.changes == 0, "it had its chance"
        return [p.detach().clone() for p in workers[0].model.parameters()], relay


def test_an_encrypted_run_ends_bit_equal_and_who_listens_between_sees_no_weight(tmp_path: Path) -> None:
    plain, heard = trained(tmp_path / "plain", encryption="none")
    dark, unheard = trained(tmp_path / "tls", encryption="tls", streams=2)
    assert all(torch.equal(a, b) for a, b in zip(plain, dark, strict=True))
    rows = [p.reshape(-1)[at : at + 8].numpy().tobytes() for p in plain for at in range(0, p.numel() - 8, 200)]
    seen, dark_seen = bytes(heard.heard), bytes(unheard.heard)
    assert sum(row in seen for row in rows) > len(rows) // 4, "in clear text, of the half that lies on shard 0"
    assert not any(row in dark_seen for row in rows)
    assert len(dark_seen) < 1.2 * len(seen)


def test_a_byte_that_is_changed_on_the_way_costs_a_stream_and_no_bit(tmp_path: Path) -> None:
    quiet, _ = trained(tmp_path / "quiet", encryption="tls")
    struck, _ = trained(tmp_path / "struck", encryption="tls", changes=3)
    assert all(torch.equal(a, b) for a, b in zip(quiet, struck, strict=True))


def test_auto_encrypts_nothing_between_two_ends_of_one_host(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=1, encryption="auto") as shards:
        worker = worker_of(shards, 0)
        all_well([worker], lambda worker: None if encrypted(worker) == {False} else pytest.fail("it encrypts"))


def test_who_dials_without_is_told_and_learns_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=1, encryption="tls") as shards:
        plain = replace(shards.place(0), encryption=Encryption())
        (stream,) = tcp.connect(*shards.address(0), SECONDS)
        with pytest.raises(Unproven, match=r"streams to this process are encrypted \(training.encryption\), and this one is not"):
            greet(stream, plain, 0)
        stream.close()


def test_who_must_encrypt_does_not_go_on_without(tmp_path: Path) -> None:
    """Somebody who answers for a shard, and would have the dialler fall back to clear text."""
    write_certificates(tmp_path, 1)
    with serving(tmp_path / "", workers=1, shards=1, encryption="none") as shards:
        me = replace(shards.place(0), encryption=encryption_of("tls", tmp_path / "ca.pem", None))
        (stream,) = tcp.connect(*shards.address(0), SECONDS)
        with pytest.raises((Unproven, StreamClosed)):
            greet(stream, me, 0)
        stream.close()


def test_a_shard_of_another_run_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    write_certificates(tmp_path / "other", 1)
    with serving(tmp_path, workers=1, shards=1, encryption="tls") as shards:
        me = replace(shards.place(0), encryption=encryption_of("tls", tmp_path / "other" / "ca.pem", None))
        (stream,) = tcp.connect(*shards.address(0), SECONDS)
        with pytest.raises(Unproven, match="the certificate of the process that answers there is not that of shard-0"):
            greet(stream, me, 0)
        stream.close()


@pytest.mark.parametrize("first", [b"\x16\x03\x01\x40\x00" + bytes(1 << 16), b"\x16" * 64], ids=["a hello of 16 KiB", "records"])
def test_a_stranger_who_begins_tls_gets_a_second_and_four_kibibytes(tmp_path: Path, first: bytes) -> None:
    with serving(tmp_path, workers=1, shards=1, encryption="tls") as shards:
        began = time.monotonic()
        sock = socket.create_connection(shards.address(0), SECONDS)
        with contextlib.suppress(OSError):
            sock.sendall(first)
        with contextlib.suppress(OSError):
            while sock.recv(1 << 16):
                pass
        sock.close()
        assert time.monotonic() - began < SECONDS / 2, f"hung up after {STRANGER_SECONDS} s or {STRANGER_BYTES} bytes"
        worker = worker_of(shards, 0)
        all_well([worker], train)


def test_more_than_a_piece_goes_both_ways_at_once(tmp_path: Path) -> None:
    """Blocks of several pieces, on several streams, while the other side reads slowly."""
    with serving(tmp_path, workers=2, shards=1, encryption="tls", transport="tcp", streams=2) as shards:
        workers = [worker_of(shards, rank, size=700) for rank in range(2)]
        assert 20 * TLS_PIECE < 700 * 700 * 4
        all_well(workers, lambda worker: train(worker, 3))
        assert eventually(lambda: not any(link.alive for worker in workers for link in worker.session.links))
