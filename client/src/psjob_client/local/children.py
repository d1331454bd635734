"""Processes: started in sessions of their own, ended with us, reaped as soon as they end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from psjob_operator.plan.observed_state import Role

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


@dataclass(eq=False)
class ChildProcess:
    """One process of the job, running or ended."""

    name: str
    role: Role
    index: int
    number: int
    """Attempt of a shard, start of a worker."""
    process: subprocess.Popen[bytes] | None
    """None: the system could not start it; `problem` says why."""
    created: float
    problem: str = ""
    waited: int = 0
    """Seconds that its start was held back."""
    ended: float | None = None
    deleting: float | None = None
    kill_at: float | None = None
    """When SIGTERM has had its time."""

    @property
    def uid(self) -> str:
        """Tells this process from any other of its name."""
        return f"{self.process.pid if self.process else 0}-{self.created:.6f}"

    @property
    def running(self) -> bool:
        return self.ended is None

    @property
    def code(self) -> int | None:
        """Exit code as a container's: 128 + signal where a signal ended it; None while it runs."""
        if self.ended is None:
            return None
        if self.process is None:
            return 127
        raw = self.process.returncode
        return 128 - raw if raw < 0 else raw

    @property
    def signal(self) -> int:
        """The signal that ended it, or 0."""
        raw = self.process.returncode if self.process and self.process.returncode is not None else 0
        return max(0, -raw)

    def send(self, number: int, *, group: bool = True) -> None:
        """A signal to the process and, unless `group` is false, to all that it started; nothing where it has ended."""
        if self.process is None or self.ended is not None:
            return
        try:
            # The process leads its session's group until it is reaped, which only `reap` does.
            (os.killpg if group else os.kill)(self.process.pid, number)
        except ProcessLookupError:
            pass

    def send_inside(self, number: int) -> bool:
        """A signal to the process that serves in a shard, not to its keeper; False if there is none now."""
        servers = _children(self.process.pid) if self.process is not None and self.ended is None else []
        for pid in servers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return bool(servers)

    def stop(self, now: float, grace: float) -> None:
        """SIGTERM now and SIGKILL after `grace` seconds; at once where grace is 0. Asked again, the earlier SIGKILL holds."""
        self.deleting = self.deleting or now
        if grace <= 0:
            self.send(signal.SIGKILL)
        elif self.kill_at is None:
            self.kill_at = now + grace
            # As on a cluster, to the process itself: its loader processes are its own to end.
            self.send(signal.SIGTERM, group=False)
        else:
            self.kill_at = min(self.kill_at, now + grace)

    def wait(self) -> None:
        """Until it has ended, after SIGKILL: the kernel does not let it wait long."""
        while self.process is not None and self.ended is None and not _has_ended(self.process):
            time.sleep(0.002)

    def reap(self, now: float) -> bool:
        """Whether it has ended since the last call; what it left behind in its session is ended too."""
        if self.ended is not None:
            return False
        if self.process is not None:
            if self.kill_at is not None and now >= self.kill_at:
                self.send(signal.SIGKILL)
                self.kill_at = None
            # WNOWAIT first: while the process is unreaped, its group's number cannot be anyone else's.
            if not _has_ended(self.process):
                return False
            self.send(signal.SIGKILL)
            self.process.wait()
        self.ended = now
        return True


Take = Callable[[Sequence[str], Mapping[str, str], Path, Path], "subprocess.Popen[bytes] | None"]
"""Of a command, its environment, folder and log: a process that is that one from now on."""


def start(
    name: str, role: Role, index: int, number: int, argv: Sequence[str], env: Mapping[str, str], folder: Path, log: Path,
    spare: Take | None = None,
) -> ChildProcess:  # fmt: skip
    """Start one process, its output in `log`. One that cannot be started is a child that has a `problem`.

    `spare` may have one that becomes it.
    """
    now = time.time()
    if spare is not None and (there := spare(argv, env, folder, log)) is not None:
        return ChildProcess(name, role, index, number, there, now)
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(
                list(argv),
                env=dict(env),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C at the terminal reaches psjob run alone, which then stops the job in order.
                start_new_session=True,
                preexec_fn=die_with(os.getpid()),
            )
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return ChildProcess(name, role, index, number, None, now, problem=f"cannot start {argv[0]}: {error}")
    return ChildProcess(name, role, index, number, process, now)


def _children(pid: int) -> list[int]:
    """Processes that it has started; empty where the system does not tell."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def die_with(parent: int) -> Callable[[], None] | None:
    """Has the kernel kill the child when process `parent`, ours, ends in whatever way. It has one thread, so this is safe after fork."""
    if _LIBC is None:
        return None
    prctl = _LIBC.prctl

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return ask
