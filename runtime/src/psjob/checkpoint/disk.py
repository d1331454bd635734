"""Bytes to a file that is there whole or not at all: temp name, fsync, rename, fsync of the folder.

One small function a system call, so that a fault can be put on each. What can be wrong with a checkpoint are exceptions whose text a user
can act on.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from psjob import contract
from psjob.process import supervise

TEMP = contract.TEMP
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
CHUNK = 8 << 20
LARGE = 16 << 20
"""A file of so many bytes goes past the page cache where the file system can: its pages would be made, copied to and written back
on cores that train."""
SYNC_BYTES = 32 << 20
"""If it cannot, so much is dirty at a time."""
PAGE = 4096
Moved = Callable[[int], None]
"""Told of bytes that were written or read. What it raises ends the transfer."""
_DIRECT: int = getattr(os, "O_DIRECT", 0)


class CheckpointProblem(Exception):
    """Something could not be written or read. Training can continue; the text says what to change.

    `full`: for want of room, so that the same may succeed later.
    """

    full = False


class Damage(CheckpointProblem):
    """A file is not what was written. `file`, `expected` and `found` are in the text."""

    def __init__(self, file: str, expected: str, found: str) -> None:
        super().__init__(f"checkpoint file {file} is damaged: expected {expected}, found {found}")
        self.file, self.expected, self.found = file, expected, found


FULL = (errno.ENOSPC, errno.EDQUOT)
_REMEDIES = {
    errno.ENOSPC: "the volume is full: free space or ask for a larger one",
    errno.EDQUOT: "the quota is used up: free space or ask for more",
    errno.EROFS: "the volume is mounted read-only",
    errno.EACCES: "this user may not write there: set fsGroup or the folder's owner",
    errno.EPERM: "this user may not write there: set fsGroup or the folder's owner",
    errno.EIO: "the disk reported an error",
    errno.ENOENT: "the folder is gone",
}


def explain_os_error(error: OSError, doing: str, folder: Path) -> CheckpointProblem:
    """The sentence for an OSError met while `doing` something in `folder`."""
    name = errno.errorcode.get(error.errno or 0, "error")
    remedy = _REMEDIES.get(error.errno or 0, error.strerror or str(error))
    problem = CheckpointProblem(f"cannot {doing} in {folder}: {name}, {remedy}")
    problem.full = error.errno in FULL
    return problem


def write_whole(folder: Path, name: str, parts: Iterable[bytes | memoryview], size: int = 0, moved: Moved | None = None) -> None:
    """Write `parts`, of about `size` bytes, to `folder/name`. Raises CheckpointProblem and what `moved` raises.

    Whatever fails, the name and the temp file are removed again. If even this fails, the error says that the file may be there.
    After a failed fsync the file is dropped and never synced again: a second call may lie.
    """
    check_name(name)
    temp = name + TEMP
    large = size >= LARGE
    with opened_folder(folder) as at:
        try:
            fd = _create(temp, at, _DIRECT if large else 0)
        except OSError as error:
            raise explain_os_error(error, f"create {temp}", folder) from error
        with _dropping(temp, name, at, folder) as renamed:
            try:
                for part in _in_pages(parts, fd) if large else parts:
                    _write(fd, part, moved)
                _sync(fd)
            finally:
                os.close(fd)
            _rename(temp, name, at)
            renamed.append(name)
            _sync(at)


def rename_whole(folder: Path, name: str, to: str) -> None:
    """Give `folder/name` the name `to`, which may be any that the system takes; where that fails, both are gone.

    Raises CheckpointProblem, and ValueError for a name with a NUL.
    """
    with opened_folder(folder) as at, _dropping(name, to, at, folder) as renamed:
        _rename(name, to, at)
        renamed.append(to)
        _sync(at)


@contextlib.contextmanager
def _dropping(before: str, wanted: str, at: int, folder: Path) -> Iterator[list[str]]:
    """A file passes from one name to another, and then `wanted` is put into the list. If that fails, neither name stays.

    An OSError is told as a CheckpointProblem.
    """
    renamed: list[str] = []
    try:
        yield renamed
    except BaseException as error:
        left = _stays(wanted if renamed else before, at)
        if not isinstance(error, OSError):
            raise
        problem = explain_os_error(error, f"write {wanted}", folder)
        if renamed and left:
            problem.args = (f"{problem}; {wanted} could not be removed again and may be there",)
        raise problem from error


def _stays(name: str, at: int) -> bool:
    """Remove a file; True where that fails."""
    try:
        os.unlink(name, dir_fd=at)
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True
    return False


def remove_files(folder: Path, names: Iterable[str]) -> list[str]:
    """Remove files and make that durable; those that were there. Raises CheckpointProblem if one stays."""
    removed = []
    with opened_folder(folder) as at:
        for name in names:
            try:
                with supervise.system_call():
                    os.unlink(name, dir_fd=at)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise explain_os_error(error, f"remove {name}", folder) from error
            removed.append(name)
        if removed:
            try:
                _sync(at)
            except OSError as error:
                raise explain_os_error(error, "fsync", folder) from error
    return removed


def names_in(folder: Path) -> list[str]:
    """Names of all entries, in order; none where there is no such folder. Raises CheckpointProblem."""
    try:
        with supervise.system_call():
            return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise explain_os_error(error, "list the folder", folder) from error


def free_bytes(folder: Path) -> int | None:
    """Bytes that this user may still write there; None if that is not known."""
    try:
        with supervise.system_call():
            facts = os.statvfs(folder)
    except OSError:
        return None
    return facts.f_bavail * facts.f_frsize


@contextlib.contextmanager
def opened_regular(path: Path) -> Iterator[tuple[int, int]]:
    """(file descriptor, size) of a regular file. Raises Damage for anything else: a link, a fifo, a device, nothing at all."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with supervise.system_call():
            fd = os.open(path, flags)
    except FileNotFoundError:
        raise Damage(path.name, "a file", "nothing") from None
    except OSError as error:
        if path.is_symlink():
            raise Damage(path.name, "a regular file", "a symbolic link") from error
        raise explain_os_error(error, f"open {path.name}", path.parent) from error
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise Damage(path.name, "a regular file", "a file of another kind")
        yield fd, facts.st_size
    except OSError as error:
        raise explain_os_error(error, f"read {path.name}", path.parent) from error
    finally:
        os.close(fd)


