"""Memory that one process lends to another of its host: anonymous, sealed, written only by its lender.

A region has no name, so nothing of it is left when the processes that map it have died, however they did. Its size is sealed
before anyone borrows it: a borrower can never meet memory that its lender took back. Imports no torch: a shard speaks before it
has loaded that.

The two processes give each other what they lend by a local socket that only the kernel knows. One side sends the other the socket's name
and a token of one use, on the stream that they have already. A shard sends them to a worker in WELCOME, a worker of a stage to a neighbour
that dialled it in LENDS. The name is not a file and holds 16 random bytes. A process elsewhere cannot reach it, and one that lacks the
token is hung up on.

Two pods of one node have no such names in common. If both mount a volume, the socket is also a file of that name there. A file system of
several nodes may show the file to a process of another one, which the kernel refuses to connect.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import secrets
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from psjob.process import supervise
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
        """New memory full of zeros, of at least one byte, for this process to write. Raises OSError if the kernel has none.

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
        """The region of another process behind `fd`, which is taken over, to be read. Raises WireError unless `check_sealed` passes it."""
        try:
            check_sealed(fd, size)
            return cls(fd, size, _map(None, size, _READ, _SHARED, fd, 0))
        except BaseException:
            os.close(fd)
            raise

    @property
    def identity(self) -> tuple[int, int]:
        """The same for all who map this memory, and for no other memory."""
        facts = os.fstat(self.fd)
        return facts.st_dev, facts.st_ino

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


def check_sealed(fd: int, size: int) -> None:
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


SECONDS = 5.0
LIMIT = 64
"""Handovers at one time."""
TOKEN_BYTES = 32
NAME, TOKEN = re.compile(r"psjob-[0-9a-f]{32}"), re.compile(rf"[0-9a-f]{{{TOKEN_BYTES}}}")
Give = Callable[[int], Region]
"""Takes over the other side's descriptor; returns the memory to lend, which stays open until it is sent. Raises WireError or OSError."""


