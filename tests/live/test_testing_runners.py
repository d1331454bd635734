"""`pytest --runners N`: whatever becomes of a runner is told as the failure of the test that it ran, and all other tests run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = """
from pathlib import Path

import pytest

from hack.testing import runners

# The run has patience with every test but one: on a busy machine pytest-timeout needs a while to say its words.
runners.PATIENCE = 0.5
runners.time_out = lambda item: 0.3 if item.name == "test_hears_no_signal" else 90.0


@pytest.fixture
def among(tmp_path_factory):
    running = Path(__file__).parent / "running"
    running.mkdir(exist_ok=True)
    mine = running / runners.os.environ[runners.NUMBER]
    mine.touch()
    yield running
    mine.unlink()
"""
ENDS = """
import os
import signal
import time
import warnings

import pytest


def test_passes():
    print("said by a test that passes")
    warnings.warn("it passes for now")


def test_exits():
    os._exit(3)


def test_is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timeout(0.3)
def test_sleeps():
    time.sleep(60)


@pytest.mark.timeout(0.3)
def test_hears_no_signal():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(60)


def test_fails():
    assert 1 + 1 == 3


def test_skips():
    pytest.skip("there is no moon")


@pytest.mark.parametrize("number", range(6))
def test_after_them(number, among):
    time.sleep(0.02)


@pytest.mark.serial
def test_alone(among):
    assert len(list(among.iterdir())) == 1
"""
LATE = """
import pytest


@pytest.fixture(scope="module")
def shared():
    yield
    raise OSError("it does not end")


def test_one(shared):
    pass


def test_two(shared):
    pass
"""


LEFT = """
import os
import threading
import time


def test_leaves():
    threading.Timer(0.3, lambda: os._exit(0)).start()


def test_waits():
    time.sleep(30)
"""


ORPHAN = """
import os
import signal
import time
from pathlib import Path

HERE = Path(__file__).parent


def test_is_killed_and_leaves_a_process():
    if os.fork() == 0:  # it holds all that is open
        os.setsid()
        ends = time.monotonic() + 60
        while time.monotonic() < ends and not (HERE / "continued").exists():
            time.sleep(0.05)
        (HERE / ("seen" if time.monotonic() < ends else "gave up")).touch()
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_goes_on():
    (HERE / "continued").touch()
"""


def run(folder: Path, files: dict[str, str], runners: int) -> str:
    """What a run of these files says, which fails."""
    tests = folder / "tests" / "live"
    tests.mkdir(parents=True)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = serial: alone\n")
    for name, text in {"conftest.py": SETTINGS, **files}.items():
        (tests / name).write_text(text)
    words = ["-p", "hack.testing.runners", "-p", "no:cacheprovider", "--runners", str(runners), "-rA", str(tests)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "300", "PYTEST_ADDOPTS": ""}
    done = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=folder, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a run by two runners says."""
    return run(tmp_path_factory.mktemp("project"), {"test_ends.py": ENDS, "test_late.py": LATE}, runners=2)


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("exits", "the process that ran this test ended with exit code 3 while the test ran"),
        ("is_killed", "the process that ran this test ended with signal 9 (SIGKILL) while the test ran"),
        ("hears_no_signal", "the process that ran this test ended with signal 9 (SIGKILL) while the test ran"),
        ("sleeps", "Timeout (>0.3s) from pytest-timeout"),
        ("fails", "assert (1 + 1) == 3"),
    ],
)
def test_what_becomes_of_a_runner_is_the_failure_of_its_test(told: str, test: str, reason: str) -> None:
    (line,) = re.findall(rf"^FAILED \S+::test_{test} - (.*)$", told, re.MULTILINE)
    assert reason in line


def test_a_runner_that_ends_by_what_a_test_before_has_left_names_that_one(tmp_path: Path) -> None:
    done = run(tmp_path, {"test_left.py": LEFT}, runners=1)
    assert re.search(
        r"^FAILED \S+::test_waits - .* ended with exit code 0 while the test ran\. Before it, this process ran \S+::test_leaves", done, re.M
    )


def test_a_runner_is_dead_while_a_process_that_its_test_forked_lives_on(tmp_path: Path) -> None:
    told = run(tmp_path, {"test_orphan.py": ORPHAN}, runners=1)
    assert "process ended" not in told and "ended with signal 9 (SIGKILL) while the test ran" in told
    assert (tmp_path / "tests/live/seen").exists(), "the next test ran before that process had ended"


def test_all_other_tests_run_once(told: str) -> None:
    passed = sorted(re.findall(r"^PASSED \S+::test_(\S+)$", told, re.MULTILINE))
    assert passed == sorted(["passes", *(f"after_them[{number}]" for number in range(6)), "alone", "one", "two"])
    assert "said by a test that passes" in told and len(re.findall("UserWarning: it passes for now", told)) == 1


def test_a_test_that_cannot_run_says_why(told: str) -> None:
    assert re.search(r"^SKIPPED \[1\] \S*test_ends\.py:\d+: there is no moon$", told, re.MULTILINE)


def test_a_shared_fixture_that_ends_with_an_error_is_told(told: str) -> None:
    assert "OSError: it does not end" in told and re.search(r"^(ERROR|FAILED) \S+test_late\.py::test_(one|two)", told, re.MULTILINE)