def read_small(path: Path, limit: int) -> bytes:
    """The bytes of a regular file of at most `limit`. Raises Damage or CheckpointProblem."""
    with opened_regular(path) as (fd, size):
        if size > limit:
            raise Damage(path.name, f"at most {limit} bytes", f"{size} bytes")
        data = bytearray(size)
        read_into(fd, memoryview(data), path.name)
        return bytes(data)


def read_into(fd: int, target: memoryview, name: str, moved: Moved | None = None) -> None:
    """Fill `target` from the file's position on. Raises Damage when the file ends before, and what `moved` raises."""
    done = 0
    while done < len(target):
        with supervise.system_call():
            got = os.readv(fd, [target[done : done + CHUNK]])
        if got == 0:
            raise Damage(name, f"{len(target)} bytes", f"only {done}")
        done += got
        if moved is not None:
            moved(got)


def make_folder(folder: Path) -> None:
    """Create the run's folder, durably, where it is not there yet. Raises CheckpointProblem."""
    try:
        missing = [part for part in (folder, *folder.parents) if not part.exists()]
    except OSError as error:
        raise explain_os_error(error, "look for the folder", folder) from error
    for part in reversed(missing):
        try:
            with supervise.system_call():
                part.mkdir(mode=0o755, exist_ok=True)
        except OSError as error:
            raise explain_os_error(error, f"create {part.name}", part.parent) from error
        sync_folder(part.parent)


