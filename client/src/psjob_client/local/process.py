"""Processes of a run: started in sessions of their own on ports of this machine, ended with us, reaped as soon as they end.

A `Spare` has imported torch and becomes the next shard or worker that is started again, so that its return takes no import. It is
`psjob.process.forkserver` of the runtime, which says whether it can be that process as a new start would be.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from psjob_client.problems import BadInput
from psjob_operator import contract
from psjob_operator.plan.observed_state import Role

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
SpareStart = Callable[[Sequence[str], Mapping[str, str], Path, Path], "subprocess.Popen[bytes] | None"]
"""Of a command, its environment, folder and log: a process that is that one from now on."""
ROOM: Final = 4 << 30
"""Bytes of memory that must be free: it takes about 300 MB."""
ANSWER_SECONDS: Final = 2.0
READY, TAKEN = b"ready\n", b"taken\n"
PROGRAM: Final = (
    "import sys; sys.flags.safe_path or sys.path.pop(0); from psjob.process import forkserver; forkserver.become(int(sys.argv[1]))"
)
ADDRESS = "127.0.0.1"


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


def start_process(
    name: str, role: Role, index: int, number: int, argv: Sequence[str], env: Mapping[str, str], folder: Path, log: Path,
    spare: SpareStart | None = None,
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


class Spare:
    """At most one, of a job. `environment` and `folder` are those of its workers, which its libraries read as they are imported."""

    def __init__(self, environment: Mapping[str, str], folder: Path) -> None:
        self._environment, self._folder = dict(environment), folder
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._since: float | None = None
        """When all processes were running last, without one that is started."""
        self._ready = self._failed = False

    def keep(self, running: bool, now: float) -> None:
        """Have one if the job has been running for long enough, and there is room."""
        self._since = (self._since if self._since is not None else now) if running else None
        if self._process is not None and self._process.poll() is not None:  # it could not import, or memory was short
            self.close()
            self._failed = True
        if self._failed:
            return
        if (
            self._process is None
            and self._since is not None
            and now - self._since >= contract.fork_server_after(self._environment)
            and (free_memory() or 0) >= ROOM
        ):
            self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno())], cwd=self._folder, env=self._environment, pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                preexec_fn=die_with(os.getpid()),
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError):
            self._since = None
            ours.close()
            return
        finally:
            theirs.close()
        ours.settimeout(ANSWER_SECONDS)
        self._socket, self._ready = ours, False

    def take(self, argv: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path) -> subprocess.Popen[bytes] | None:
        """The process as that command, its output in `log`; None: there is none, or it cannot be that one."""
        if self._socket is None or self._process is None or not self._imported():
            return None
        asked = {"words": list(argv), "folder": str(folder), "environment": dict(environment)}
        process, self._since = self._process, None
        try:
            with log.open("ab") as output, open(os.devnull, "rb") as nothing:
                raw = json.dumps(asked).encode() + b"\n"
                sent = socket.send_fds(self._socket, [raw[: 1 << 16]], [nothing.fileno(), output.fileno(), output.fileno()])
                self._socket.sendall(raw[sent:])
                taken = self._socket.recv(len(TAKEN)) == TAKEN
        except OSError:
            taken = False
        if taken:
            self._process = None
        self.close()
        return process if taken else None

    def _imported(self) -> bool:
        if self._socket is not None and not self._ready:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            with contextlib.suppress(OSError):
                self._ready = bool(poll.poll(0)) and self._socket.recv(len(READY)) == READY
        return self._ready

    def close(self) -> None:
        """End the one that there is."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._socket is not None:
            self._socket.close()
        self._process = self._socket = None
        self._ready = False


def free_memory() -> int | None:
    """Bytes that programs of this machine can still have; None where the system does not say, as macOS."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


class Listening(NamedTuple):
    """The addresses of a shard, the same for all its attempts."""

    host: str
    data: int
    status: int


class Sites(Protocol):
    """What a run needs to know of the network that its processes are in."""

    @property
    def shards(self) -> Sequence[Listening]:
        """The shards' addresses in index order."""

    def command(self, role: Role, index: int, argv: Sequence[str]) -> Sequence[str]:
        """The words that start `argv` as this process, in place: the process that runs them becomes that of `argv`."""

    def close(self) -> None:
        """The run has ended."""


@dataclass
class Ports:
    """A data port and a status port for each shard.

    Each is held by a socket that is bound and never listens. Nobody else is given the port, not even between two attempts of a
    shard. A shard that sets SO_REUSEADDR may bind and listen on it.
    """

    data: list[int] = field(default_factory=list)
    status: list[int] = field(default_factory=list)
    _held: list[socket.socket] = field(default_factory=list)

    @property
    def shards(self) -> Sequence[Listening]:
        """The shards' addresses in index order."""
        return [Listening(ADDRESS, data, status) for data, status in zip(self.data, self.status, strict=True)]

    def command(self, role: Role, index: int, argv: Sequence[str]) -> Sequence[str]:
        """`argv`: all processes share this machine's network."""
        return argv

    def close(self) -> None:
        """Give them back."""
        for held in self._held:
            held.close()
        self._held.clear()

    def _take(self) -> int:
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._held.append(held)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((ADDRESS, 0))
        return int(held.getsockname()[1])


def reserve_ports(shards: int) -> Ports:
    """Two ports a shard. Raises BadInput if the machine has no more."""
    ports = Ports()
    try:
        for _ in range(shards):
            ports.data.append(ports._take())
            ports.status.append(ports._take())
    except OSError as error:
        ports.close()
        raise BadInput(f"{shards} shards need {2 * shards} free ports on {ADDRESS}: {error}; set spec.shards.replicas lower") from None
    return ports
