"""What a worker is while a fork of `forkserver` is its script: it passes signals on, and ends as that one ends.

`python -I -S forkwaiter.py SOCKET PYTHON WORDS…`, with the folder, environment and files of the script. It imports nothing that takes
time or memory. If no fork comes, it execs the command.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from types import FrameType

FORK_SECONDS = 20.0
"""So long a fork may take, until the command is started instead."""
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
LOST = 75
"""The server of the fork has ended: the worker is to be started again, as contract.EXIT_RETRY says."""


def main(number: int, words: list[str]) -> int:
    """Until the script has ended. Its exit status."""
    server = socket.socket(fileno=number)
    waiting: list[int] = []
    script = 0

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if not script:
            waiting.append(number)
            return
        try:
            os.kill(script, number)
        except ProcessLookupError:
            pass

    for one in PASSED_ON:
        signal.signal(one, pass_on)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody else waits for what the script leaves behind
    asked = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
    server.settimeout(FORK_SECONDS)
    try:
        raw = json.dumps(asked).encode() + b"\n"
        sent = socket.send_fds(server, [raw[: 1 << 16]], [0, 1, 2])
        server.sendall(raw[sent:])
        said = _line(server)
    except OSError:
        said = {}
    if "pid" not in said:
        server.close()
        for one in (*PASSED_ON, signal.SIGCHLD):
            signal.signal(one, signal.SIG_DFL)
        os.execv(words[0], words)
    server.settimeout(None)
    while "pid" in said:
        script = int(said["pid"])
        while waiting:
            pass_on(waiting.pop(0), None)
        said = _line(server)
        script = 0
    if "status" not in said:
        print("psjob: the process that forks this worker has ended, and the script with it", file=sys.stderr, flush=True)
        return LOST
    return _end(int(said["status"]))


_rest = b""


def _line(server: socket.socket) -> dict[str, int]:
    """What the server says next; empty: it has ended."""
    global _rest
    while b"\n" not in _rest:
        more = server.recv(4096)
        if not more:
            return {}
        _rest += more
    line, _, _rest = _rest.partition(b"\n")
    found: dict[str, int] = json.loads(line)
    return found


def _end(status: int) -> int:
    """By the signal that has ended the script, or with its exit code."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return 128 - code  # the first process of a container outlives its own signals


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