def sync_folder(folder: Path) -> None:
    """Make the folder's entries durable. Raises CheckpointProblem."""
    with opened_folder(folder) as at:
        try:
            _sync(at)
        except OSError as error:
            raise explain_os_error(error, "fsync", folder) from error


def check_name(name: str) -> None:
    """Raise CheckpointProblem unless `name` is a plain file name."""
    if not NAME.fullmatch(name):
        raise CheckpointProblem(f"{name[:80]!r} is no file name of a checkpoint: expected {NAME.pattern}")


@contextlib.contextmanager
def opened_folder(folder: Path) -> Iterator[int]:
    """A file descriptor of the folder. Raises CheckpointProblem."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise explain_os_error(error, "open the folder", folder) from error
    try:
        yield fd
    finally:
        os.close(fd)


def _in_pages(parts: Iterable[bytes | memoryview], fd: int) -> Iterator[memoryview]:
    """The same bytes in whole pages that begin on one, as a write past the page cache needs; the last ones are an ordinary write.

    Parts that lie on pages are passed on as they are; what is small or lies askew goes through a buffer.
    """
    buffer = memoryview(mmap.mmap(-1, CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    held = dirty = 0
    for part in parts:
        rest = memoryview(part).cast("B")
        while len(rest):
            if held % PAGE == 0 and len(rest) >= PAGE and _on_page(rest):
                if held:
                    yield buffer[:held]
                piece, held = rest[: min(len(rest), CHUNK) // PAGE * PAGE], 0
                yield piece
            else:
                piece = rest[: min(CHUNK - held, 1 << 20)]
                buffer[held : held + len(piece)] = piece
                held += len(piece)
                if held == CHUNK:
                    yield buffer
                    held = 0
            rest = rest[len(piece) :]
            dirty += len(piece)
            if dirty >= SYNC_BYTES and not _is_direct(fd):
                _sync(fd)
                dirty = 0
    whole = held // PAGE * PAGE
    if whole:
        yield buffer[:whole]
    if held > whole:
        _plainly(fd)
        yield buffer[whole:held]


def _on_page(part: memoryview) -> bool:
    return not part.readonly and ctypes.addressof(ctypes.c_char.from_buffer(part)) % PAGE == 0


def _is_direct(fd: int) -> bool:
    return bool(_DIRECT and fcntl.fcntl(fd, fcntl.F_GETFL) & _DIRECT)


def _plainly(fd: int) -> None:
    """From here on through the page cache."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_DIRECT)


def _create(temp: str, at: int, more: int = 0) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with supervise.system_call():
            return os.open(temp, flags | more, 0o644, dir_fd=at)
    except FileExistsError:  # left by a process of the same name that was killed here
        os.unlink(temp, dir_fd=at)
        return os.open(temp, flags | more, 0o644, dir_fd=at)
    except OSError as error:
        if not more or error.errno != errno.EINVAL:
            raise
    with contextlib.suppress(FileNotFoundError):  # some make the file before they refuse
        os.unlink(temp, dir_fd=at)
    return os.open(temp, flags, 0o644, dir_fd=at)


def _write(fd: int, part: bytes | memoryview, moved: Moved | None = None) -> None:
    rest = memoryview(part).cast("B") if not isinstance(part, memoryview) else part
    while len(rest):
        try:
            with supervise.system_call():
                done = os.write(fd, rest[:CHUNK])
        except OSError as error:
            if error.errno != errno.EINVAL or not _is_direct(fd):
                raise
            _plainly(fd)  # larger pages than ours, or a write that was cut short
            continue
        rest = rest[done:]
        if moved is not None:
            moved(done)


def _sync(fd: int) -> None:
    with supervise.system_call():
        os.fsync(fd)


def _rename(temp: str, name: str, at: int) -> None:
    with supervise.system_call():
        os.rename(temp, name, src_dir_fd=at, dst_dir_fd=at)
