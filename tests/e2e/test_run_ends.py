"""`psjob run` ends: by Ctrl-C whatever its processes do, and by itself where the script would fail again."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests import warm
from tests.e2e.local_job import Ended, end, manifest, run, start, start_cold
from tests.quick import rest_rotates

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
