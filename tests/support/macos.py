"""`python -m tests.support.macos FOLDER or MODULE …` imports the files of those folders, and all of ours that they import, as on macOS.

While a module of ours runs its first lines, sys.platform is darwin, names that only Linux has are gone, and /proc and /sys cannot be read.
Other packages are imported as they are. It prints a line for each module that fails, and exits 1 where there is one.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.abc
import importlib.machinery
import mmap
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

OURS = frozenset({"psjob", "psjob_operator", "psjob_client", "hack", "tests"})
LINUX_ONLY = {
    os: "sched_getaffinity sched_setaffinity memfd_create eventfd pidfd_open setns unshare splice copy_file_range getrandom getresuid "
    "posix_fadvise posix_fallocate getxattr setxattr O_DIRECT O_TMPFILE O_PATH MFD_CLOEXEC SCHED_BATCH SCHED_IDLE",
    fcntl: "F_SETPIPE_SZ F_GETPIPE_SZ F_ADD_SEALS F_SEAL_SEAL F_SEAL_SHRINK F_SEAL_GROW F_OFD_SETLK",
    mmap: "MAP_POPULATE MADV_HUGEPAGE MADV_DONTFORK MADV_REMOVE MADV_DONTDUMP",
    resource: "prlimit RLIMIT_RTPRIO RLIMIT_SIGPENDING RLIMIT_MSGQUEUE RLIMIT_NICE",
    select: "epoll EPOLLIN EPOLLOUT EPOLLHUP EPOLLERR EPOLLET EPOLLRDHUP POLLRDHUP",
    signal: "SIGSTKFLT SIGRTMIN SIGRTMAX SIGPWR SIGPOLL pidfd_send_signal sigtimedwait sigwaitinfo",
    socket: "TCP_USER_TIMEOUT TCP_KEEPIDLE TCP_QUICKACK MSG_MORE MSG_NOSIGNAL MSG_ERRQUEUE SO_PEERCRED SO_MARK SO_BINDTODEVICE "
    "SO_RCVBUFFORCE AF_NETLINK AF_PACKET AF_VSOCK AF_ALG SOCK_NONBLOCK SOCK_CLOEXEC IP_MTU TCP_DEFER_ACCEPT TCP_CONGESTION",
    time: "pthread_getcpuclockid CLOCK_BOOTTIME CLOCK_TAI",
}
FOLDERS = ("/proc", "/sys", "/run/systemd")


class Machine:
    """What a module sees: a Mac while it is ours, this machine otherwise."""

    def __init__(self) -> None:
        self.mac = False
        self._kept = {
            (module, name): vars(module)[name] for module, names in LINUX_ONLY.items() for name in names.split() if name in vars(module)
        }
        self._platform = sys.platform
        sys.addaudithook(self._deny)

    @contextmanager
    def seen(self, mac: bool) -> Iterator[None]:
        before = self.mac
        self._become(mac)
        try:
            yield
        finally:
            self._become(before)

    def _become(self, mac: bool) -> None:
        if mac is self.mac:
            return
        self.mac = mac
        sys.platform = "darwin" if mac else self._platform
        for (module, name), value in self._kept.items():
            if mac:
                delattr(module, name)
            else:
                setattr(module, name, value)

    def _deny(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.mac:
            return
        if event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], str | Path) and str(arguments[0]).startswith(FOLDERS):
            raise FileNotFoundError(f"macOS has no {arguments[0]}")
        if event == "ctypes.dlopen" and isinstance(arguments[0], str) and ".so" in arguments[0]:
            raise OSError(f"macOS has no {arguments[0]}")


class Finder(importlib.abc.MetaPathFinder):
    """Finds what Python finds, and lets each module run on its own machine."""

    def __init__(self, machine: Machine, ours: frozenset[str]) -> None:
        self._machine = machine
        self._ours = ours

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        with self._machine.seen(False):
            for other in sys.meta_path:
                spec = None if other is self else other.find_spec(fullname, path, target)
                if spec is not None:
                    break
        if spec is None or not hasattr(spec.loader, "exec_module"):
            return spec
        loader, run = spec.loader, spec.loader.exec_module

        def on_its_machine(module: ModuleType) -> None:
            loader.exec_module = run  # type: ignore[union-attr, method-assign]
            with self._machine.seen(fullname.partition(".")[0] in self._ours):
                run(module)

        try:
            loader.exec_module = on_its_machine  # type: ignore[union-attr, method-assign]
        except AttributeError:  # built-in and frozen modules
            pass
        return spec


def main(words: list[str]) -> int:
    """The exit status."""
    root = Path(__file__).resolve().parents[2]
    names = [name for word in words for name in (_modules(root, word) if "/" in word else [word])]
    ours = OURS | {name.partition(".")[0] for name in names}
    sys.meta_path.insert(0, Finder(Machine(), ours))
    wrong = []
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {error} (at {_place(error)})")
    there = sum(1 for name in sys.modules if name.partition(".")[0] in ours)
    print("\n".join([*wrong, f"{len(names)} imported with {there} modules of ours, {len(wrong)} fail"]))
    return 1 if wrong or not names else 0


def _modules(root: Path, folder: str) -> list[str]:
    files = sorted((root / folder).glob("*.py"))
    return [".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for file in files]


def _place(error: Exception) -> str:
    *_, last = traceback.extract_tb(error.__traceback__)
    return f"{last.filename}:{last.lineno}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
