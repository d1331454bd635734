"""A process that has imported torch and nothing of the script's, from which a script that begins again is forked.

A worker starts it by its path, with the number of a socket, once it has trained for a while. To begin again the worker execs `fork_waiter`,
which gives back all memory and devices. That asks for a fork, and ends as the script ends. A script that was forked asks in its turn, by
a pipe, and ends.

A fork has the environment, folder, words and open files that the exec would have had. The process holds one thread and no device: if
an import has left more, it ends, and the worker execs its command.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path.pop(0)  # this folder; before anything is imported by a name that lies here too

import gc
import importlib
import json
import mmap
import os
import runpy
import select
import shutil
import signal
import socket
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from psjob.process.system import ChildExits, end_with

READY: Final = b"ready\n"
WORKERS, SHARDS = ("torch", "psjob.api.attach"), ("psjob.shard.server",)
"""What they import, by name: this room is below theirs."""
TAKEN: Final = b"taken\n"
SHARD: Final = ["-m", "psjob.shard"]
AGENT: Final = ["-m", "psjob.agent"]
READ_AT_IMPORT: Final = (
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "VECLIB_", "NUMEXPR_", "NPY_", "NUMPY_", "ATEN_", "DNNL_", "ONEDNN_",
    "TORCH", "PYTORCH_", "LD_", "PYTHON", "MALLOC_", "GLIBC_", "LC_", "LANG", "TZ",
)  # fmt: skip
"""Beginnings of the variables that Python, torch and its libraries read as they start."""
MOST_WORDS: Final = 1 << 20
"""Bytes of what a script says that is to be forked again."""
_WITH_VALUE: Final = ("-X", "-W")
_FLAGS: Final = frozenset("bBdEOPqsSuvI")
"""Options of Python's that have no value and change no meaning of what follows."""

_SCORE: Final = Path("/proc/self/oom_score_adj")

talk: mmap.mmap | None = None
"""Of a script that was forked: memory in which it says that it begins again."""


