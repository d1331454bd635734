"""Runs a script as a job with `psjob run` and the real runtime."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from tests.support import warm

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = Path(__file__).resolve().parent / "scripts"


@dataclass(frozen=True)
class Ended:
    """What a run left."""

    code: int
    output: str
    told: str
    """Standard error: psjob's own words."""
    summary: dict[str, Any]
    folder: Path
    """`.psjob/<run>`."""

    @property
    def weights(self) -> dict[str, Any]:
        """The final weights, as numpy reads them."""
        return dict(load_file(self.folder / "final.safetensors"))


def manifest(folder: Path, script: str, *args: str, mode: str = "sync", workers: int = 2, shards: int = 2, every: int = 20) -> Path:
    """A manifest in `folder` for a script of `scripts/`, or of the folder."""
    if (SCRIPTS / script).exists():
        (folder / script).write_text((SCRIPTS / script).read_text())
    container = {"name": "worker", "image": "none", "command": ["python", script, *args]}
    job = {
        "apiVersion": "psjob.dev/v1alpha1",
        "kind": "PSTrainingJob",
        "metadata": {"name": script.removesuffix(".py")},
        "spec": {
            "training": {"mode": mode, "seed": 3},
            "shards": {"replicas": shards},
            "workers": {"replicas": workers, "template": {"spec": {"containers": [container]}}},
            "checkpoint": {"everySteps": every},
        },
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))
    return path


def start(folder: Path, job: Path, *options: str) -> warm.Started:
    """`psjob run` of `job` in `folder`, whose processes are forks of one that has imported torch."""
    argv = ["run", str(job), "--summary", "summary.json", *options]
    return warm.start(folder, "psjob_client.cli.main", argv, None, folder / "output.txt", folder / "told.txt", warm.COMPILING)


def start_cold(folder: Path, job: Path, *options: str) -> subprocess.Popen[str]:
    """The same as a user starts it, where that is what is tested."""
    argv = [sys.executable, "-m", "psjob_client.cli.main", "run", str(job), "--summary", "summary.json", *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(argv, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(folder: Path, process: warm.Started | subprocess.Popen[str], timeout: float = 300) -> Ended:
    """Its end."""
    try:
        output, told = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, told = process.communicate(timeout=60)
        raise AssertionError(f"psjob run did not end in {timeout} s:\n{output}\n{told}") from None
    summary = json.loads((folder / "summary.json").read_text())
    return Ended(process.returncode, output, told, summary, folder / ".psjob" / summary["run"])


def run(folder: Path, job: Path, *options: str, timeout: float = 300) -> Ended:
    """A whole run."""
    return end(folder, start(folder, job, *options), timeout)


def show(ended: Ended) -> None:
    """Print what the faults cost, for people who read the tests' output."""
    for line in ended.told.splitlines():
        if " after " in line and line.startswith(("kill:", "stop:")):
            print(line)
