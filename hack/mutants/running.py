"""Runs tests against a copy of the sources, in a fork of a process that has imported what is slow to import."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

PACKAGES = {"psjob": "runtime/src", "psjob_operator": "operator/src", "psjob_client": "client/src"}
"""By package, the folder of the checkout that has it."""
WARM = ("torch", "numpy", "safetensors.torch", "pydantic", "yaml", "typer", "hypothesis.strategies", "pytest_timeout")
"""Imported once, before the first fork."""
MARKS = "not soak and not rotating and not cluster and not nodes"
"""What `make test` runs."""
TEST_SECONDS = 20.0
"""CPU seconds after which a single test counts as endless."""
FIRST = 4
"""So many of the nearest test files are collected at first."""
WAIT_SECONDS = 300.0
"""A test that waits for so long waits forever."""


class Copy:
    """The sources of the three packages in a folder of their own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = Path(tempfile.mkdtemp(prefix="psjob-mutants-"))
        for source in PACKAGES.values():
            shutil.copytree(root / source, self.folder / source)

    def remove(self) -> None:
        """Take the folder away."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def paths(self) -> list[str]:
        """What comes first on the path of imports."""
        return [str(self.folder / source) for source in PACKAGES.values()]

    @contextlib.contextmanager
    def changed(self, path: str, content: bytes) -> Iterator[None]:
        """The file holds `content`, for a while."""
        was = (self.folder / path).read_bytes()
        self._write(path, content)
        try:
            yield
        finally:
            self._write(path, was)

    def _write(self, path: str, content: bytes) -> None:
        file = self.folder / path
        file.write_bytes(content)
        # Its time and size may be those of the file before.
        Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


@dataclass(frozen=True)
class Result:
    """What became of a run of tests."""

    outcome: str
    """`passed`, `failed`, `died` (the process ended or was endless), or `unusable` (nothing ran, or not from the copy)."""
    by: str = ""
    """The first test that failed, or why the result is as it is."""
    ran: int = 0
    """How many tests ended."""
    whole: bool = True
    """False: the time was over before all tests had run."""
    seconds: float = 0.0
    """CPU seconds, of its processes too."""

    @property
    def killed(self) -> bool:
        """Some test noticed."""
        return self.outcome in ("failed", "died")


def warm() -> None:
    """Import what is slow; nothing of the three packages may be among it."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in WARM:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    early = sorted(name for name in sys.modules if name.partition(".")[0] in PACKAGES)
    if early:
        raise RuntimeError(f"{', '.join(early[:3])} was imported before the fork, so that no copy would be tested")


def run(copy: Copy, tests: Sequence[str], seconds: float, module: str | None = None) -> Result:
    """Run tests in order until one fails or `seconds` of CPU are used. `module` must be imported from the copy.

    With `module` a few files are collected first and more later: most faults are noticed by the nearest tests.
    """
    groups = portions(tests) if module else [tests]
    results: list[Result] = []
    left = seconds
    for group in groups:
        results.append(_run(copy, group, left, module))
        left -= results[-1].seconds
        if results[-1].killed or not results[-1].whole or left <= 0:
            break
    if not results:
        return Result("unusable", f"no test imports {module}")
    # Of a group whose tests are all left out, or do not reach the module, another group decides.
    last = next((result for result in reversed(results) if result.outcome != "unusable"), results[-1])
    whole = results[-1].whole and len(results) == len(groups)
    return replace(last, ran=sum(result.ran for result in results), seconds=seconds - left, whole=whole or last.killed)


def portions(tests: Sequence[str]) -> list[Sequence[str]]:
    """The same tests in their order: `FIRST`, and then twice as many each time."""
    found, begun, size = [], 0, FIRST
    while begun < len(tests):
        found.append(tests[begun : begun + size])
        begun, size = begun + size, 2 * size
    return found


