"""`psjob run` from a process that has imported torch already: jobs of many short scripts take a second each.

The processes of a job are processes, with signals, files and sockets of their own. They are forks of one that has done their imports,
so what is measured of their start is not what a user sees. A worker that rewinds runs a Python of its own, as anywhere.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import multiprocessing
import multiprocessing.process
import os
import runpy
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn
from unittest import mock

from hack.testing import cost

PRELOADED = ["tests.support.warm_imports"]
LIGHT = ["psjob_client.cli.main", "psjob_client.local.run", "psjob.process.startup", "psjob.worker.exits", "http.server"]
"""For commands and for processes that need no torch."""
COMPILING = ["tests.support.compiling_imports"]
"""For processes in which torch's own optimizers make steps, stages are cut, or a dispatch mode is used."""
STARTING = {"psjob_client.cli.main", "psjob.agent"}
"""Modules whose programs start Python programs in their turn."""
SECONDS = 120.0
ROOT = Path(__file__).resolve().parents[2]


def run(
    folder: Path,
    argv: Sequence[str],
    environment: Mapping[str, str] | None = None,
    seconds: float = SECONDS,
    preloaded: Sequence[str] = PRELOADED,
) -> tuple[int, str]:
    """Run `psjob ARGV` in `folder`; exit code, and what it printed. Raises AssertionError if it does not end in time."""
    return call(folder, "psjob_client.cli.main", argv, environment, seconds, preloaded)


def call(
    folder: Path,
    module: str,
    argv: Sequence[str],
    environment: Mapping[str, str] | None,
    seconds: float,
    preloaded: Sequence[str] = PRELOADED,
) -> tuple[int, str]:
    """Run `python -m MODULE ARGV` in `folder`, as `run`; `preloaded` are imported before, once for all calls with the same."""
    output = folder / "output.txt"
    process = start(folder, module, argv, environment, output, output, preloaded)
    try:
        return process.wait(seconds), output.read_text()
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        raise AssertionError(f"psjob {' '.join(argv)} did not end in {seconds:.0f} s:\n{output.read_text()[-4000:]}") from None


class Started:
    """A program that was started: the part of `subprocess.Popen` that tests use. What it prints goes into files."""

    def __init__(self, process: Any, output: Path, told: Path) -> None:
        self._process = process
        self._files = output, told
        self.pid: int = process.pid

    @property
    def returncode(self) -> int | None:
        """As Popen's: minus the signal that ended it; None while it runs."""
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        """The same."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it printed on both streams, when it has ended. Raises TimeoutExpired."""
        self.wait(timeout)
        output, told = (file.read_text() for file in self._files)
        return output, told

    def send_signal(self, number: int) -> None:
        """To it alone; nothing where it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def start(
    folder: Path,
    module: str,
    argv: Sequence[str],
    environment: Mapping[str, str] | None,
    output: Path,
    told: Path,
    preloaded: Sequence[str] = PRELOADED,
) -> Started:
    """Start `python -m MODULE ARGV` in `folder`; it prints into these files."""
    return start_python(folder, ["-m", module, *argv], environment, output, told, preloaded)


def start_python(
    folder: Path,
    words: Sequence[str],
    environment: Mapping[str, str] | None,
    output: Path,
    told: Path,
    preloaded: Sequence[str] = PRELOADED,
    stdin: Connection | None = None,
) -> Started:
    """Start `python WORDS` in `folder`: `-m MODULE`, `-c TEXT` or a script, and its arguments. It reads `stdin`, the end of a pipe."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    process = fork(_command, str(folder), list(words), env, str(output), str(told), stdin, preloaded=preloaded)
    process.start()
    return Started(process, output, told)


class _Server(forkserver.ForkServer):
    """Of these imports. Forks of the process that has started it may ask it too."""

    def __init__(self, preloaded: Sequence[str]) -> None:
        super().__init__()
        self._owner = os.getpid()
        self.set_forkserver_preload(list(preloaded))
        # It imports from this checkout, wherever the test is and whatever it has put before psjob.
        with mock.patch.dict(os.environ, PYTHONPATH=str(ROOT)):
            super().ensure_running()

    def ensure_running(self) -> None:
        """Only its parent can wait for it, and start it again."""
        if self._owner == os.getpid():
            super().ensure_running()
        else:
            resource_tracker.ensure_running()


_servers: dict[tuple[str, ...], _Server] = {}


def prepare(preloaded: Sequence[str] = PRELOADED) -> None:
    """Begin these imports, once for this process and for all that it forks."""
    if tuple(preloaded) not in _servers:
        _servers[tuple(preloaded)] = _Server(preloaded)


def fork(work: Callable[..., Any], *args: Any, preloaded: Sequence[str] = PRELOADED) -> Any:
    """A process, to be started, that does `work(*args)`, by the server of these imports."""
    prepare(preloaded)
    server = _servers[tuple(preloaded)]
    forkserver._forkserver = server  # type: ignore[attr-defined]
    forkserver.connect_to_new_process = server.connect_to_new_process
    return multiprocessing.get_context("forkserver").Process(target=_counted, args=(work, os.environ.get(cost.LEDGER), *args))