class SharedMemoryBroker:
    """The lending side's sockets, and who may come to them."""

    def __init__(self, name: str, folder: str = "") -> None:
        """`folder`: where the socket is a file too, for a process that has no other way to it. Files that processes before this one have
        left there go. Raises OSError if it cannot be a file there."""
        self.address = f"psjob-{secrets.token_hex(16)}"
        self._expected: dict[str, Give] = {}
        self._lock = threading.Lock()
        self.in_folder = bool(folder)
        """Its socket is a file in the folder too."""
        self._file = f"{folder}/{self.address}" if folder else ""
        self._sockets = [_listening("\0" + self.address)]
        if folder:
            try:
                self._sockets.append(_in_folder(folder, self._file))
            except OSError:
                self._sockets[0].close()
                raise
        for each in self._sockets:
            accept_forever(each, self._serve, LIMIT, name, Caller)

    def expect(self, give: Give) -> str:
        """A token for one handover to `give`."""
        token = secrets.token_hex(TOKEN_BYTES // 2)
        with self._lock:
            self._expected[token] = give
        return token

    def forget(self, token: str) -> None:
        with self._lock:
            self._expected.pop(token, None)

    def close(self) -> None:
        """Nobody is served any more. Closing twice is no error."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # or the thread that accepts would take one more
            each.close()
        if self._file:
            with contextlib.suppress(OSError):
                os.unlink(self._file)

    def close_copy(self) -> None:
        """In a forked process: the sockets stay its parent's."""
        for each in self._sockets:
            each.close()

    def _serve(self, caller: Caller) -> None:
        fds: list[int] = []
        try:
            raw, fds = _received(caller.sock, TOKEN_BYTES)
            if len(raw) != TOKEN_BYTES or len(fds) != 1:
                return
            with self._lock:
                give = self._expected.pop(raw.decode("ascii", "replace"), None)
            if give is None:
                return
            lent = give(fds.pop())
            socket.send_fds(caller.sock, [b"+"], [lent.fd])
        except (OSError, WireError, ValueError):
            pass  # the other side hears the end of the stream, and stays with TCP
        finally:
            for fd in fds:
                os.close(fd)


def _listening(address: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind(address)
        made.listen(LIMIT)
    except OSError:
        made.close()
        raise
    return made


def _in_folder(folder: str, file: str) -> socket.socket:
    """A socket that is this file. Whoever may enter the folder may connect, since the other side may be of another user."""
    for name in os.listdir(folder):
        if NAME.fullmatch(name):
            os.unlink(f"{folder}/{name}")
    made = _listening(file)
    os.chmod(file, 0o666)  # noqa: S103
    return made


class Caller:
    """One connection to the counter."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(SECONDS)

    def close(self) -> None:
        self.sock.close()


def accept_forever(
    server: socket.socket, handle: Callable[[Any], None], limit: int, name: str, wrap: Callable[[socket.socket], Any]
) -> threading.Thread:
    """Accept in a thread of its own and give each stream to `handle` in another; above `limit` streams a newcomer is closed."""
    slots = threading.BoundedSemaphore(limit)

    def serve(stream: Any) -> None:
        try:
            handle(stream)
        finally:
            stream.close()
            slots.release()

    def loop() -> None:
        while True:
            try:
                sock, _address = server.accept()
            except OSError:
                if server.fileno() < 0:
                    return
                time.sleep(0.05)
                continue
            if not slots.acquire(blocking=False):
                sock.close()
                continue
            try:
                supervise.start_thread(serve, f"{name}-stream", wrap(sock))
            except (OSError, RuntimeError):
                sock.close()
                slots.release()

    return supervise.start_thread(loop, f"{name}-accept")


@dataclass(frozen=True)
class Offer:
    """Where a shard of this host lends `size` bytes. `folder`: as of `fetch`."""

    name: str
    token: str
    size: int
    folder: str = ""

    @classmethod
    def of(cls, said: Any, folder: str) -> Offer:
        """What a shard said in WELCOME; `folder`: the one that this process has in common with it. Raises WireError."""
        try:
            return cls(str(said["name"]), str(said["token"]), int(said["bytes"]), folder if said.get("inFolder") is True else "")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise WireError(f"an offer of memory is not in shape: {error!r}") from None

    def borrow(self, lent: Region) -> Region:
        """Hand `lent` over and take what is offered. Raises OSError or WireError."""
        return Region.borrow(fetch(self.name, self.token, lent.fd, self.folder), self.size)


def fetch(address: str, token: str, fd: int, folder: str = "") -> int:
    """Lend `fd` to the process that listens at `address`; the descriptor that it lends. Raises OSError if it is out of reach.

    Or where the other side names what no counter is called: it could send this process to any program of the machine. `folder`: where
    the address is a file; empty: only the kernel knows it.
    """
    if not NAME.fullmatch(address) or not TOKEN.fullmatch(token):
        raise OSError(f"{address[:80]!r} is not where memory is handed over")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(SECONDS)
        sock.connect(f"{folder}/{address}" if folder else "\0" + address)
        socket.send_fds(sock, [token.encode("ascii")], [fd])
        raw, fds = _received(sock, 1)
        if raw != b"+" or len(fds) != 1:
            for got in fds:
                os.close(got)
            raise OSError("the other side did not take what was lent")
        return fds[0]


def _received(sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """At most `size` bytes and one descriptor, which a program that this process becomes (a worker that begins again) does not keep."""
    raw, fds, _, _ = socket.recv_fds(sock, size, 1)  # which passes no flags on, MSG_CMSG_CLOEXEC neither
    for fd in fds:
        os.set_inheritable(fd, False)
    return raw, fds


ALIGNED: Final = 64


class RingAllocator:
    """`size` bytes, given away in their order. Bytes are given away again once their reader has said that it copied them.

    A ring that is empty begins at its first byte, so memory that was never needed is never touched.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._held: deque[int] = deque()
        """Offsets that were given away, oldest first."""
        self._ends: dict[int, int] = {}
        """By offset that is not copied yet, where it ends."""
        self._end = 0
        """Where the newest one ends."""

    def take(self, length: int) -> int | None:
        """The offset of `length` bytes, at least 1, that nobody else has. None: there is no such room now."""
        if not self._held:
            self._end = 0
        oldest = self._held[0] if self._held else self.size
        at = self._end
        if self._held and at <= oldest:  # wrapped: free bytes end at the oldest
            room = oldest - at
        elif at + length <= self.size:
            room = self.size - at
        else:
            at, room = 0, oldest if self._held else 0
        if length > room:
            return None
        self._held.append(at)
        self._ends[at] = end = at + length
        self._end = min(end + -end % ALIGNED, self.size)
        return at

    def copied(self, offset: int) -> None:
        """The reader has copied what lies at `offset`. Raises WireError if nothing is held there."""
        if self._ends.pop(offset, None) is None:
            raise WireError(f"byte {offset} of lent memory holds nothing that is to be copied")
        while self._held and self._held[0] not in self._ends:
            self._held.popleft()

    @property
    def held(self) -> dict[int, int]:
        """By offset that is not copied yet, where it ends."""
        return dict(self._ends)
