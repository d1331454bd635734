"""Regions of shared memory and how they are handed over: what may be borrowed, what stays the lender's own."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest
import torch

from psjob.layout import memory
from psjob.layout.blocks import Layout, TensorSpec
from psjob.layout.memory import LentSpan
from psjob.wire import shared_memory
from psjob.wire.frame import WireError
from psjob.wire.shared_memory import PAGE, Region, SharedMemoryBroker
from psjob.worker.sharing import Arena, Sharing, is_alone
from tests.live.live_shards import SECONDS, aside

pytestmark = pytest.mark.usefixtures("last_words")


def test_a_region_is_seen_by_both_and_outlives_its_lender() -> None:
    lent = Region.lend(3 * PAGE)
    borrowed = Region.borrow(os.dup(lent.fd), 3 * PAGE)
    memory.lent(lent, PAGE, 8, "float32").fill_(2.5)
    seen = memory.lent(borrowed, PAGE, 8, "float32")
    del lent, borrowed
    assert seen.tolist() == [2.5] * 8


def test_what_could_be_taken_back_is_not_borrowed(tmp_path: Path) -> None:
    lent = Region.lend(PAGE)
    with pytest.raises(OSError):
        os.ftruncate(lent.fd, 0)
    with pytest.raises(WireError, match=f"has {PAGE} bytes, expected {2 * PAGE}"):
        Region.borrow(os.dup(lent.fd), 2 * PAGE)
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, PAGE)
    with pytest.raises(WireError, match="not sealed"):
        Region.borrow(loose, PAGE)
    path = tmp_path / "file"
    path.write_bytes(b"\0" * PAGE)
    with pytest.raises(WireError, match="sealed"):
        Region.borrow(os.open(path, os.O_RDWR), PAGE)
    for offset, length in ((-1, 1), (0, PAGE + 1), (PAGE, 1), (1, -1)):
        with pytest.raises(WireError, match="outside of lent memory"):
            lent.buffer(offset, length)


def test_a_borrower_cannot_write() -> None:
    lent = Region.lend(PAGE)
    if not fcntl.fcntl(lent.fd, fcntl.F_GET_SEALS) & shared_memory._FUTURE_WRITE:
        pytest.skip("this kernel has no F_SEAL_FUTURE_WRITE")
    with pytest.raises(OSError):
        os.write(lent.fd, b"x")
    with pytest.raises(OSError):
        shared_memory._map(None, PAGE, 3, 1, lent.fd, 0)


def test_what_is_withdrawn_is_the_lenders_own() -> None:
    lent = Region.lend(PAGE)
    borrowed = memory.lent(Region.borrow(os.dup(lent.fd), PAGE), 0, 4, "float32")
    mine = memory.lent(lent, 0, 4, "float32")
    mine.fill_(1.0)
    lent.withdraw()
    assert mine.tolist() == [1.0] * 4
    mine.fill_(7.0)
    assert borrowed.tolist() == [1.0] * 4


def test_a_token_opens_one_handover() -> None:
    counter = SharedMemoryBroker("test")
    ours, theirs = Region.lend(PAGE), Region.lend(2 * PAGE)
    got: list[int] = []

    def give(fd: int) -> Region:
        got.append(os.fstat(fd).st_size)
        os.close(fd)
        return theirs

    token = counter.expect(give)
    with pytest.raises(OSError):
        shared_memory.fetch(counter.address, "0" * len(token), ours.fd)
    fd = shared_memory.fetch(counter.address, token, ours.fd)
    assert (got, os.fstat(fd).st_size) == ([PAGE], 2 * PAGE)
    os.close(fd)
    with pytest.raises(OSError):
        shared_memory.fetch(counter.address, token, ours.fd)
    for name, word in (("another-program", token), ("psjob-\0", token), (f"{counter.address}x", token), (counter.address, "short")):
        with pytest.raises(OSError, match="is not where memory is handed over"):
            shared_memory.fetch(name, word, ours.fd)
    counter.forget(counter.expect(give))
    assert not counter._expected
    counter.close()


def test_shards_that_offer_at_once_are_lent_one_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each link has a thread of its own; a worker that gathers into one region must not have lent another to a shard."""
    span = LentSpan.of(Layout.of((TensorSpec("weight", (8,), "float32", 0),)), PAGE)
    counter, theirs, got = SharedMemoryBroker("test"), Region.lend(span.size), set[int]()

    def slow(span: LentSpan) -> Arena:
        time.sleep(0.05)
        return Arena(span)

    def give(fd: int) -> Region:
        got.add(os.fstat(fd).st_ino)
        os.close(fd)
        return theirs

    monkeypatch.setattr("psjob.worker.sharing.Arena", slow)
    sharing = Sharing(span.layout, steady=True)

    def take(index: int) -> None:
        sharing.take(index, [0], {"name": counter.address, "token": counter.expect(give), "bytes": span.size})

    for taking in [aside(lambda index=index: take(index)) for index in range(4)]:
        taking.join(SECONDS)
    assert sharing._arena is not None and got == {os.fstat(sharing._arena.region.fd).st_ino}
    counter.close()


def test_what_is_not_alone_is_seen() -> None:
    like = torch.zeros(4)
    assert is_alone(torch.ones(4), like)
    whole = torch.ones(8)
    assert not is_alone(whole[:4], like) and not is_alone(torch.ones(4, dtype=torch.float64), like)
    other = torch.ones(4)
    view = other.view(2, 2)
    assert not is_alone(other, like)
    del view
    assert is_alone(other, like)


@pytest.mark.parametrize("populates", [True, False])
def test_pages_that_are_kept_stay_as_they_were(populates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not populates:
        monkeypatch.setattr(shared_memory, "populate", lambda address, size: False)
    region = Region.lend(3 * PAGE)
    window = shared_memory.Window(3 * PAGE)
    window.show(region.fd, [(0, 3 * PAGE)])
    lender, seen = (memory.lent(at, 0, 3 * PAGE, "uint8") for at in (region, window))
    lender.fill_(5)
    window.keep(PAGE, 2 * PAGE)
    lender.fill_(6)
    assert seen[:PAGE].unique().tolist() == [6] and seen[PAGE:].unique().tolist() == [5]
