"""`psjob run` with the real runtime: a shard that hangs, and a run that is stopped and resumed; the weights are those of one run."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.e2e.local_job import Ended, end, manifest, run, show, start

pytestmark = pytest.mark.timeout(600)
STEPS = 75
"""Of scripts/hard.py with two workers: 5 epochs of 15 rounds."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = run(folder, manifest(folder, "hard.py"))
    assert ended.code == 0 and ended.summary["steps"] == STEPS, ended.told
    return ended


@pytest.mark.rotating
def test_a_stopped_shard_is_replaced_and_the_weights_are_the_same(undisturbed: Ended, tmp_path: Path) -> None:
    job = manifest(tmp_path, "hard.py")
    ended = run(tmp_path, job, "--fault", "stop:ps-1@step=50", "--set", "spec.ps.shardTimeoutSeconds=4")
    show(ended)
    assert ended.code == 0, ended.told
    assert ended.summary["attempts"] == [1, 2] and ended.summary["restarts"] == {"Unresponsive": 1}
    assert ended.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]


def test_ctrl_c_and_resume_end_with_the_weights_of_one_run(undisturbed: Ended, tmp_path: Path) -> None:
    job = manifest(tmp_path, "hard.py", "0.1", every=1000)
    process = start(tmp_path, job)
    limit = time.monotonic() + 200
    while not (tmp_path / "passed").exists():
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    stopped = end(tmp_path, process, 100)
    assert stopped.code == 130 and stopped.summary["result"] == "Suspended", stopped.told
    checkpoint = stopped.summary["checkpoint"]
    assert 0 < checkpoint["step"] < STEPS and checkpoint["step"] == stopped.summary["steps"], stopped.told
    last = stopped.told.splitlines()[-1].split()
    assert last[:3] == ["psjob", "run", str(job)] and last[3] == "--resume"
    ended = run(tmp_path, job, "--resume", last[4])
    assert ended.code == 0 and ended.summary["run"] != stopped.summary["run"], ended.told
    assert ended.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]