def _counted(work: Callable[..., Any], ledger: str | None, *args: Any) -> None:
    try:
        work(*args)
    finally:
        cost.note(ledger)


def _command(folder: str, words: list[str], env: dict[str, str], output: str, told: str, stdin: Connection | None) -> None:
    files = [os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644) for name in (output, told)]
    subprocess.Popen = Warm  # type: ignore[misc]
    _become([sys.executable, *words], env, folder, (0 if stdin is None else stdin.fileno(), *files), ledger=env.get(cost.LEDGER))


class Warm(subprocess.Popen[Any]):
    """Starts a Python program as a fork of this process, and anything else as ever."""

    def _execute_child(self, args: Any, executable: Any, *rest: Any) -> None:
        words = [str(word) for word in args]
        if not Path(words[0]).name.startswith("python") or len(words) < 2 or (words[1].startswith("-") and words[1] != "-m"):
            super()._execute_child(args, executable, *rest)  # type: ignore[misc]
            return
        preexec, kept, cwd, env = rest[0], rest[2], rest[3], rest[4]
        read_in, _, _, write_out, _, write_err = rest[8:14]
        pid = os.fork()
        if pid == 0:
            if STARTING.isdisjoint(words):
                subprocess.Popen = Warm.__bases__[0]  # type: ignore[misc]
            _become(words, dict(os.environ if env is None else env), cwd, (read_in, write_out, write_err), preexec, kept=kept)
        self.pid = pid
        self._child_created = True


def _become(
    words: list[str],
    env: dict[str, str],
    folder: str | None,
    files: tuple[int, ...],
    before: Any = None,
    ledger: str | None = None,
    kept: Collection[int] = (),
) -> NoReturn:
    """Be the Python program of `words` from here on, and say in `ledger` what it cost."""
    code = 70
    try:
        os.setsid()
        if before is not None:
            before()
        for target, source in enumerate(files):
            os.dup2(source if source >= 0 else target, target)
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number not in kept:
                with contextlib.suppress(OSError):  # the listing's own
                    os.close(number)
        _forget()
        os.environ.clear()
        os.environ.update(env)
        if folder is not None:
            os.chdir(folder)
        code = _run(words)
    except SystemExit as end:
        code = _code(end)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        with contextlib.suppress(OSError):
            cost.note(ledger)
        os._exit(code)


def _forget() -> None:
    """What belongs to the process that this one is a fork of."""
    asyncio._set_running_loop(None)
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    refusals = sys.modules.get("psjob.process.errors")
    if refusals is not None:
        atexit.register(refusals._end_refused)
    resource_tracker._resource_tracker.__init__()  # type: ignore[misc] # its pipe is closed
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined] # it is a program of its own
    multiprocessing.set_start_method("fork", force=True)  # as on Linux until Python 3.14
    sys.excepthook = sys.__excepthook__
    # What they were before would close the files of these numbers when it is collected.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = open(1, "w", buffering=1, closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


@functools.cache
def _runtime() -> tuple[types.ModuleType, types.ModuleType]:
    """Those of this checkout, also where PYTHONPATH names another psjob."""
    from psjob.process import startup
    from psjob.worker import exits

    return startup, exits


def _run(words: list[str]) -> int:
    startup, exits = _runtime()
    vars(startup).update(FOLDER=os.getcwd(), ENVIRONMENT=dict(os.environ))
    sys.orig_argv = list(words)
    if words[1] not in ("-m", "-c") and "torch" in sys.modules:
        from psjob.process import startup

        startup.begin_worker(os.environ)
    for place in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if place and place not in sys.path:
            sys.path.insert(0, place)
            _replace(Path(place))
    if words[1] == "-m":
        sys.argv = [words[2], *words[3:]]
        sys.path.insert(0, os.getcwd())
        sys.modules.pop(words[2], None)
        vars(exits)["_outermost"] = _frame_of("__main__")
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        return 0
    if words[1] == "-c":
        sys.argv = ["-c", *words[3:]]
        sys.path.insert(0, "")
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        vars(exits)["_outermost"] = _frame_of("__main__")
        exec(compile(words[2], "<string>", "exec"), main.__dict__)  # noqa: S102
        return 0
    script = str(Path(words[1]).absolute())
    sys.argv = [words[1], *words[2:]]
    sys.path.insert(0, str(Path(script).parent))
    vars(exits)["_outermost"] = _frame_of("__main__")
    runpy.run_path(script, run_name="__main__")
    return 0


def _replace(place: Path) -> None:
    """Packages in `place` come before those of their names that are imported already."""
    for package in place.glob("*/__init__.py"):
        name = package.parent.name
        if getattr(sys.modules.get(name), "__file__", None) not in (None, str(package)):
            for module in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
                del sys.modules[module]


def _frame_of(name: str) -> Any:
    """For `exits`: the outermost frame is the script's own."""

    def outermost() -> FrameType | None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        found = None
        while frame is not None:
            if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == name:
                found = frame
            frame = frame.f_back
        return found

    return outermost


def _code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 255
    print(end.code, file=sys.stderr)
    return 1
