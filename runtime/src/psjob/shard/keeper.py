"""The first process of a shard: it holds the memory of what the shard trains, and forks the process that serves.

If that process is killed, another is forked at once and continues from the memory (see `state_memory`). One that hangs is killed first. To
everybody else this is a stream that broke: the shard's attempt stays, no checkpoint is read, and no worker begins again. The keeper holds
one thread and no socket of the job. It passes SIGTERM on, and ends as the server ends where that cannot be replaced.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final

from psjob import contract
from psjob.process import fork_waiter, forkserver, supervise, system
from psjob.process.system import ChildExits, end_with
from psjob.wire.shared_memory import Region, possible

WEIGHTS: Final = "weights"
STATE: Final = "state"
"""The two regions: what workers read of the blocks, and all else."""
SERVES, PROGRESS, BEATS, SILENCE = range(4)
"""The first words of STATE: can another process continue from it; another number after each update; another one at each sign of life; the
milliseconds after which a process without such a sign hangs, 0: it is not watched.
"""
ROOM = 1 << 30
"""Bytes of memory that must be free for that import, which takes about 250 MB."""
MOST_IN_VAIN = 3
"""Servers in a row that were killed before they made an update."""
ANSWER_SECONDS = 30.0
"""For the keeper to map memory: it may import torch meanwhile."""
LONGEST_WAIT: Final = 3600.0
LOOKS: Final = 4
"""At a server in the time after which it hangs."""
MESSAGE_BYTES: Final = 4096
REPLACED: Final = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE})
"""Signals by which a server ends without having wanted to."""
EVENTS: Final = (Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control"))
log = logging.getLogger("psjob.shard")


class _OverError(BaseException):
    """The server has ended for good. No library that is being imported may take it for an error of its own."""


@dataclass
class LeftMemory:
    """What a server finds that takes another's place, until it has taken it. `died`: how that one ended."""

    died: str
    regions: list[Region]

    def take(self) -> tuple[Region, Region]:
        """WEIGHTS and STATE, which are mapped from now on as long as the caller has them. Raises ValueError the second time."""
        weights, state = self.regions
        self.regions.clear()
        return weights, state


