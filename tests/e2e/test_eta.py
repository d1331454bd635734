"""The time that is left, as the display tells it: from the tenth part on it is right within 20 % of all that is left."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.local_job import EXAMPLES, start_cold

FIRST, WITHIN = 0.1, 0.2
SHORT = 1.0
"""Seconds. Below this the time of the last checkpoint and of the end counts as much as the steps."""


@pytest.mark.soak
@pytest.mark.serial
@pytest.mark.timeout(600)
@pytest.mark.parametrize("example", ["hello", "digits"])
def test_the_time_that_is_left_is_told_from_the_tenth_part_on(tmp_path: Path, example: str) -> None:
    job = EXAMPLES / "digits" / "job.yaml"
    if example == "hello":
        subprocess.run([sys.executable, "-m", "psjob_client.cli.main", "init", "hello"], cwd=tmp_path, check=True, timeout=60)
        job = tmp_path / "hello" / "job.yaml"
    process, told = start_cold(tmp_path, job), []
    while process.poll() is None:
        for live in tmp_path.glob(".psjob/*/live.json"):
            seen = json.loads(live.read_text())
            told.append((seen["time"], seen["coordinator"]))
        time.sleep(0.1)
    assert process.returncode == 0
    last = max(one["passed"][-1][1] for _, one in told if one.get("passed"))
    late = [(at, one) for at, one in told if one.get("totalSteps") and FIRST * one["totalSteps"] <= one["step"] < one["totalSteps"]]
    due = [(one["step"], one["eta"] or 0.0, last - at) for at, one in late]
    wrong = [(step, eta, left) for step, eta, left in due if abs(eta - left) > max(WITHIN * left, SHORT)]
    assert len(due) > 3
    assert not wrong, wrong
    print(f"{example}: {len(due)} looks over {due[0][2]:.1f} s, none wrong by more than {WITHIN:.0%}")
