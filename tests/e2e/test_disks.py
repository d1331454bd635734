"""The volumes of tests/support/disks.py are as slow, and as full, as they are asked to be."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.disks import Volume, mounted

pytestmark = pytest.mark.nodes
MIB = 1 << 20
RATE = 4 * MIB
SIZE = 6 * MIB
LEAST = 0.85 * SIZE / RATE
"""Seconds; the kernel lets a little go ahead of its account."""


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Volume]:
    with mounted(tmp_path_factory.mktemp("disk"), 64 * MIB) as made:
        yield made


@pytest.mark.rotating
@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
def test_reading_and_writing_take_as_long_as_the_limit_says(volume: Volume, direct: bool) -> None:
    volume.limit(RATE)
    path = volume.folder / f"data-{direct}"
    began = time.monotonic()
    write(path, os.O_DIRECT if direct else 0)
    wrote = time.monotonic() - began
    volume.forget()
    began = time.monotonic()
    assert len(path.read_bytes()) == SIZE
    took = time.monotonic() - began
    volume.limit(None)
    assert wrote >= LEAST and took >= LEAST, f"{SIZE} bytes at {RATE} a second: written in {wrote:.2f} s, read in {took:.2f} s"


@pytest.mark.rotating
def test_two_readers_share_the_limit(volume: Volume) -> None:
    paths = [volume.folder / name for name in ("one", "two")]
    for path in paths:
        write(path, os.O_DIRECT)
    volume.limit(RATE)
    volume.forget()
    began = time.monotonic()
    children = [_fork_reader(path) for path in paths]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    took = time.monotonic() - began
    volume.limit(None)
    assert took >= 2 * LEAST, f"2 x {SIZE} bytes at {RATE} a second were read in {took:.2f} s"


@pytest.mark.rotating
def test_what_waits_goes_on_at_once_when_the_limit_is_lifted(volume: Volume) -> None:
    path = volume.folder / "lifted"
    write(path, os.O_DIRECT)
    volume.limit(SIZE // 60)
    volume.forget()
    began = time.monotonic()
    child = _fork_reader(path)
    time.sleep(0.5)
    assert os.waitpid(child, os.WNOHANG)[0] == 0
    volume.limit(None)
    assert os.waitpid(child, 0)[1] == 0
    assert time.monotonic() - began < 30


def test_a_full_volume_takes_nothing_and_has_room_again(volume: Volume) -> None:
    volume.fill(leave=MIB)
    write(volume.folder / "fits", size=MIB // 2)
    with pytest.raises(OSError) as too_large:
        write(volume.folder / "large", size=MIB)
    assert too_large.value.errno == errno.ENOSPC
    (volume.folder / "large").unlink()
    volume.fill()
    with pytest.raises(OSError) as full:
        (volume.folder / "tiny").write_bytes(b"one byte is too many")
    assert full.value.errno == errno.ENOSPC
    volume.make_room()
    write(volume.folder / "large", size=MIB)


def write(path: Path, flags: int = 0, size: int = SIZE) -> None:
    """Write and fsync `size` bytes, a MiB at a time at most."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o644)
    part = mmap.mmap(-1, min(size, MIB))  # on a page, as direct writes need it
    try:
        for _ in range(size // len(part)):
            os.write(fd, part)
        os.fsync(fd)
    finally:
        os.close(fd)


def _fork_reader(path: Path) -> int:
    """A process that reads the file and ends with 0."""
    child = os.fork()
    if child == 0:
        os._exit(0 if len(path.read_bytes()) else 1)
    return child