def split_command(words: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """Options of Python's in a command, and what it runs; None: what that is, a fork could not run in the same way.

    `words` are those of `sys.orig_argv` behind Python itself.
    """
    options: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        word = rest.pop(0)
        if word in _WITH_VALUE and rest:
            options += [word, rest.pop(0)]
        elif word[:2] in _WITH_VALUE or (len(word) > 1 and _FLAGS.issuperset(word[1:])):
            options.append(word)
        else:
            return None
    runs = len(rest) > 1 if rest[:1] == ["-m"] else bool(rest) and Path(rest[0]).is_file() and _is_text(rest[0])
    return (options, rest) if runs else None


def _is_text(path: str) -> bool:
    """Is it no archive and no compiled file?"""
    with open(path, "rb") as file:
        return b"\0" not in file.read(4096)


def say_again(environment: Mapping[str, str]) -> None:
    """Have this forked script forked again with that environment, and end. Comes back if that is too large."""
    said = json.dumps(dict(environment)).encode()
    if talk is None or len(said) >= len(talk):
        return
    talk[: len(said)] = said
    os._exit(0)


def main(number: int) -> None:
    """Import, serve, and come back in the fork that is the script, once that has ended."""
    server = socket.socket(fileno=number)
    os.setpgid(0, 0)  # a signal to the worker's group is passed on by the worker
    for one, usually in ((signal.SIGCHLD, signal.SIG_DFL), (signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        signal.signal(one, usually)  # as for an exec, whatever the script has set
    usual = _score()
    _set_score("1000")  # where memory is short, this process is the one to go
    _import(WORKERS)
    if not can_fork():
        os._exit(1)
    asked, files = _asked(server)
    _serve(server, {**asked, "score": usual}, files)


def can_fork() -> bool:
    """Has this process one thread? What it holds is then shared with its forks as far as it can be."""
    if not (probe := os.fork()):  # libraries of linear algebra end their threads before a fork
        os._exit(0)
    os.waitpid(probe, 0)
    gc.collect()
    gc.freeze()
    return len(os.listdir("/proc/self/task")) == 1


def become(number: int) -> None:
    """Import what a shard and a worker need, and be the one that is asked for. Comes back once that has ended."""
    server = socket.socket(fileno=number)
    usual = _score()
    _set_score("1000")
    began, place = dict(os.environ), os.getcwd()
    _import((*WORKERS, *SHARDS))
    asked, files = _asked(server)
    if not _is_same(asked["words"], asked["folder"], began, asked["environment"], place):
        os._exit(0)
    for target, source in enumerate(files):
        os.dup2(source, target)
        os.close(source)
    _set_score(usual)
    server.sendall(TAKEN)
    server.close()
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    _become(asked["words"], asked["folder"], asked["environment"])


def _is_same(words: Sequence[str], folder: str, began: Mapping[str, str], environment: Mapping[str, str], place: str) -> bool:
    """Can this process, which began in a place with an environment, be what the command would be?"""
    python = shutil.which(words[0], path=environment.get("PATH"))
    relative = any(not os.path.isabs(entry) for entry in environment.get("PYTHONPATH", "/").split(os.pathsep))
    try:
        os.chdir(folder)
        # Environments link to one Python, and differ by the folder of the link.
        if python is None or not all(
            map(os.path.samefile, (python, os.path.dirname(python)), (sys.executable, os.path.dirname(sys.executable)))
        ):
            return False
        if relative and not os.path.samefile(folder, place):
            return False
    except OSError:
        return False
    found = split_command(words[1:])
    if found is not None and found[1][:2] == AGENT:
        return False  # it imports no torch
    names = {name for name in began.keys() | environment.keys() if began.get(name) != environment.get(name)}
    if found is not None and found[1][:2] == SHARD:  # its threads are one, whatever this says
        names = {name for name in names if not name.endswith("_NUM_THREADS")}
    return found is not None and not found[0] and not any(name.startswith(READ_AT_IMPORT) for name in names)


def _asked(server: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Say that all is imported; what is asked then, and the open files that go with it. Ends where nobody will ask."""
    server.sendall(READY)
    raw, files, _, _ = socket.recv_fds(server, 1 << 16, 3)
    while raw and not raw.endswith(b"\n"):
        more = server.recv(1 << 16)
        raw = raw + more if more else b""
    if not raw:
        os._exit(0)
    return json.loads(raw), files


def _import(names: Sequence[str]) -> None:
    for name in names:
        importlib.import_module(name)


def _score() -> str:
    try:
        return _SCORE.read_text().strip()
    except OSError:
        return "0"


def _set_score(score: str) -> None:
    try:
        _SCORE.write_text(score)
    except OSError:  # some sandboxes let nobody write it
        pass


def _serve(server: socket.socket, asked: dict[str, Any], files: Sequence[int]) -> None:
    """Fork what is asked, again and again; comes back in a fork only."""
    global talk
    for target, source in enumerate(files):
        os.dup2(source, target)
        os.close(source)
    _set_score(asked["score"])
    ends, me = ChildExits(), os.getpid()
    while True:
        talk = mmap.mmap(-1, MOST_WORDS)
        try:
            pid = os.fork()
        except OSError:  # no memory, or too many processes
            _say_to(server, {"exec": asked["environment"]})
            os._exit(1)
        if pid == 0:
            ends.close()
            server.close()
            end_with(me)
            sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
            _become(asked["words"], asked["folder"], asked["environment"])
            return
        _say_to(server, {"pid": pid, "environment": asked["environment"]})
        status = _wait(pid, server, ends)
        said = bytes(talk).rstrip(b"\0")
        talk.close()
        if status != 0 or not said:
            _say_to(server, {"status": status})
            os.killpg(0, signal.SIGKILL)  # with what the script has left behind
        asked["environment"] = json.loads(said)


def _say_to(server: socket.socket, what: Mapping[str, Any]) -> None:
    server.sendall(json.dumps(what).encode() + b"\n")


def _wait(pid: int, server: socket.socket, ends: ChildExits) -> int:
    """The status of the fork, which ends if who waits for it has gone."""
    poll = select.poll()
    poll.register(ends, select.POLLIN)
    poll.register(server, select.POLLIN)
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        for fd, _ in poll.poll():
            if fd == ends.fileno():
                ends.heard()
            elif not server.recv(4096):
                os.killpg(0, signal.SIGKILL)
    _say_to(server, {"ended": pid})  # while nobody else can have its number
    return os.waitpid(pid, 0)[1]


def _become(words: Sequence[str], folder: str, environment: Mapping[str, str]) -> None:
    """Be the script of this command, until it has ended. Raises SystemExit."""
    from psjob.process import forkserver, startup

    os.chdir(folder)
    found = split_command(words[1:])
    if found is None:  # it has gone meanwhile, which Python says in its own words
        os.execve(sys.executable, list(words), dict(environment))
    os.environ.clear()
    os.environ.update(environment)
    vars(startup).update(FOLDER=folder, ENVIRONMENT=dict(environment))
    vars(forkserver)["talk"] = talk  # this file is __main__, and not the module that others import
    sys.orig_argv = list(words)
    startup.begin_worker(os.environ)  # as when psjob was imported, with another environment
    if "numpy" in sys.modules:  # random and torch look after themselves
        sys.modules["numpy"].random.seed()
    _, rest = found
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    globals()["__name__"] = "psjob.process.forkserver"  # the script is the only __main__ among the frames
    try:
        if rest[0] == "-m":
            sys.argv = ["-m", *rest[2:]]
            _first_path(folder)
            runpy._run_module_as_main(rest[1])  # type: ignore[attr-defined]
        else:
            sys.argv = list(rest)
            _first_path(str(Path(rest[0]).resolve().parent))
            path = rest[0] if os.path.isabs(rest[0]) else f"{folder}/{rest[0]}"
            code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
            runpy._run_code(code, vars(main), None, "__main__", None, None, path)  # type: ignore[attr-defined]
    except SystemExit:
        raise
    except BaseException as error:
        _say(error)
        raise SystemExit(128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1) from None


def _first_path(place: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, place)


def _say(error: BaseException) -> None:
    """The error as Python says it, without the frames of this module."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    try:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except BaseException:
        traceback.print_exc()


if __name__ == "__main__":
    main(int(sys.argv[1]))
