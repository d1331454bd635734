"""`psjob run` ends: by Ctrl-C whatever its processes do, and by itself where the script would fail again.

- `psjob run` with a worker that hangs: it is told, started again in time, counted, and its log says where it stood.
- `psjob run` with the real runtime: a shard that hangs, and a run that is stopped and resumed; the weights are those of one run.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.local_job import Ended, end, manifest, run, show, start, start_cold
from tests.support import warm
from tests.support.quick import rest_rotates

pytestmark = pytest.mark.timeout(600)


NOTHING, SOMETHING = 2.0, 10.0
"""Seconds in which it ends where there is nothing to save, and else."""
LOADED = 3.0
"""A machine with other tests beside takes longer."""
STATES = {
    "imports": NOTHING, "no step": NOTHING, "trains": SOMETHING, "busy": SOMETHING, "held": SOMETHING, "stopped": SOMETHING,
    "killed": SOMETHING, "deaf": SOMETHING,
}  # fmt: skip


@pytest.mark.rotating
@pytest.mark.parametrize("state", STATES)
def test_ctrl_c_ends_a_job_in_any_state(tmp_path: Path, state: str) -> None:
    interrupted(tmp_path, start(tmp_path, manifest(tmp_path, "states.py", state, every=1000)), state)


@pytest.mark.soak
@pytest.mark.serial
@pytest.mark.parametrize("state", STATES)
def test_ctrl_c_ends_a_job_soon(tmp_path: Path, state: str) -> None:
    took, ended = interrupted(tmp_path, start_cold(tmp_path, manifest(tmp_path, "states.py", state, every=1000)), state)
    print(f"{state}: {took:.1f} s")
    assert took < STATES[state] * LOADED, ended.told


def interrupted(tmp_path: Path, process: warm.Started | subprocess.Popen[str], state: str) -> tuple[float, Ended]:
    """Send Ctrl-C once the script is in that state; the seconds until the end, and the end."""
    limit = time.monotonic() + 100
    while not (tmp_path / "there").exists():
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.05)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    ended = end(tmp_path, process, 100)
    took = time.monotonic() - began
    assert ended.code == 130 and ended.summary["result"] == "Suspended", ended.told
    assert ("there is nothing to save" in ended.told) == (STATES[state] == NOTHING), ended.told
    if state == "trains":
        assert ended.summary["checkpoint"]["step"] == ended.summary["steps"], "the last checkpoint holds the last step"
    return took, ended


SCRIPTS = {
    "line 2": ("import os\nx = 1 / 0\n", ["ZeroDivisionError: division by zero", "before the job's first step"], 1),
    "wrong words": ("import sys\nsys.exit('usage: train.py DATA')\n", ["usage: train.py DATA"], 1),
    "later": (
        "import torch, psjob as ps\nm = torch.nn.Linear(2, 1)\nm, o = ps.attach(m, torch.optim.SGD(m.parameters(), lr=0.1))\n"
        "torch.manual_seed(0)\ndata = torch.utils.data.TensorDataset(torch.randn(80, 2))\n"
        "for epoch in range(2):\n    for (x,) in ps.shard(torch.utils.data.DataLoader(data, batch_size=4)):\n"
        "        loss = m(x).sum(); loss.backward(); o.step(); o.zero_grad()\n        ps.checkpoint()\n"
        "    print(loss.item())\n    assert epoch == 0, 'the labels are gone'\n",
        ["AssertionError: the labels are gone", "the first error is the one to look at"], 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", rest_rotates(SCRIPTS, ["line 2", "later"]))
def test_a_script_that_fails_by_itself_ends_the_job_and_its_first_error_is_shown(tmp_path: Path, name: str) -> None:
    text, words, starts = SCRIPTS[name]
    (tmp_path / "own.py").write_text(text)
    ended = run(tmp_path, manifest(tmp_path, "own.py"))
    assert ended.code == 1, ended.told
    last = ended.told.strip().splitlines()[-1]
    assert last.startswith("Failed: ScriptFailed: ") and all(word in last for word in words), ended.told
    assert max(int(path.stem.rpartition("r")[2]) for path in tmp_path.glob(".psjob/*/logs/*worker-0*.log")) <= 2 * starts  # of both workers
    assert (starts == 1) == (ended.summary["restarts"] == {}) == ("Restarted: " not in ended.told), ended.told  # one worker is, two are


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
    ended = run(tmp_path, job, "--set", f"spec.workers.progressDeadlineSeconds={LIMIT}", timeout=200)
    assert ended.code == 0, ended.told
    assert ended.summary["restarts"] == {"Hung": 1}, ended.told
    stack = log(ended, 1).rsplit("hangs at", 1)[1]
    assert ('hangs.py", line' in stack) is (how != "stopped"), stack
    return said(ended, 2, "starts") - said(ended, 1, "hangs")


LOST = "CUDA error: uncorrectable ECC error encountered"


def test_a_worker_that_loses_its_gpu_is_one_failure_with_the_drivers_words(tmp_path: Path) -> None:
    """A new process takes its place, not the same one again; the failure is counted once."""
    job = manifest(tmp_path, "loses.py", LOST)
    ended = run(tmp_path, job, timeout=200)
    assert ended.code == 0, ended.told
    assert ended.summary["restarts"] == {"DeviceLost": 1} and ended.summary["steps"] == 20, ended.told
    first = log(ended, 1)
    assert f"psjob: a GPU of this worker is lost: {LOST}. A new process is started." in first
    assert log(ended, 2).count("start 2, rewinds 0") == 1
    assert f"(DeviceLost); container worker: a GPU of this worker is lost: {LOST}; failures: 1" in ended.told, ended.told


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
    ended = run(tmp_path, job, "--fault", "stop:shard-1@step=50", "--set", "spec.shards.progressDeadlineSeconds=4")
    show(ended)
    assert ended.code == 0, ended.told
    assert ended.summary["attempts"] == [1, 2] and ended.summary["restarts"] == {"Unresponsive": 1}
    assert ended.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]
