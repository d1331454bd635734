"""Child processes that cannot outlive their parent, and waiting with a deadline."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom

from hack.cluster.paths import ClusterError

PR_SET_PDEATHSIG = 1
GO = {"GOGC": "400"}
"""Programs in Go collect their garbage less often: an eighth of the processor time of the tests of a control plane, for some memory."""
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Keeper:
    """Starts components, writes `pids/NAME.pid` and `logs/NAME.log`, starts again what died, and ends all of them."""

    state: Path
    commands: dict[str, tuple[Sequence[str], dict[str, str] | None]] = field(default_factory=dict)
    children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    died: dict[str, float] = field(default_factory=dict)

    def start(self, name: str, command: Sequence[str], env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a component; it gets SIGKILL when this process dies."""
        self.commands[name] = (command, env)
        return self._spawn(name)

    def revive(self) -> None:
        """Start again, at most once a second each, what has ended."""
        for name, child in list(self.children.items()):
            if child.poll() is None:
                continue
            if name not in self.died:
                print(f"{name} ended with {child.returncode}; starting it again", flush=True)
                self.died[name] = time.monotonic()
            elif time.monotonic() - self.died[name] >= 1:
                del self.died[name]
                self._spawn(name)

    def check(self) -> None:
        """Raise ClusterError, with the log's last lines, when a component ended while it was being waited for."""
        for name, child in self.children.items():
            if child.poll() is not None:
                raise ClusterError(f"{name} ended with {child.returncode}; the end of {self.log(name)}:\n{tail(self.log(name))}")

    def stop(self) -> None:
        """SIGKILL for all at once: nothing of a throw-away cluster is worth the seconds of a graceful end."""
        for child in self.children.values():
            child.kill()
        for child in self.children.values():
            child.wait()
        self.children.clear()

    def log(self, name: str) -> Path:
        return self.state / "logs" / f"{name}.log"

    def _spawn(self, name: str) -> subprocess.Popen[bytes]:
        command, env = self.commands[name]
        for folder in ("logs", "pids"):
            (self.state / folder).mkdir(parents=True, exist_ok=True)
        with self.log(name).open("ab") as log:
            child = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**GO, **os.environ, **(env or {})},
                preexec_fn=die_with_parent,
                cwd="/",
            )
        self.children[name] = child
        scratch = self.state / "pids" / f"{name}.tmp"
        scratch.write_text(f"{child.pid}\n")
        scratch.rename(self.state / "pids" / f"{name}.pid")
        return child


def die_with_parent() -> None:
    """For preexec_fn: SIGKILL from the kernel when the parent is gone. A terminal's Ctrl-C is the parent's business alone."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setpgid(0, 0)


def wait_for(what: str, ready: Callable[[], bool], seconds: float, check: Callable[[], None] = lambda: None, pause: float = 0.05) -> float:
    """Poll until `ready()`; the seconds it took. Raises ClusterError that names `what` after the deadline, or whatever `check` raises."""
    started = time.monotonic()
    while True:
        if ready():
            return time.monotonic() - started
        check()
        if time.monotonic() - started > seconds:
            raise ClusterError(f"waited {seconds:.0f} s for {what} and it did not come; the logs lie in the state folder's logs/")
        time.sleep(pause)


def tail(file: Path, lines: int = 12) -> str:
    if not file.exists():
        return "(no log)"
    return "\n".join(line[:400] for line in file.read_text(errors="replace").splitlines()[-lines:])


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports nobody listens on, below the range that clients get: a client could take ours between look and bind."""
    chosen: list[int] = []
    dice = SystemRandom()
    while len(chosen) < count:
        port = dice.randrange(20000, 32000)
        with contextlib.closing(socket.socket()) as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            if port not in chosen:
                chosen.append(port)
    return chosen


def alive(pid: int, started: str | None = None) -> bool:
    """Is that process there, and (where `started` is given) still the same one?"""
    seen = started_at(pid)
    return seen is not None and (started is None or seen == started)


def started_at(pid: int) -> str | None:
    """The kernel's start time of a process, which tells a pid from its reuse; None when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]
