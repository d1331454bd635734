"""A rewind: this process becomes a fresh copy of itself, in place, and joins the job again at the restored clock.

It execs its command again, which imports torch again. Once it has trained for some seconds, a fork server has done so beside it, if there
is room for one. Then it becomes the one that waits for a fork of that (see psjob.process.forkserver).

A process that was spawned, or forked by multiprocessing's own server, has read its target and arguments from its parent. When it attaches
they are written once more, for itself, as multiprocessing writes them. A rewind execs Python, which reads them as it did at first: to the
parent it is the same process, and its exit code is the script's.

A forked process has nothing that was sent. It runs the whole script again, so what it hands to its parent would be lost. Of several
processes of one worker only one may attach: to the job the others would be that worker too.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import multiprocessing
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from multiprocessing import context, managers, queues, reduction, resource_tracker, spawn, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from psjob import contract
from psjob.process import fork_waiter, forkserver, startup, system
from psjob.process.config import ProcessContext
from psjob.process.errors import Refused
from psjob.process.system import end_children

APART = 0.5
"""Seconds between workers, which may share a machine: each sees what those before it have taken."""
SERVER, ROOM = 400 << 20, 2 << 30
"""Bytes of memory that must be free: those of a fork server, and as many as the script has, which may still grow; and at most so many."""
_server: tuple[int, socket.socket] | None = None
"""Its process and the socket to it."""
_looked = False
_sent: Sent | None = None
"""What began this process, if it is one that multiprocessing has spawned."""


def check_possible() -> None:
    """Raises Refused when this process could not start itself again: a script from stdin, an interactive session, a process of a pool."""
    global _sent
    _sent = _sent or sent_by_waiter()
    if _sent is not None:
        return
    words = sys.orig_argv[1:]
    script = [w for w in words if not w.startswith("-")]
    if not words or "-" in words or (not script and "-c" not in words):
        raise Refused(
            "the script came from standard input or a prompt, so it could not be started again after a failure; "
            "save it to a file and run `python train.py`"
        )


def prepare_fork_server(trained: float) -> None:
    """Start the fork server, once this process has trained for long enough. `trained`: seconds since it has joined."""
    global _looked
    if _looked or trained < _after():
        return
    _looked = True
    room = system.memory_left()
    wanted = min(ROOM, SERVER + (system.resident_memory() or ROOM))
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
        or forkserver.split_command(sys.orig_argv[1:]) is None
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
    found = forkserver.split_command(sys.orig_argv[1:])
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


def start_again(rewinds: int, mode: str = "", more: Mapping[str, str] | None = None) -> None:
    """End child processes and start the same command with `rewinds` counted up, in `mode` where one is named. Does not return.

    The folder and the environment are those that the process began with, and `more`. What the script and its libraries set since may
    be meant for only this process, such as the address of a child.
    """
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):  # torch's loader raises from SIGCHLD when its processes end
        _reset(number)
    if _sent is not None:
        flush()
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
        words = [sys.executable, "-I", "-S", str(Path(fork_waiter.__file__)), str(fd), *words]
    os.execve(sys.executable, words, environment)


POOLS = ("concurrent.futures.process", "multiprocessing.pool", "torch.multiprocessing.pool", "joblib.externals.loky.process_executor")
"""Their processes take one task after the other."""
QUEUES = -5
"""Priority of a queue's finalizer."""
FLUSH_SECONDS = 5.0
BEGIN = (
    "import sys; from multiprocessing import resource_tracker as t, spawn; "
    "t._resource_tracker._fd = {tracker}; sys.exit(spawn._main({sent}, {parent}))"
)
"""What `multiprocessing.spawn.spawn_main` does, but for one file where that has two."""


@dataclass(frozen=True)
class Sent:
    """What this process began with: `file` has it, `inherited` are the other files that it names."""

    file: int
    inherited: tuple[int, ...]

    def words(self) -> list[str]:
        """The command that begins again as this process began; its files are left open over an exec."""
        os.lseek(self.file, 0, os.SEEK_SET)
        parent = multiprocessing.parent_process()
        sentinel: int = parent._sentinel  # type: ignore[union-attr]
        tracker: int | None = resource_tracker._resource_tracker._fd  # type: ignore[attr-defined]
        for file in (self.file, sentinel, *self.inherited, *(() if tracker is None else (tracker,))):
            os.set_inheritable(file, True)
        begin = BEGIN.format(tracker=tracker, sent=self.file, parent=sentinel)
        flags: list[str] = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
        return [sys.executable, *flags, "-c", begin, "--multiprocessing-fork"]


def flush() -> None:
    """Let queues send what was put into them: an exec would lose it, and with it the lock that a queue holds as it writes."""
    flushing = threading.Thread(target=util._run_finalizers, args=(QUEUES,), daemon=True)  # type: ignore[attr-defined]
    flushing.start()
    flushing.join(FLUSH_SECONDS)


