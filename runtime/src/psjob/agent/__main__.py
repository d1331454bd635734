"""`python -m psjob.agent COMMAND…`: the processes of one worker. They are started together, watched, ended together.

`psjob.agent.decide` says what becomes of them.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from psjob import contract
from psjob.agent.decide import LOCALHOST, End, Ended, ProcessGroup, StartAgain, environment, verdict
from psjob.process import config
from psjob.process.config import ProcessContext
from psjob.process.errors import Refused, exit_refused
from psjob.process.system import end_children, end_with

LOOK_SECONDS = 0.5
PATIENT_SECONDS = 10.0
"""Processes that are ending by themselves have so long, until the first of them counts for all."""
MOST_WORDS = 1 << 20
"""Bytes of what process 0 may say between two starts."""
CANNOT_START = 127
PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def main(command: list[str]) -> int:
    """Run `command` once for each process of this worker. Its exit code."""
    known = {**os.environ, contract.ENV_LOCAL: "0", contract.ENV_SOCKETS: "0"}  # the agent's own place is that of process 0
    try:
        place = config.place(known)
        if place is None or place.role != "worker":
            raise Refused(f"psjob.agent starts the processes of a worker of a job, and {contract.ENV_ROLE} is not worker; see psjob run")
        if not command:
            raise Refused("psjob.agent was given no command; give it the one that a worker of one process has")
    except Refused as refused:
        exit_refused(str(refused))
        raise
    return Agent(place, command, os.environ).run()


class Agent:
    """Of the worker at `place`. `command` is the script's, `given` its environment."""

    def __init__(self, place: ProcessContext, command: Sequence[str], given: Mapping[str, str]) -> None:
        self._place, self._command, self._given = place, list(command), dict(given)
        self._rewinds = place.rewinds
        self._spent = self._stopping = False
        self._children: dict[int, int] = {}
        """Local rank by pid."""
        self._ended: list[Ended] = []
        self._said = bytearray()
        self._joined = False
        self._again: dict[str, Any] | None = None
        self._control: socket.socket | None = None
        self._wake, self._woken = socket.socketpair()

    def run(self) -> int:
        """Until all have ended well, or one has not and may not be started again. The worker's exit code."""
        if _LIBC is not None:
            _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what a script leaves behind is ended with it
        self._listen()
        self._start()
        while True:
            self._look()
            decided = verdict(self._group())
            if isinstance(decided, End):
                if decided.patient:
                    self._let_end()
                end_children()
                return verdict_code(decided, self._group())
            if isinstance(decided, StartAgain):
                self._start_again(decided.died)

    # -- starts --------------------------------------------------------------------------------

    def _start(self) -> None:
        processes = self._place.config.processes
        ours, first = socket.socketpair()
        pairs = [socket.socketpair() for _ in range(processes - 1)]
        port = _free_port()
        try:
            for local in range(processes):
                mine = [first, *(pair[0] for pair in pairs)] if local == 0 else [pairs[local - 1][1]]
                if not self._spawn(local, port, [one.fileno() for one in mine]):
                    break
        finally:
            for one in (first, *(end for pair in pairs for end in pair)):
                one.close()
        ours.setblocking(False)
        self._control = ours
        if self._stopping:  # the signal came while they were started, and went to those before them
            self._on_stop(signal.SIGTERM, None)

    def _spawn(self, local: int, port: int, sockets: Sequence[int]) -> bool:
        config = self._place.config
        env = environment(self._given, self._place.index, config.workers, local, config.processes, port, sockets, self._rewinds)
        try:
            child = subprocess.Popen(self._command, env=env, pass_fds=list(sockets), preexec_fn=partial(end_with, os.getpid()))
        except (OSError, ValueError) as error:
            print(f"psjob: cannot start {self._command[0]}: {error}", file=sys.stderr, flush=True)
            self._ended.append(Ended(local, CANNOT_START))
            return False
        self._children[child.pid] = local
        child.returncode = 0  # this agent waits for all children at once, those of the script that have lost their parent among them
        return True

    def _start_again(self, died: Ended | None) -> None:
        if died is not None:
            self._spent = True
            how = f"signal {died.code - 128}" if died.code > 128 else f"exit code {died.code}"
            others = self._place.config.processes - 1
            print(
                f"psjob: process {died.local} of worker {self._place.index} ended with {how}; it and the {others} beside it start again",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        end_children()
        self._hear()
        if self._control is not None:
            self._control.close()
        again = self._again or {}
        self._rewinds += 1
        self._given.update({str(name): str(value) for name, value in dict(again.get("more") or {}).items()})
        if again.get("mode"):
            self._given[contract.ENV_MODE] = str(again["mode"])
        self._children.clear()
        self._ended.clear()
        self._said.clear()
        self._joined, self._again = False, None
        _forget_message(self._given)
        self._start()

    # -- watching ------------------------------------------------------------------------------

    def _group(self) -> ProcessGroup:
        return ProcessGroup(
            self._place.config.processes, tuple(self._ended), self._joined, self._again is not None, self._stopping, self._spent
        )

    def _listen(self) -> None:
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)

    def _on_stop(self, number: int, _frame: Any) -> None:
        self._stopping = True
        for pid in list(self._children):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def _look(self, seconds: float = LOOK_SECONDS) -> None:
        """Wait until a child ends, process 0 speaks or a signal comes; take note of it."""
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        if self._control is not None:
            poll.register(self._control, select.POLLIN)
        if not self._ended_now():
            poll.poll(1000 * seconds)
        try:
            self._woken.recv(4096)
        except BlockingIOError:
            pass
        self._reap()
        self._hear()  # after that: who has ended has said before what it had to say

    def _ended_now(self) -> bool:
        return len(self._ended) == self._place.config.processes or bool(verdict_now(self._group()))

    def _hear(self) -> None:
        control = self._control
        try:
            while control is not None and (raw := control.recv(65536)):
                self._said += raw[: max(0, MOST_WORDS - len(self._said))]
            if control is not None:
                control.close()
                self._control = None  # process 0 has ended
        except BlockingIOError:
            pass
        except OSError:
            self._control = None
        *lines, rest = bytes(self._said).split(b"\n")
        self._said = bytearray(rest)
        for line in lines:
            self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            said = json.loads(line)
        except ValueError:
            return
        if isinstance(said, dict):
            self._joined |= bool(said.get("joined"))
            if isinstance(said.get("again"), dict):
                self._again = said["again"]

    def _reap(self) -> None:
        try:
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                local = self._children.pop(pid, None)
                if local is not None:
                    code = os.waitstatus_to_exitcode(status)
                    self._ended.append(Ended(local, code if code >= 0 else 128 - code))
        except ChildProcessError:
            pass

    def _let_end(self) -> None:
        """Those that are left have time to end by themselves."""
        deadline = time.monotonic() + PATIENT_SECONDS
        while self._children and (left := deadline - time.monotonic()) > 0:
            poll = select.poll()
            poll.register(self._woken, select.POLLIN)
            poll.poll(1000 * min(left, LOOK_SECONDS))
            try:
                self._woken.recv(4096)
            except BlockingIOError:
                pass
            self._reap()


def verdict_now(group: ProcessGroup) -> bool:
    """Is there something to do at once?"""
    return isinstance(verdict(group), End | StartAgain)


def verdict_code(decided: End, group: ProcessGroup) -> int:
    """The exit code, now that those that were left have ended: a death among them says more than an end that psjob made."""
    last = verdict(group)
    return last.code if isinstance(last, End) else decided.code


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOCALHOST, 0))
        return int(probe.getsockname()[1])


def _forget_message(environ: Mapping[str, str]) -> None:
    """What a process left for the planner is of a start that counts no more."""
    try:
        with open(environ.get(contract.ENV_TERMINATION_LOG, contract.TERMINATION_LOG), "r+b") as file:
            file.truncate(0)
    except OSError:
        pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
