"""What a worker is while a fork of `forkserver` is its script: it passes signals on, and ends as that one ends.

`python -I -S fork_waiter.py SOCKET PYTHON WORDS…`, with the folder, environment and files of the script. It imports nothing that takes
time or memory. If no fork comes, or the server ends, it execs the command.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from types import FrameType
from typing import Any

FORK_SECONDS = 20.0
"""So long a fork may take, until the command is started instead."""
REWINDS = "PSJOB_REWINDS"
"""contract.ENV_REWINDS."""
_OWN = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
PASSED_ON = tuple(number for number in signal.valid_signals() if number not in _OWN)
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""They ask a worker to end: a fork that comes after such a one is asked too."""


class ForkWaiter:
    """Of one worker. `words` are its command."""

    def __init__(self, server: socket.socket, words: list[str]) -> None:
        self._server, self._words = server, words
        self._environment = dict(os.environ)
        self._script = 0
        self._waiting: list[int] = []
        """Signals that no script has got."""
        self._asked: list[int] = []
        """Those of ENDING that came."""
        self._rest = b""
        self._began = False
        """A fork was made."""
        self._before: dict[int, Any] = {}

    def run(self) -> int:
        """Until the script has ended. Its exit status."""
        for number in PASSED_ON:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._pass_on)
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody else waits for what the script leaves behind
        self._server.settimeout(FORK_SECONDS)
        try:
            self._ask()
            said = self._line()
        except OSError:
            said = {}
        self._server.settimeout(None)
        while "pid" in said:
            self._environment, self._script = said["environment"], int(said["pid"])
            for unheard in (*self._asked, *(one for one in self._waiting if one not in self._asked)):
                self._send(unheard)
            self._waiting.clear()
            said = self._line()
            self._script = 0
            if "ended" in said:
                said = self._line()
        if "status" in said:
            return end_as(int(said["status"]))
        if "exec" in said:
            self._environment, self._began = said["exec"], False
        elif self._began:  # the server was killed, and the script with it, which had joined by this number
            self._environment[REWINDS] = str(int(self._environment.get(REWINDS, "0")) + 1)
        self._exec()
        return 1

    def _ask(self) -> None:
        asked = {"words": self._words, "folder": os.getcwd(), "environment": self._environment}
        raw = json.dumps(asked).encode() + b"\n"
        sent = socket.send_fds(self._server, [raw[: 1 << 16]], [0, 1, 2])
        self._server.sendall(raw[sent:])

    def _line(self) -> dict[str, Any]:
        """What the server says next; empty: it has ended."""
        while b"\n" not in self._rest:
            try:
                more = self._server.recv(1 << 16)
            except ConnectionError:
                more = b""
            if not more:
                return {}
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        self._began |= "pid" in found
        return found

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        if number in ENDING:
            self._asked.append(number)
        if not self._script or not self._send(number):
            self._waiting.append(number)

    def _send(self, number: int) -> bool:
        try:
            os.kill(self._script, number)
        except ProcessLookupError:
            return False
        return True

    def _exec(self) -> None:
        """Be the command itself, to which signals go that nobody has got."""
        if self._began:
            print("psjob: the process that forks this worker has ended; the script begins again", file=sys.stderr, flush=True)
        self._server.close()
        for number, before in self._before.items():
            signal.signal(number, before)
        for number in (*self._waiting, *self._asked):
            os.kill(os.getpid(), number)
        os.execve(self._words[0], self._words, self._environment)


def end_as(status: int) -> int:
    """End by the signal that has ended another process, or return its exit code. `status` is what `waitpid` gave."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return 128 - code  # the first process of a container outlives its own signals


if __name__ == "__main__":
    sys.exit(ForkWaiter(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]).run())
