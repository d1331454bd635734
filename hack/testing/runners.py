"""A pytest plugin: tests are collected once, then run by forks of this process (`--runners N`).

Test modules, torch and the frameworks are imported once and not once a worker. Each fork is a runner: it is told a test, runs it as pytest
does, and sends its reports back. A runner that dies, or does not end a test in time, is that test's failure; another fork takes its place.
`hack.testing.turns` decides who takes which test. Without `--runners`, and on other systems than Linux, pytest runs them itself.

pytest-xdist collects in each of its workers, so that twenty seconds of imports are paid once a worker; pytest-forked, which forks
once a test, has been archived by its authors.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest

from hack.cluster.proc import die_with_parent
from hack.testing import cost
from hack.testing.turns import Load, Test, Turns

NUMBER = "PSJOB_TEST_RUNNER"
"""Environment of a runner: its number."""
WHOLE = ("tests/integration/", "tests/load/")
"""Folders whose files are never divided between runners: their tests share jobs that are created together."""
MOST_OBJECTS = 100_000
"""That a runner's collector looks through."""
PATIENCE = 30.0
"""Seconds that a test has beyond its time-out, and fixtures of the whole run have to end, until their runner is killed."""

LOADS = {
    "tests/unit/": Load(cores=1.0, memory=0.2, seconds=0.02),
    "tests/simulation/": Load(cores=1.0, memory=0.2, seconds=0.2),
    "tests/tensors/": Load(cores=1.0, memory=0.5, seconds=0.1),
    "tests/live/": Load(cores=1 / 3, memory=0.7, seconds=0.8),
    "tests/integration/": Load(cores=1 / 3, memory=0.7, seconds=2.0),
    "tests/docs/": Load(cores=1 / 2, memory=1.0, seconds=1.0),
    "tests/": Load(cores=2 / 3, memory=2.0, seconds=12.0),
}
"""How heavy the tests of a folder are; the first that matches a test's node id holds. Jobs start up to eight processes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("runners")
    group.addoption("--runners", type=int, default=0, metavar="N", help="collect once, then run tests in N forks of this process (Linux)")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    wanted = session.config.getoption("runners")
    if wanted < 0:
        raise pytest.UsageError(f"--runners {wanted}: name how many processes run tests, or 0 for this one")
    runners = min(wanted, len(session.items))
    if runners < 1 or sys.platform != "linux" or session.config.option.collectonly:
        return None
    if session.testsfailed and not session.config.option.continue_on_collection_errors:
        raise session.Interrupted(f"{session.testsfailed} error(s) during collection")
    Loop(session, runners).run()
    return True


@dataclass
class Runner:
    """A fork that runs tests, as the process that forked it sees it."""

    pid: int
    line: socket.socket
    running: int | None = None
    last: int | None = None
    before: int | None = None
    """What it ran before `last`: its threads and timers may still be there."""
    since: float = 0.0
    dismissed: bool = False
    unread: bytearray = field(default_factory=bytearray)


class Loop:
    """Hands out all tests of a session and takes their reports."""

    def __init__(self, session: pytest.Session, runners: int) -> None:
        self._session = session
        self._items = session.items
        self._turns = Turns(
            [Test(item.path.as_posix(), load_of(item), item.nodeid.startswith(WHOLE)) for item in self._items], runners, room()
        )
        self._selector = selectors.DefaultSelector()
        self._runners: dict[int, Runner] = {}
        self._count = runners

    def run(self) -> None:
        """Raises what pytest's own loop raises when the session stops early."""
        self._session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined] # one folder for all runners
        gc.collect()
        gc.freeze()  # what was collected stays shared between the forks
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends this process ends its tests
        try:
            for number in range(self._count):
                self._fork(number)
            while self._runners:
                self._hand_out()
                for key, _ in self._selector.select(timeout=1.0):
                    self._hear(key.data)
                self._end_late()
                self._find_ended()
        except BaseException:
            self._kill_all()
            raise
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)

    def _hand_out(self) -> None:
        if self._session.shouldfail or self._session.shouldstop:
            self._turns.drop()
        idle = [number for number, runner in self._runners.items() if runner.running is None and not runner.dismissed]
        for number, index in self._turns.begin(idle):
            runner = self._runners[number]
            runner.before = runner.last
            runner.running = runner.last = index
            runner.since = time.monotonic()
            _tell(runner.line, {"run": index, "then": self._turns.ahead(number)})
        for runner in self._runners.values():
            if runner.running is None and not runner.dismissed and not self._turns.left:
                runner.dismissed, runner.since = True, time.monotonic()
                _tell(runner.line, {"run": None, "then": None})

    def _hear(self, number: int) -> None:
        runner = self._runners[number]
        data = b""
        with contextlib.suppress(ConnectionError):
            data = runner.line.recv(1 << 20)
        if not data:
            self._died(number, runner)
        else:
            self._read(number, runner, data)

    def _find_ended(self) -> None:
        """A runner's line does not end with it if a process that a test has forked still holds the other end."""
        for number, runner in list(self._runners.items()):
            if os.waitid(os.P_PID, runner.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            with contextlib.suppress(BlockingIOError, ConnectionError):
                while data := runner.line.recv(1 << 20, socket.MSG_DONTWAIT):
                    self._read(number, runner, data)
            self._died(number, runner)

    def _read(self, number: int, runner: Runner, data: bytes) -> None:
        runner.unread += data
        *lines, rest = runner.unread.split(b"\n")
        runner.unread = bytearray(rest)
        for line in lines:
            self._take(number, runner, json.loads(line))

    def _take(self, number: int, runner: Runner, said: dict[str, Any]) -> None:
        hook = self._session.config.hook
        if "report" in said:
            report = hook.pytest_report_from_serializable(config=self._session.config, data=said["report"])
            if isinstance(report.longrepr, list):  # of a skipped test: file, line, reason
                report.longrepr = tuple(report.longrepr)
            hook.pytest_runtest_logreport(report=report)
        elif "warning" in said:
            _record(hook, said["warning"])
        elif "error" in said:  # of fixtures that end late
            self._fail(said["index"], said["error"], "teardown")
        elif "slowness" in said:
            self._session.config.stash.setdefault(SLOWNESS, []).append(said["slowness"])
        else:
            self._session.config.stash.setdefault(CPU, {})[self._items[said["done"]].nodeid] = said["cpu"]
            runner.running = None
            self._turns.end(number)

    def _died(self, number: int, runner: Runner) -> None:
        status = self._forget(number, runner)
        self._turns.end(number)
        if status or runner.running is not None or not runner.dismissed:
            ended = f"signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"exit code {status}"
            when = "while the test ran" if runner.running is not None else "after the test, while fixtures ended or it waited for another"
            if runner.running is not None and runner.before is not None:
                when += f". Before it, this process ran {self._items[runner.before].nodeid}"
            index = runner.running if runner.running is not None else runner.last
            if index is None:
                raise pytest.UsageError(f"a process that runs tests ended with {ended} before its first test; its last words are above")
            self._fail(index, f"the process that ran this test ended with {ended} {when}", "call")
        if self._turns.left:
            self._fork(number)

    def _fail(self, index: int, sentence: str, when: Any) -> None:
        item = self._items[index]
        report = pytest.TestReport(item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "failed", sentence, when)
        self._session.config.hook.pytest_runtest_logreport(report=report)

    def _end_late(self) -> None:
        for runner in self._runners.values():
            limit = 0.0 if runner.running is None else time_out(self._items[runner.running])
            if (limit or runner.dismissed) and time.monotonic() - runner.since > limit + PATIENCE:
                _kill(runner.pid)  # its line ends, which is told as the test's failure

    def _fork(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            for other in self._runners.values():
                other.line.close()
            self._runners = {}  # tests look at all that the functions under way hold, as psjob does in a script
            ours.close()
            _serve(self._session, number, theirs)
        theirs.close()
        self._runners[number] = Runner(pid, ours)
        self._selector.register(ours, selectors.EVENT_READ, number)

    def _forget(self, number: int, runner: Runner) -> int:
        """Its exit code, minus the signal that ended it."""
        self._selector.unregister(runner.line)
        runner.line.close()
        del self._runners[number]
        return os.waitstatus_to_exitcode(os.waitpid(runner.pid, 0)[1])

    def _kill_all(self) -> None:
        for number, runner in list(self._runners.items()):
            _kill(runner.pid)
            self._forget(number, runner)


CPU = pytest.StashKey[dict[str, float]]()
"""Processor seconds of each test that has ended, by its node id."""
SLOWNESS = pytest.StashKey[list[float]]()
"""How slow the processor was in its runner, now and then while the tests ran."""


def load_of(item: pytest.Item) -> Load:
    """By the folder where it lies, and its mark `serial`."""
    path = item.nodeid
    load = next((load for prefix, load in LOADS.items() if path.startswith(prefix)), Load(cores=1.0, memory=0.5))
    return Load(load.cores, load.memory, load.seconds, alone=True) if item.get_closest_marker("serial") else load


def room() -> Load:
    """What this machine has for tests: half more than its cores, since most tests wait, and two thirds of its memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Load(cores=1.5 * cores, memory=available_gib() * 2 / 3)


def available_gib() -> float:
    """Memory that programs may still take, in GiB; half of the machine's where the system does not tell, as on macOS."""
    if not os.path.exists("/proc/meminfo"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**31
    with open("/proc/meminfo") as file:
        kib = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))
    return kib / 2**20


def time_out(item: pytest.Item) -> float:
    """Seconds that pytest-timeout gives the test; 0 without a limit."""
    marker = item.get_closest_marker("timeout")
    if marker is not None:
        return float(marker.args[0] if marker.args else marker.kwargs.get("timeout", 0))
    return float(item.config.getoption("timeout", None) or item.config.getini("timeout") or 0)


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _record(hook: Any, said: dict[str, Any]) -> None:
    """Tell pytest of a runner's warning."""
    category = type(said["category"], (Warning,), {})
    message = warnings.WarningMessage(said["message"], category, said["filename"], said["lineno"])
    location = said["location"] and tuple(said["location"])
    words = {"warning_message": message, "when": said["when"], "nodeid": said["nodeid"], "location": location}
    hook.pytest_warning_recorded.call_historic(kwargs=words)


def _tell(line: socket.socket, said: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a runner that died is heard as such
        line.sendall(json.dumps(said, default=str).encode() + b"\n")


# ---- inside a runner -----------------------------------------------------------------------------------------------------------------


def _serve(session: pytest.Session, number: int, line: socket.socket) -> NoReturn:
    code = 1
    try:
        die_with_parent()  # in a group of its own
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ[NUMBER] = str(number)
        _become_a_runner(session, number, line)
        _run_all(session, line)
        code = 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        with contextlib.suppress(OSError):
            line.close()
        os._exit(code)


def _become_a_runner(session: pytest.Session, number: int, line: socket.socket) -> None:
    config = session.config
    signal.signal(signal.SIGINT, signal.default_int_handler)
    terminal = config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(_Terminal(terminal), "terminalreporter")
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:  # its files are shared with the other forks
        capture.stop_global_capturing()
        capture.start_global_capturing()
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"runner-{number}"
    factory._basetemp.mkdir(mode=0o700, exist_ok=True)
    os.environ[cost.LEDGER] = str(factory._basetemp / "costs")
    reports = _Reports(config)
    config.pluginmanager.register(reports, "runner-reports")  # which is told all warnings so far
    reports.line = line


def _set_aside() -> None:
    """What tests have imported and kept is not looked through again by what asks the collector for objects: later tests cost the same."""
    if len(gc.get_objects()) > MOST_OBJECTS:
        gc.collect()
        gc.freeze()


class _Terminal:
    """Where pytest-timeout writes what threads did; results go to the process that forked this one."""

    def __init__(self, terminal: Any) -> None:
        self._tw = terminal._tw


class _Reports:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.line: socket.socket | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._say({"report": data})

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any) -> None:
        one = warning_message
        where = {"filename": one.filename, "lineno": one.lineno, "when": when, "nodeid": nodeid, "location": location}
        self._say({"warning": {"message": str(one.message), "category": one.category.__name__, **where}})

    def _say(self, what: dict[str, Any]) -> None:
        if self.line is not None:
            _tell(self.line, what)


def _run_all(session: pytest.Session, line: socket.socket) -> None:
    last: int | None = None
    expected: int | None = None
    ledger = Path(os.environ[cost.LEDGER])
    for told in _lines(line):
        index, then = told["run"], told["then"]
        if last is not None and index != expected:
            _tear_down(session, None if index is None else session.items[index], last, line)
        if index is None:
            return
        before = cost.spent()
        item = session.items[index]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None if then is None else session.items[then])
        _tell(line, {"done": index, "cpu": round(max(0.0, cost.spent() - before) + cost.noted(ledger), 4)})
        if then is None or session.items[then].path != item.path:
            _set_aside()
            _tell(line, {"slowness": cost.slowness()})
        last, expected = index, then


def _tear_down(session: pytest.Session, following: pytest.Item | None, last: int, line: socket.socket) -> None:
    """End the fixtures that the next test does not share."""
    try:
        session._setupstate.teardown_exact(following)
    except BaseException:
        _tell(line, {"error": traceback.format_exc(), "index": last})


def _lines(line: socket.socket) -> Iterator[dict[str, Any]]:
    with line.makefile("rb") as file:
        for said in file:
            yield json.loads(said)
