"""A run of wandb continues in the process that takes a worker's place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WANDB = """
import os, sys
from psjob.api import trackers
from psjob.process import startup
startup.one_run("digits-1", os.environ)
import wandb
run = wandb.init(project="digits", mode="offline", dir=sys.argv[1], settings=wandb.Settings(console="off", silent=True))
for step in range(3):
    trackers.tell_trackers({"loss": 1 / (step + 1)}, step)
print("told", run.id, run.summary["psjob/loss"], run.summary["psjob/step"])
run.finish()
"""


@pytest.mark.rotating
def test_a_run_of_wandb_goes_on_after_a_restart(tmp_path: Path) -> None:
    for _start in range(2):
        answer = subprocess.run([sys.executable, "-c", WANDB, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path, timeout=120)
        assert f"told digits-1 {1 / 3} 2" in answer.stdout, answer.stderr[-2000:]
    assert {path.name.split("-", 3)[-1] for path in (tmp_path / "wandb").glob("offline-run-*")} == {"digits-1"}
