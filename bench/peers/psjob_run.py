"""`psjob run` for a program of this folder: the manifest, the process and what it leaves. Imports nothing that must be installed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FINAL = "final.safetensors"
"""If a job's last weights lie, in the folder of its run."""
NO_CHECKPOINTS = {"disabled": True}


def start(
    folder: str, command: Sequence[str], workers: int, shards: int = 1, words: Sequence[str] = (), **spec: Any
) -> subprocess.Popen[bytes]:  # fmt: skip
    """A job whose workers run `python command` in `folder`; `spec` is what the manifest says beside. It leads a session of its own.

    `words` are more of `psjob run`'s. `workers_spec`, where given, stands for all of the manifest's workers.
    """
    container = {"name": "worker", "image": "none", "command": ["python", *command]}
    pods = {"replicas": workers, "template": {"spec": {"containers": [container]}}}
    pods = spec.pop("workers_spec", pods)
    job = {
        "apiVersion": "psjob.dev/v1alpha1", "kind": "PSTrainingJob", "metadata": {"name": "bench"},
        "spec": {"shards": {"replicas": shards, **spec.pop("of_shards", {})}, "workers": pods, "checkpoint": NO_CHECKPOINTS, **spec},
    }  # fmt: skip
    (Path(folder) / "job.yaml").write_text(json.dumps(job))
    whole = [sys.executable, "-m", "psjob_client.cli.main", "run", "job.yaml", "--no-progress", "--summary", "summary.json", *words]
    with open(Path(folder) / "log", "wb") as log:
        return subprocess.Popen(whole, cwd=folder, stdout=log, stderr=log, start_new_session=True)


def ended(folder: str, process: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
    """The summary of a job that has ended well. Raises RuntimeError with its last words where it has not, or not in so many seconds."""
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the kernel ends its shards and workers with it
        process.wait()
        code = -signal.SIGKILL
    if code:
        raise RuntimeError(f"psjob run ended with {code}: {(Path(folder) / 'log').read_text()[-300:]!r}")
    found: dict[str, Any] = json.loads((Path(folder) / "summary.json").read_text())
    return found


def run(folder: str, command: Sequence[str], seconds: float, workers: int, shards: int = 1, **spec: Any) -> dict[str, Any]:
    """The summary of a whole job; see `start` and `ended`. Raises RuntimeError."""
    return ended(folder, start(folder, command, workers, shards, **spec), seconds)


def check_road(summary: dict[str, Any], transport: str) -> None:
    """Raise RuntimeError if a job's blocks did not go by `transport`, "shared" or "tcp"."""
    if summary["transport"] != transport:
        raise RuntimeError(f"the job was to go by {transport}, and went by {summary['transport']}")