class _Sending:
    """What multiprocessing asks about the process for which it writes."""

    def __init__(self) -> None:
        self.files: list[int] = []

    def duplicate_for_child(self, file: int) -> int:
        """A copy, which stays open when the script closes its own."""
        self.files.append(os.dup(file))
        return self.files[-1]

    class DupFd:
        """A file that the process inherits."""

        def __init__(self, file: int) -> None:
            self.file = file

        def detach(self) -> int:
            os.set_inheritable(self.file, False)
            return self.file


CLAIM_SECONDS = 15.0
"""So long a process that has gone may take to give back its memory, and then its place."""
EXITING = 0x4
"""PF_EXITING of Linux, in the flags of /proc/PID/stat."""
_held: socket.socket | None = None
"""By its name this process holds its place."""


def claim_place(place: ProcessContext) -> None:
    """Hold this place in the job until this process ends or begins again.

    Nothing is held where sockets have no abstract names, as on macOS, and for a place that no file describes.

    Raises:
        Refused: another process of this worker holds it.
    """
    global _held
    job = (place.run, place.rank, place.number, place.config_path, place.config.shards)
    name = f"\0psjob-{hashlib.sha256(repr(job).encode()).hexdigest()[:32]}"
    if sys.platform != "linux" or not place.config_path or _held is not None:
        return
    held, until = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), time.monotonic() + CLAIM_SECONDS
    while not _bound(held, name):
        if time.monotonic() < until and _is_going(name):
            time.sleep(0.1)
            continue
        held.close()
        raise Refused(
            f"another process of worker {place.index} has attached. Processes that train side by side are those of "
            "spec.workers.processes; leave multiprocessing out, or let it start one process"
        )
    _held = held


def _bound(held: socket.socket, name: str) -> bool:
    try:
        held.bind(name)
        held.listen()
    except OSError as error:
        return error.errno != errno.EADDRINUSE  # without such names there is nothing to hold
    return True


def _is_going(name: str) -> bool:
    """Is the process that holds this name killed, or not to be seen?"""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(1.0)
        try:
            asking.connect(name)
            pid, _, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
            flags = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6])
            signals = re.findall(r"^(?:Sig|Shd)Pnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        except (OSError, IndexError, ValueError):
            return True
    return bool(flags & EXITING) or any(int(pending, 16) >> (signal.SIGKILL - 1) & 1 for pending in signals)


def _let_go() -> None:
    """In a fork, which may outlive the process that trains."""
    global _held
    if _held is not None:
        _held.close()
        _held = None


os.register_at_fork(after_in_child=_let_go)


def sent_by_waiter() -> Sent | None:
    """What this process was sent, None if it is the script's first process or a fork of that.

    Raises:
        Refused: this process could not be started again, or what it makes would be lost.
    """
    if multiprocessing.parent_process() is None:
        return None
    this = multiprocessing.current_process()
    target = getattr(this, "_target", None)
    if getattr(target, "__module__", None) in POOLS:
        raise Refused(
            f"{this.name} is a process of a pool. After a restart its task would not be given to it again; "
            "train in the script itself or in a multiprocessing.Process"
        )
    if (getattr(this, "_start_method", None) or multiprocessing.get_start_method()) == "fork":
        _check_fork(this)
        return None
    return _written(this)


def _check_fork(this: Any) -> None:
    for held in (*getattr(this, "_args", ()), *getattr(this, "_kwargs", {}).values(), *vars(this).values()):
        if isinstance(held, (queues.Queue, queues.SimpleQueue, Connection, managers.BaseProxy)):
            raise Refused(
                f"{this.name} was forked and has a {type(held).__name__} of its parent. After a restart the whole script runs in it "
                "again. Nothing would come out of that; start it by multiprocessing.get_context('spawn').Process"
            )


def _written(this: Any) -> Sent:
    sending = _Sending()
    file = os.memfd_create("psjob-sent") if sys.platform == "linux" else os.dup(tempfile.TemporaryFile().fileno())  # noqa: SIM115
    context.set_spawning_popen(sending)  # type: ignore[arg-type]
    try:
        with os.fdopen(os.dup(file), "wb") as writing:
            reduction.dump({**spawn.get_preparation_data(this.name), "dir": startup.FOLDER}, writing)
            reduction.dump(this, writing)
    except Exception as error:  # whatever the script's objects raise
        os.close(file)
        raise Refused(
            f"{this.name} could not be started again after a failure. Its target and arguments cannot be sent once more "
            f"({type(error).__name__}: {str(error)[:200]}). Train in the script itself, or pass what can be pickled"
        ) from None
    finally:
        context.set_spawning_popen(None)
    return Sent(file, tuple(sending.files))