def _run(copy: Copy, tests: Sequence[str], seconds: float, module: str | None) -> Result:
    reader, writer = os.pipe()
    began = _children()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _child(writer, copy, tests, seconds, module)
    os.close(writer)
    told, over = b"", time.monotonic() + 4 * WAIT_SECONDS + 10 * seconds
    os.set_blocking(reader, False)
    ended = 0
    while not ended:
        ended, _ = os.waitpid(child, os.WNOHANG)
        with contextlib.suppress(BlockingIOError):
            told += os.read(reader, 1 << 16)
        if not ended and time.monotonic() > over:
            os.kill(child, signal.SIGKILL)
        if not ended:
            time.sleep(0.02)
    with contextlib.suppress(BlockingIOError):
        told += os.read(reader, 1 << 16)
    os.close(reader)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what its tests left behind
    spent = _children() - began
    if not told:
        return Result("died", "the process ended before its tests did", seconds=spent)
    return Result(**{**json.loads(told), "seconds": spent})


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _child(writer: int, copy: Copy, tests: Sequence[str], seconds: float, module: str | None) -> None:
    """The whole life of a fork."""
    os.setsid()
    result = Result("unusable", "pytest did not begin")
    try:
        with tempfile.TemporaryDirectory(prefix="psjob-mutants-") as folder:
            os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = folder
            os.environ["PYTHONPATH"] = os.pathsep.join([*copy.paths, *filter(None, [os.environ.get("PYTHONPATH")])])
            os.chdir(copy.root)
            sys.path[:0] = copy.paths
            importlib.invalidate_caches()
            sys.dont_write_bytecode = False
            out = io.StringIO()
            watch = Watch(copy, seconds, module)
            words = ["-x", "-q", "-m", MARKS, "-p", "no:cacheprovider", "-p", "no:xdist", "-o", f"timeout={WAIT_SECONDS}"]
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                code = pytest.main([*words, "--basetemp", f"{folder}/tests", *tests], plugins=[watch])
            result = watch.result(int(code), out.getvalue())
    except BaseException:
        result = Result("unusable", traceback.format_exc(limit=-3))
    finally:
        os.write(writer, json.dumps(vars(result)).encode()[: 1 << 15])
        os._exit(0)


class Watch:
    """A plugin of pytest: it keeps the time, and sees what failed and where the packages came from."""

    def __init__(self, copy: Copy, seconds: float, module: str | None) -> None:
        self.copy, self.module = copy, module
        self.until = time.process_time() + seconds
        self.ran = 0
        self.by = ""
        self.whole = True

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings

        # One run is as another, and a failure is not made short.
        settings.register_profile(
            "mutants", settings.get_profile("psjob"), derandomize=True, database=None, phases=(Phase.explicit, Phase.generate)
        )
        settings.load_profile("mutants")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if time.process_time() > self.until:
            self.whole = False
            item.session.shouldstop = "the time is over"
            return (yield)
        was = signal.signal(signal.SIGVTALRM, _endless)
        signal.setitimer(signal.ITIMER_VIRTUAL, TEST_SECONDS)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, was)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran += report.when == "call"
        if report.failed and not self.by:
            self.by = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.by:
            self.by = report.nodeid

    def result(self, code: int, words: str) -> Result:
        """Of a run of pytest that ended with `code`."""
        told: dict[str, Any] = {"ran": self.ran, "whole": self.whole}
        for name, source in PACKAGES.items():
            loaded = sys.modules.get(name)
            if loaded is not None and not str(loaded.__file__).startswith(str(self.copy.folder / source)):
                return Result("unusable", f"{name} was imported from {loaded.__file__}, not from the copy", **told)
        if self.by:
            return Result("failed", self.by, **told)
        if code not in (0, 2) or not self.ran or (code == 2 and self.whole):
            return Result("unusable", f"pytest ended with {code}: {words[-1500:]}", **told)
        if self.module is not None and self.module not in sys.modules:
            return Result("unusable", f"no test imported {self.module}", **told)
        return Result("passed", **told)


def _endless(number: int, frame: FrameType | None) -> None:
    pytest.fail(f"used {TEST_SECONDS:.0f} s of CPU")
