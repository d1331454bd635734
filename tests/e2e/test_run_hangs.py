"""`psjob run` with a worker that hangs: it is told, started again in time, counted, and its log says where it stood."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.local_job import Ended, manifest, run

pytestmark = pytest.mark.timeout(600)
LIMIT = 5
HOW = ("busy", "held", "stopped")
WITHIN = 8.0
"""Seconds from the hang to the next process of that worker, with that limit."""


def said(ended: Ended, start: int, word: str) -> float:
    """When worker 1's process of `start` said `word`."""
    found = re.search(rf"{word} at ([\d.]+)", log(ended, start))
    assert found is not None, log(ended, start)
    return float(found[1])


def log(ended: Ended, start: int) -> str:
    (path,) = ended.folder.glob(f"logs/*worker-1-r{start}.log")
    return path.read_text()


@pytest.mark.rotating
@pytest.mark.parametrize("how", HOW)
def test_a_worker_that_hangs_is_started_again(tmp_path: Path, how: str) -> None:
    hang(tmp_path, how)


@pytest.mark.soak
@pytest.mark.serial
@pytest.mark.parametrize("how", HOW)
def test_a_worker_that_hangs_is_started_again_in_time(tmp_path: Path, how: str) -> None:
    seconds = hang(tmp_path, how)
    print(f"{how}: started again {seconds:.1f} s after it began to hang")
    assert seconds < WITHIN


def hang(tmp_path: Path, how: str) -> float:
    """Let worker 1 hang in that way; the seconds until its next process."""
    job = manifest(tmp_path, "hangs.py", how)
    ended = run(tmp_path, job, "--set", f"spec.workers.stepTimeoutSeconds={LIMIT}", timeout=200)
    assert ended.code == 0, ended.told
    assert ended.summary["restarts"] == {"Hung": 1}, ended.told
    stack = log(ended, 1).rsplit("hangs at", 1)[1]
    assert ('hangs.py", line' in stack) is (how != "stopped"), stack
    return said(ended, 2, "starts") - said(ended, 1, "hangs")
