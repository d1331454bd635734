"""Small real volumes that a test can slow down or fill: an ext4 on a loop device. Root only.

The limit is the kernel's (blkio of cgroup v1) and belongs to the device: all processes share it. It holds for direct and for buffered
writes, and for reads that the page cache does not answer. A buffered write returns at once; its fsync waits for the device.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PAGE = 4096
FILLER = "filler"
BLKIO = Path("/sys/fs/cgroup/blkio")
COMMANDS = ("mkfs.ext4", "losetup", "mount", "umount")
DIRECTIONS = ("read", "write")
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
UNMOUNT_SECONDS = 20.0


@dataclass(frozen=True)
class Volume:
    """A mounted volume."""

    folder: Path
    """Where it is mounted."""
    device: str

    def limit(self, rate: int | None) -> None:
        """At most `rate` bytes a second are read, and as many written, from now on; None lifts the limit, also for what waits."""
        number = os.stat(self.device).st_rdev
        for group in _groups():
            for direction in DIRECTIONS:
                rule = f"{os.major(number)}:{os.minor(number)} {rate or 0}"
                (group / f"blkio.throttle.{direction}_bps_device").write_text(rule)

    def forget(self) -> None:
        """Drop the files' clean pages from the page cache, so that the next read comes from the device."""
        for path in self.folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file() and not path.is_symlink():
                    with path.open("rb") as file:
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def free(self) -> int:
        """Bytes that can still be written."""
        facts = os.statvfs(self.folder)
        return facts.f_bavail * facts.f_frsize

    def fill(self, leave: int = 0) -> None:
        """Take all room except `leave` bytes with a file. Called again, it takes what has become free meanwhile."""
        part = 1 << 40
        with (self.folder / FILLER).open("ab") as file:
            while part >= PAGE:
                part = min(part, self.free() - leave) // PAGE * PAGE
                if part <= 0:
                    return
                try:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, part)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    part //= 2  # the file's own index needs a page now and then

    def make_room(self) -> None:
        """Remove what `fill` has written."""
        (self.folder / FILLER).unlink()


@contextlib.contextmanager
def mounted(base: Path, size: int) -> Iterator[Volume]:
    """An empty volume of `size` bytes in folder `base`, gone at the end. Skips the test where this machine cannot have one."""
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    image, folder = base / "volume.img", base / "volume"
    folder.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(size)
    # All tables are written now: the kernel would write them later, on the account of who is measured. Root has no room of its own.
    _do("mkfs.ext4", "-q", "-b", str(PAGE), "-m", "0", "-J", "size=4", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(image))
    device = _do("losetup", "--find", "--show", str(image))
    volume = Volume(folder, device)
    try:
        _do("mount", "-o", "noatime", device, str(folder))
        try:
            yield volume
        finally:
            volume.limit(None)
            _unmount(folder)
    finally:
        volume.limit(None)  # the next one to be given this device must not inherit it
        _do("losetup", "--detach", device)
        image.unlink()


def unavailable() -> str | None:
    """Why this machine can have no such volume; None where it can."""
    if os.geteuid() != 0:
        return "a limited volume needs root: mount, and blkio of the root cgroup"
    if not os.path.exists("/dev/loop-control"):
        return "a limited volume needs loop devices: there is no /dev/loop-control"
    lacking = [command for command in COMMANDS if shutil.which(command, path=PATH) is None]
    if lacking:
        return f"a limited volume needs {', '.join(lacking)} (Debian: e2fsprogs, mount)"
    if not all((BLKIO / f"blkio.throttle.{direction}_bps_device").exists() for direction in DIRECTIONS):
        return f"a limited volume needs blkio throttling of cgroup v1: there is none at {BLKIO}"
    return None


def _groups() -> set[Path]:
    """The root, to which the kernel's own writers belong, and the group of this process and its children."""
    entries = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    own = next((path for _, controllers, path in entries if "blkio" in controllers.split(",")), "/")
    return {group for group in (BLKIO, BLKIO / own.lstrip("/")) if group.is_dir()}


def _unmount(folder: Path) -> None:
    """Wait for the last process to close its files; a volume that stays in use is taken out of sight, and goes with its last user."""
    deadline = time.monotonic() + UNMOUNT_SECONDS
    while subprocess.run(["umount", str(folder)], env={**os.environ, "PATH": PATH}, capture_output=True).returncode != 0:
        if time.monotonic() > deadline:
            _do("umount", "--lazy", str(folder))
            raise AssertionError(f"{folder} was still in use {UNMOUNT_SECONDS:.0f} s after its test")
        time.sleep(0.1)


def _do(*words: str) -> str:
    done = subprocess.run(words, env={**os.environ, "PATH": PATH}, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"
    return done.stdout.strip()
