"""What all tests share: a test that cannot run says so by name, and where skipping is forbidden it fails."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from functools import wraps
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from psjob.process import errors
from tests.support.hardware import left_out
from tests.support.quick import begin_imports

pytest_plugins = [
    "tests.support.cluster_fixtures",
    "tests.support.heaps",
    "hack.testing.runners",
    "hack.testing.budget",
    "hack.testing.slices",
]
# Before torch is there: bits are compared between processes, whose kernels must add in one order; test runners share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests judge no absolute time: another process may have the core. Each run draws the same examples, so that it fails for a change only.
settings.register_profile("psjob", deadline=None, max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("soak", deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("PSJOB_HYPOTHESIS", "psjob"))

INSTALLED = errors.package_folders


@wraps(INSTALLED.__wrapped__)
def _places() -> tuple[str, ...]:
    """What has started a test is no part of the script that the test is for psjob, so that its variables are not looked through."""
    return *INSTALLED(), f"{Path(__file__).parents[1]}/hack/"


errors.package_folders = _places  # type: ignore[assignment]
FORBIDDEN = os.environ.get("PSJOB_FORBID_SKIP") == "1"


@pytest.fixture(autouse=True)
def _each_test_is_a_script() -> Iterator[None]:
    """What one has attached is nothing to the next, and no broken thread of the next ends the process for it."""
    yield
    if "psjob.api.attachable" in sys.modules:
        sys.modules["psjob.api.attachable"].forget()
    if "psjob.process.supervise" in sys.modules:
        vars(sys.modules["psjob.process.supervise"])["_end"] = None


@pytest.fixture
def last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a shard or a refused worker that runs in the test's own process leaves its sentence; kernels have one thread."""
    import torch  # not for the tests of the plan

    torch.set_num_threads(1)
    monkeypatch.setenv("PSJOB_TERMINATION_LOG", str(tmp_path / "last-words"))
    return tmp_path / "last-words"


TIMEOUTS = {"tests/unit/": 60, "tests/simulation/": 60, "tests/tensors/": 120, "tests/live/": 180}
"""Seconds for a test of `make test` that names none of its own; they end what hangs, also where ten programs share a core."""


def pytest_sessionstart(session: pytest.Session) -> None:
    begin_imports(session, (Path(word).name for word in session.config.args))


def pytest_collection_finish(session: pytest.Session) -> None:
    """For a run of all folders, of which one knows by then whose tests run."""
    begin_imports(session, {item.path.parent.name for item in session.items if "tmp_path" in getattr(item, "fixturenames", ())})


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("serial") and not any(map(item.get_closest_marker, ("cluster", "nodes", "soak"))):
        raise pytest.UsageError(f"{item.nodeid} is serial, and neither cluster, nodes nor soak: `make test` runs nothing alone")
    seconds = next((seconds for prefix, seconds in TIMEOUTS.items() if item.nodeid.startswith(prefix)), None)
    if seconds is not None and not any(map(item.get_closest_marker, ("timeout", "soak", "rotating"))):
        item.add_marker(pytest.mark.timeout(seconds))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    run = not str(getattr(report, "wasxfail", "reason: ")).startswith(("reason: ", "[NOTRUN]"))  # it failed as it was said to
    if FORBIDDEN and report.skipped and not run:
        _fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if FORBIDDEN and report.skipped:
        _fail(report)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for found in terminalreporter.stats.values() for report in found if isinstance(report, pytest.TestReport)]
    ran = {report.nodeid.partition("::")[0] for report in reports}
    for file in sorted(ran & set(left_out(Path(__file__).parent))):
        terminalreporter.line(f"{file}: variants for CUDA were not run, since this machine has no NVIDIA GPU")
    reports = terminalreporter.stats.get("skipped", [])
    skipped = [report for report in reports if isinstance(report, pytest.TestReport | pytest.CollectReport)]
    if skipped:
        terminalreporter.section("not run on this machine")
        for report in sorted(skipped, key=lambda report: report.nodeid):
            terminalreporter.line(f"{report.nodeid}: {_reason(report)}")


def _fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    sentence = f"{report.nodeid} was skipped where skipping is forbidden (PSJOB_FORBID_SKIP=1): {_reason(report)}"
    report.outcome = "failed"
    report.longrepr = sentence


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return str(report.longrepr)
