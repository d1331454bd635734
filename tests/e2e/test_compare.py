"""`psjob compare` with real jobs: the digits example in two modes, and one that is interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.local_job import EXAMPLES

pytestmark = pytest.mark.timeout(600)
SMALL = ["--set", "spec.workers.replicas=2", "--set", "spec.shards.replicas=1"]


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    argv = [
        sys.executable,
        "-m",
        "psjob_client.cli.main",
        "compare",
        str(EXAMPLES / "digits" / "async.yaml"),
        "--modes",
        "sync,async",
        *words,
    ]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell lets its background jobs ignore it
    return subprocess.Popen(
        argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heard
    )


@pytest.mark.soak
def test_digits_in_two_modes(tmp_path: Path) -> None:
    args = "spec.workers.template.spec.containers[0].args=[--momentum=0, --epochs=3]"
    process = start(tmp_path, *SMALL, "--set", args, "-o", "json")
    said, told = process.communicate(timeout=200)
    assert process.returncode == 0, told
    sync, asynchronous = json.loads(said)["sides"]
    for one, mode in ((sync, "sync"), (asynchronous, "async")):
        assert one["title"] == mode and one["result"] == "Complete" and f"spec.training.mode={mode}" in one["command"]
        # A look each 0.1 s may pass over an epoch of so few steps.
        seen = [value for _, _, value in one["curves"]["test_accuracy"]]
        assert 0.85 < one["final"]["test_accuracy"] == seen[-1] and len(seen) <= 3
        assert one["rate"] == one["steps"] / one["elapsed"] > 0 and one["timeToLoss"] is not None
        assert len(one["idle"]) == 2 and 0 < one["waiting"] < 1
        assert sum(count for _, count in one["staleness_histogram"]) > 0 < len(one["gaps"])
    assert 3 * 45 - 1 >= sync["steps"] >= 3 * 45 - 5, "45 batches an epoch for each of two workers; the first step begins the time"
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 7 and "–" not in page.split("<tbody>")[1].split("</tbody>")[0], "every cell of the table has its number"


@pytest.mark.rotating
def test_interrupted_it_leaves_no_process_and_no_report(tmp_path: Path) -> None:
    process = start(tmp_path, *SMALL)
    limit = time.monotonic() + 100
    while not (found := list(tmp_path.glob(".psjob/*/logs/*worker-1*.log"))) or not mine(tmp_path):
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 130 and "interrupted; no report is written" in told and "Traceback" not in told
    assert found and mine(tmp_path) == [] and not (tmp_path / "report.html").exists()


def mine(folder: Path) -> list[int]:
    """Processes of the jobs of `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int(entry.name) != os.getpid() and str(folder).encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found
