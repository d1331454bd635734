"""A process that has imported torch and becomes the next shard or worker that is started again, so that its return takes no import.

It is `psjob.process.forkserver` of the runtime, which says whether it can be that process as a new start would be.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from psjob_client.local.children import die_with
from psjob_operator import contract

ROOM: Final = 4 << 30
"""Bytes of memory that must be free: it takes about 300 MB."""
ANSWER_SECONDS: Final = 2.0
READY, TAKEN = b"ready\n", b"taken\n"
PROGRAM: Final = (
    "import sys; sys.flags.safe_path or sys.path.pop(0); from psjob.process import forkserver; forkserver.become(int(sys.argv[1]))"
)


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
            and _free() >= ROOM
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


def _free() -> int:
    """Bytes that programs of this machine can still have; 0 where the system does not say, as macOS."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return 0
