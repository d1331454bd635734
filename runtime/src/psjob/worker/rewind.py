"""A rewind: this process becomes a fresh copy of itself, in place, and joins the job again at the restored clock.

It execs its command again, which imports torch again. Once it has trained for some seconds, a fork server has done so beside it, if there
is room for one. Then it becomes the one that waits for a fork of that (see psjob.process.forkserver).
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from psjob import contract
from psjob.process import forkserver, forkwaiter, limits, startup
from psjob.process.descendants import end_children
from psjob.process.errors import Refused
from psjob.worker import children

APART = 0.5
"""Seconds between workers, which may share a machine: each sees what those before it have taken."""
SERVER, ROOM = 400 << 20, 2 << 30
"""Bytes of memory that must be free: those of a fork server, and as many as the script has, which may still grow; and at most so many."""
_server: tuple[int, socket.socket] | None = None
"""Its process and the socket to it."""
_looked = False
_sent: children.Sent | None = None
"""What began this process, if it is one that multiprocessing has spawned."""


def check_possible() -> None:
    """Raises Refused when this process could not start itself again: a script from stdin, an interactive session, a process of a pool."""
    global _sent
    _sent = _sent or children.sent()
    if _sent is not None:
        return
    words = sys.orig_argv[1:]
    script = [w for w in words if not w.startswith("-")]
    if not words or "-" in words or (not script and "-c" not in words):
        raise Refused(
            "the script came from standard input or a prompt, so it could not be started again after a failure; "
            "save it to a file and run `python train.py`"
        )


def prepare(trained: float) -> None:
    """Start the fork server, once this process has trained for long enough. `trained`: seconds since it has joined."""
    global _looked
    if _looked or trained < _after():
        return
    _looked = True
    room = limits.free()
    wanted = min(ROOM, SERVER + (limits.resident() or ROOM))
    if sys.platform == "linux" and forkserver.talk is None and room is not None and room >= wanted and not _differs():
        _start()


@cache
def _after() -> float:
    """Seconds of training after which this worker looks whether there is room."""
    index = int(startup.ENVIRONMENT.get(contract.ENV_INDEX) or 0)
    return contract.fork_server_after(startup.ENVIRONMENT) + APART * (index % 16)


def _differs() -> bool:
    """Has the script set what libraries read when they are imported, or does Python run it in a way that a fork cannot?"""
    now, then = dict(os.environ), startup.ENVIRONMENT
    names = {name for name in now.keys() | then.keys() if now.get(name) != then.get(name)}
    return (
        multiprocessing.parent_process() is not None
        or any(name.startswith(forkserver.READ_AT_IMPORT) for name in names)
        or forkserver.split(sys.orig_argv[1:]) is None
        or _hides_a_module()
    )


def _hides_a_module() -> bool:
    """Has the script's folder a module of a name of the standard library? The server would have that one."""
    folder = f"{sys.path[0]}/" if sys.path and sys.path[0] and not sys.flags.safe_path else None
    known = [getattr(sys.modules.get(name), "__file__", None) for name in sys.stdlib_module_names]
    return folder is not None and any(file is not None and file.startswith(folder) for file in known)


def _hands_down() -> bool:
    """Has the script open files that a new start would inherit, but for the usual three?"""
    try:
        return any(
            os.get_inheritable(int(fd)) for fd in os.listdir("/proc/self/fd") if int(fd) > 2 and os.path.exists(f"/proc/self/fd/{fd}")
        )
    except OSError:  # one was closed meanwhile
        return True


def _start() -> None:
    global _server
    found = forkserver.split(sys.orig_argv[1:])
    assert found is not None
    ours, theirs = socket.socketpair()
    ours.setblocking(True)  # whatever the script's default is
    theirs.setblocking(True)
    words = [sys.executable, *found[0], str(Path(forkserver.__file__)), str(theirs.fileno())]
    try:
        with theirs:
            child = subprocess.Popen(
                words, env=startup.ENVIRONMENT, cwd=startup.FOLDER, pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
    except OSError:
        ours.close()
        return
    child.returncode = 0  # nobody here waits for it
    _server = child.pid, ours


def _ready() -> bool:
    """Has the fork server imported all, and is it there?"""
    if _server is None:
        return False
    _, sock = _server
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    try:
        return bool(poll.poll(0)) and sock.recv(len(forkserver.READY)) == forkserver.READY
    except OSError:
        return False


def _reset(number: int) -> None:
    """Give a signal its default action. A script may train in a thread, where Python refuses that."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(number, signal.SIG_DFL)
    else:
        action = ctypes.CDLL(None).signal
        action.argtypes, action.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        action(number, None)


def again(rewinds: int, mode: str = "", more: Mapping[str, str] | None = None) -> None:
    """End child processes and start the same command with `rewinds` counted up, in `mode` where one is named. Does not return.

    The folder and the environment are those that the process began with, and `more`. What the script and its libraries set since may
    be meant for this process alone, such as the address of a child.
    """
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):  # torch's loader raises from SIGCHLD when its processes end
        _reset(number)
    if _sent is not None:
        children.flush()
    forks = _ready() and not _hands_down()
    end_children(but=_server[0] if forks and _server is not None else 0)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
    environment = {**startup.ENVIRONMENT, **(more or {}), contract.ENV_REWINDS: str(rewinds + 1)}
    if mode:
        environment[contract.ENV_MODE] = mode
    if forkserver.talk is not None:
        forkserver.say_again(environment)
    os.chdir(startup.FOLDER)
    words = [sys.executable, *sys.orig_argv[1:]] if _sent is None else _sent.words()
    if forks and _server is not None:
        fd = _server[1].fileno()
        os.set_inheritable(fd, True)
        words = [sys.executable, "-I", "-S", str(Path(forkwaiter.__file__)), str(fd), *words]
    os.execve(sys.executable, words, environment)
