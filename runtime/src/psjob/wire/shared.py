"""Memory that one process lends to another of its host: anonymous, sealed, written by its lender alone.

A region has no name, so nothing of it is left when the processes that map it have died, however they did. Its size is sealed
before anyone borrows it: a borrower can never meet memory that its lender took back. Imports no torch: a shard speaks before it
has loaded that.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

from psjob.wire.frame import WireError

PAGE: Final = 4096 if not hasattr(os, "sysconf") else os.sysconf("SC_PAGE_SIZE")
_READ, _WRITE = 1, 2
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS, _NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_DONTNEED = 4
_POPULATE_WRITE = 23
_FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE (Linux 5.1): who gets the region's descriptor cannot map it for writing."""


class Region:
    """`size` bytes, mapped here for as long as this object or a buffer of it lives. The descriptor belongs to it too."""

    def __init__(self, fd: int, size: int, address: int) -> None:
        self.fd, self.size, self.address = fd, size, address
        self.withdrawn = False
        self._raw = (ctypes.c_char * size).from_address(address)
        weakref.finalize(self._raw, _forget, address, size, fd).atexit = False  # at exit buffers may still be in use

    @classmethod
    def lend(cls, size: int, unsealed: Callable[[int], None] | None = None) -> Region:
        """New memory full of zeros, of at least one byte, for this process to write. Raises OSError where the kernel has none.

        `unsealed` gets the descriptor while others can still map it for writing.
        """
        fd = os.memfd_create("psjob", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            address = _map(None, size, _READ | _WRITE, _SHARED, fd, 0)
            if unsealed is not None:
                try:
                    unsealed(fd)
                except BaseException:
                    _libc().munmap(address, size)
                    raise
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            try:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | _FUTURE_WRITE)
            except OSError:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, size, address)

    @classmethod
    def hold(cls, fd: int, size: int) -> Region:
        """Memory of another process behind `fd`, which is taken over, for forks of this one to write. Raises OSError once it is sealed."""
        try:
            return cls(fd, size, _map(None, size, _READ | _WRITE, _SHARED, fd, 0))
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def borrow(cls, fd: int, size: int) -> Region:
        """The region of another process behind `fd`, which is taken over, to be read. Raises WireError unless `check` passes it."""
        try:
            check(fd, size)
            return cls(fd, size, _map(None, size, _READ, _SHARED, fd, 0))
        except BaseException:
            os.close(fd)
            raise

    def buffer(self, offset: int, length: int) -> Any:
        """A ctypes array over these bytes, which keeps the region mapped. Raises WireError outside of it."""
        return _part(self._raw, self.size, offset, length)

    def words(self, offset: int, count: int) -> memoryview[int]:
        """So many numbers of 8 bytes, each written by one store. Raises WireError outside of the region."""
        return memoryview(self.buffer(offset, 8 * count)).cast("B").cast("q")

    def withdraw(self) -> None:
        """What this process writes from now on no longer reaches those who borrowed the region; they keep what it holds.

        `withdrawn` is set before: what was written and then found it unset has reached them whole. A fork may call it under any lock.
        """
        self.withdrawn = True
        _map(self.address, self.size, _READ | _WRITE, _PRIVATE | _FIXED | _NORESERVE, self.fd, 0)


class Window:
    """A range of addresses in which pieces of borrowed regions are seen at the places they have there.

    What this process writes into it stays with this process: a page that was written to is its own until `forget`.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.address = _map(None, size, 0, _PRIVATE | _ANONYMOUS | _NORESERVE, -1, 0)
        self._raw = (ctypes.c_char * size).from_address(self.address)
        weakref.finalize(self._raw, _forget, self.address, size, -1).atexit = False

    def show(self, fd: int, pieces: Sequence[tuple[int, int]]) -> None:
        """Show (offset, length) pieces of the region behind `fd`, whole pages each; the caller has checked the region."""
        for offset, length in pieces:
            _map(self.address + offset, length, _READ | _WRITE, _PRIVATE | _FIXED | _NORESERVE, fd, offset)

    def forget(self, offset: int, length: int) -> None:
        """Drop what was written into these pages: the region's own bytes are seen again."""
        if _libc().madvise(self.address + offset, length, _DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise of borrowed memory")

    def keep(self, offset: int, length: int) -> None:
        """Make these pages this process's own as they are: what their lender writes from now on is not seen."""
        if not populate(self.address + offset, length):
            for at in range(offset, offset + length, PAGE):
                self._raw[at] = self._raw[at]

    def buffer(self, offset: int, length: int) -> Any:
        """As Region.buffer."""
        return _part(self._raw, self.size, offset, length)


def check(fd: int, size: int) -> None:
    """Raise WireError unless `fd` is sealed memory of exactly `size` bytes, so that reading it can never fail."""
    found = os.fstat(fd).st_size
    if found != size:
        raise WireError(f"lent memory has {found} bytes, expected {size}")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise WireError(f"what the peer lent is not memory that can be sealed: {error}") from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise WireError("lent memory is not sealed against shrinking")


def populate(address: int, size: int) -> bool:
    """Have these pages made, ready to be written to, with what is seen there; False: this kernel cannot (Linux before 5.14)."""
    return sys.platform == "linux" and not _libc().madvise(address, size, _POPULATE_WRITE)


def copy_out(buffer: Any, target: memoryview) -> None:
    """Copy a region's buffer into `target` of the same length; other threads run meanwhile."""
    if len(target):
        ctypes.memmove((ctypes.c_char * len(target)).from_buffer(target), buffer, len(target))


def copy_in(parts: Sequence[memoryview], buffer: Any) -> None:
    """Copy `parts`, one after the other, into a region's buffer of their length together; other threads run meanwhile."""
    at = ctypes.addressof(buffer)
    for part in parts:
        size = len(part)
        if size:
            ctypes.memmove(at, part.tobytes() if part.readonly else (ctypes.c_char * size).from_buffer(part), size)
            at += size


def possible() -> bool:
    """Can this system lend memory at all?"""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def whole_pages(size: int) -> int:
    """`size` rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


def _part(raw: Any, size: int, offset: int, length: int) -> Any:
    if offset < 0 or length < 0 or offset + length > size:
        raise WireError(f"bytes {offset}..{offset + length} are outside of lent memory of {size}")
    return (ctypes.c_char * length).from_buffer(raw, offset)


def _map(address: int | None, size: int, protection: int, flags: int, fd: int, offset: int) -> int:
    found: int | None = _libc().mmap(address, size, protection, flags, fd, offset)
    if found is None or found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"mmap of {size} lent bytes: {os.strerror(ctypes.get_errno())}")
    return found


def _forget(address: int, size: int, fd: int) -> None:
    _libc().munmap(address, size)
    if fd >= 0:
        os.close(fd)


_loaded: list[Any] = []


def _libc() -> Any:
    if not _loaded:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        _loaded.append(libc)
    return _loaded[0]