class Keeping:
    """The server's side: it asks the keeper to hold memory."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock: socket.socket | None = sock
        sock.settimeout(ANSWER_SECONDS)

    def lend(self, what: str, size: int) -> Region:
        """New memory, which the keeper holds in place of what it held under that name before. Raises OSError if it cannot."""
        return Region.lend(size, lambda fd: self._ask({"what": what, "size": size}, [fd]))

    def drop(self) -> None:
        """The keeper is to hold nothing any more."""
        with contextlib.suppress(OSError):
            self._ask({}, [])

    def _ask(self, said: dict[str, object], fds: list[int]) -> None:
        if self._sock is None:
            raise OSError("the first process of this shard holds no memory any more")
        try:
            with supervise.system_call():  # the keeper may import meanwhile
                return self._answered(said, fds)
        except OSError as error:
            log.warning("memory of this shard is not held for a process after this one: %s", error)
        self._sock = None
        raise OSError("the first process of this shard could not hold its memory")

    def _answered(self, said: dict[str, object], fds: list[int]) -> None:
        assert self._sock is not None
        socket.send_fds(self._sock, [json.dumps(said).encode()], fds)
        if self._sock.recv(1) != b"+":
            raise OSError("its first process could not map it")


@dataclass
class Watch:
    """Judges one server, which has shown a sign of life, by those that it counts. It hangs if there is none for a while."""

    _beats: int | None = None
    _since: float = 0.0
    _looked: float = 0.0

    def hangs(self, beats: int, seconds: float, now: float) -> bool:
        """To be asked LOOKS times in these seconds. If it was not, this process stood still too, and the server is given its time anew."""
        stood_still = now - self._looked > 2 * seconds / LOOKS
        self._looked = now
        if beats != self._beats or stood_still:
            self._beats, self._since = beats, now
        return now - self._since >= seconds


@dataclass
class Keeper:
    """Until the server has ended for good. `load` imports what a server needs."""

    load: Callable[[], None]
    _held: dict[str, Region] = field(default_factory=dict)
    _server: int = 0
    _stopped: bool = False
    _can_fork: bool | None = None
    """None: nothing was imported yet."""
    _due: float | None = None
    """When it is to be imported."""
    _in_vain: int = 0
    _reached: int = -1
    """Progress at the last fork."""
    _oom: int | None = None
    _watch: Watch = field(default_factory=Watch)
    _hung: bool = False
    """The server was killed here, since it showed no sign of life."""

    def run(self, serve: Callable[[Keeping, LeftMemory | None], int]) -> int:
        """Fork servers, which call `serve`; returns the exit status in each process."""
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ends, keeper, found, status = ChildExits(), os.getpid(), None, 0
        while True:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._oom = _oom_kills()
            try:
                self._server = os.fork()
            except OSError as error:  # no memory, or too many processes
                print(f"psjob: no process can be forked in place of this shard's: {error}", file=sys.stderr, flush=True)
                return fork_waiter.end_as(status) or contract.EXIT_RETRY
            if self._server == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                ends.close()
                ours.close()
                end_with(keeper)
                self._held.clear()
                if self._stopped:
                    signal.raise_signal(signal.SIGTERM)
                return serve(Keeping(theirs), found)
            if self._stopped:  # while it was forked: it has not heard that
                os.kill(self._server, signal.SIGTERM)
            theirs.close()
            found, self._watch, self._hung = None, Watch(), False
            status = self._wait(ours, ends)
            ours.close()
            found = self._next(status)
            if found is None:
                return fork_waiter.end_as(status)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        self._stopped = True
        if self._server:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self._server, number)

    def _wait(self, ours: socket.socket, ends: ChildExits) -> int:
        """Hold what the server asks to, until it has ended. Its status."""
        poll = select.poll()
        poll.register(ours, select.POLLIN)
        poll.register(ends, select.POLLIN)
        while True:
            pid, status = os.waitpid(self._server, os.WNOHANG)
            if pid:
                self._server = 0
                return status
            now = time.monotonic()
            due, look = self._due if len(self._held) == 2 else None, self._look(now)
            soonest = min(at for at in (due, look, now + LONGEST_WAIT) if at is not None)
            ready = poll.poll(max(0.0, soonest - now) * 1000)
            for fd, _ in ready:
                if fd == ends.fileno():
                    ends.heard()
                elif not self._hear(ours):
                    poll.unregister(ours)
            if not ready and due is not None and time.monotonic() >= due:
                self._due = None
                with contextlib.suppress(_OverError):
                    self._prepare_while_it_serves()

    def _look(self, now: float) -> float | None:
        """Kill a server that hangs, where another can continue in its place. When to look again; None: it is not watched."""
        if len(self._held) < 2:
            return None
        serves, progress, beats, silence = self._held[STATE].words(0, SILENCE + 1)
        seconds = silence / 1000
        if not seconds or self._hung:
            return None
        replaced = serves and self._can_fork and not self._stopped and self._tries(progress) <= MOST_IN_VAIN
        if self._watch.hangs(beats, seconds, now) and replaced:
            self._hung = True
            print(f"psjob: this shard's process has shown no sign of life for {seconds:.1f} s; it is killed", file=sys.stderr, flush=True)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._server, signal.SIGKILL)
        return now + seconds / LOOKS

    def _tries(self, progress: int) -> int:
        """Servers that were killed without an update between, this one among them."""
        return self._in_vain + 1 if progress == self._reached else 1

    def _hear(self, ours: socket.socket) -> bool:
        """One request of the server; False: there will be none any more."""
        try:
            raw, fds, _, _ = socket.recv_fds(ours, MESSAGE_BYTES, 1)
            if not raw:
                return False
            said = json.loads(raw)
            if not said:
                self._held.clear()
            else:
                self._held[str(said["what"])] = Region.hold(fds.pop(), int(said["size"]))
                if self._can_fork is None and self._due is None:
                    self._due = time.monotonic() + contract.fork_server_after(os.environ)  # a short job does not pay for the import
            ours.send(b"+")
        except (OSError, IndexError) as error:  # no memory, or no descriptor left
            print(f"psjob: this shard's memory cannot be held: {error}", file=sys.stderr, flush=True)
            self._held.clear()
            try:
                ours.send(b"-")
            except OSError:
                return False
        return True

    def _prepare_while_it_serves(self) -> None:
        """Raises _OverError as soon as the server has ended so that none takes its place: an import may take longer than anybody waits."""

        def ended(*_: object) -> None:
            found = os.waitid(os.P_PID, self._server, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None and (found.si_code == os.CLD_EXITED or found.si_status not in REPLACED):
                raise _OverError

        before = signal.signal(signal.SIGCHLD, ended)
        try:
            ended()  # it may have been, just before
            self._prepare()
        finally:
            signal.signal(signal.SIGCHLD, before)

    def _prepare(self) -> None:
        """Import what a server needs, so that the next one is a fork of it. What fails here must not end the server that there is."""
        if self._can_fork is not None:
            return
        try:
            if "torch" not in sys.modules and (room := system.memory_left(*filter(None, [self._server]))) is not None and room < ROOM:
                return  # looked at again when it is needed
            self.load()
            self._can_fork = forkserver.can_fork()
        except Exception as error:  # no process, no memory, a library that cannot be read
            print(f"psjob: no process can continue in place of this shard's: {error!r}", file=sys.stderr, flush=True)
            self._can_fork = False

    def _next(self, status: int) -> LeftMemory | None:
        """What the next server continues from; None: there is to be none."""
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) in REPLACED
        if self._stopped or not killed or self._held.keys() != {WEIGHTS, STATE} or _oom_kills() != self._oom:
            return None
        head = self._held[STATE].words(0, PROGRESS + 1)
        if not head[SERVES]:
            return None
        reached = head[PROGRESS]
        self._in_vain, self._reached = self._tries(reached), reached
        if self._in_vain > MOST_IN_VAIN:
            return None
        self._prepare()
        if not self._can_fork:
            return None
        self._held[STATE].words(0, SILENCE + 1)[SILENCE] = 0  # until the next one shows a sign of life
        died = "a hang" if self._hung else signal.Signals(os.WTERMSIG(status)).name
        return LeftMemory(died, [self._held[WEIGHTS], self._held[STATE]])


def possible_here() -> bool:
    """Can this process be a keeper? It must have one thread, and a system that lends memory."""
    if not possible() or contract.fork_server_after(os.environ) == float("inf"):
        return False
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def _oom_kills() -> int | None:
    """Processes of this container that were killed for want of memory; None where the system does not tell."""
    for path in EVENTS:
        try:
            return next((int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith("oom_kill ")), None)
        except (OSError, ValueError, IndexError):
            continue
    return None
