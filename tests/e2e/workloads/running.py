"""Runs a workload of this folder with `psjob run`, as a user does, and holds what came out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.e2e.workloads.gates import steps_of
from tests.support import warm

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SECONDS = 900.0
"""A loaded machine takes long to import torch; no test waits longer for one job."""


@dataclass(frozen=True)
class Ran:
    """A job that has ended."""

    code: int
    out: str
    err: str
    summary: Mapping[str, Any]
    folder: Path
    """The run's folder."""

    @property
    def sha(self) -> str:
        """weights_sha256 of the summary."""
        assert self.summary["weights_sha256"], self.err
        return str(self.summary["weights_sha256"])

    def weights(self) -> dict[str, torch.Tensor]:
        """final.safetensors, read by the safetensors library."""
        return load_file(self.folder / "final.safetensors")

    def log(self, process: str) -> str:
        """All logs whose name begins with `process`, one after the other."""
        return "".join(path.read_text() for path in sorted((self.folder / "logs").glob(f"{process}*.log")))

    def last_words(self, process: str) -> Mapping[str, Any]:
        """The termination message of `process` as JSON."""
        told: Mapping[str, Any] = json.loads((self.folder / "logs" / f"{process}.end").read_text())
        return told


def manifest(folder: Path, command: Sequence[str], *, workers: int = 2, shards: int = 2, **spec: Any) -> Path:
    """Write job.yaml (JSON is YAML) in `folder`, which is made; the first word of `command` names a script of this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    script = HERE / command[0]
    words = ["python", str(script if script.exists() else command[0]), *command[1:]]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    container = {"name": "worker", "image": "none", "command": words, "env": [{"name": "PYTHONPATH", "value": path}]}
    replicas = {"replicas": workers, "template": {"spec": {"containers": [container]}}}
    of_shards = {"replicas": shards, **spec.pop("of_shards", {})}
    job = {
        "apiVersion": "psjob.dev/v1alpha1",
        "kind": "PSTrainingJob",
        "metadata": {"name": "job"},
        "spec": {"shards": of_shards, "workers": replicas, **spec},
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(job, indent=1))
    return path


def start(
    folder: Path, job: Path, *args: str, cold: bool = False, imports: Sequence[str] = warm.COMPILING,
    environment: Mapping[str, str] | None = None,
) -> warm.Started | subprocess.Popen[str]:  # fmt: skip
    """`psjob run` of `job` in `folder`, in a session of its own; but for `cold` its processes are forks of one with these imports."""
    words = ["run", str(job), "--no-progress", "--summary", "summary.json", *args]
    (folder / "summary.json").unlink(missing_ok=True)
    if cold:
        return subprocess.Popen(
            [sys.executable, "-m", "psjob_client.cli.main", *words],
            cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    return warm.start(folder, "psjob_client.cli.main", words, environment, folder / "output.txt", folder / "told.txt", imports)


def finish(process: warm.Started | subprocess.Popen[str], folder: Path, seconds: float = SECONDS) -> Ran:
    """Wait for a job's end; one that hangs is asked to stop, and fails the test with what it said."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            out, err = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        raise AssertionError(f"the job did not end in {seconds:.0f} s:\n{out[-2000:]}\n{err[-4000:]}\n{_tails(folder)}") from None
    told = json.loads((folder / "summary.json").read_text()) if (folder / "summary.json").exists() else {}
    return Ran(process.returncode, out, err, told, folder / ".psjob" / str(told.get("run", "none")))


def train(folder: Path, job: Path, *args: str, expect: int = 0, cold: bool = False) -> Ran:
    """Run `job` to its end and check how it ended."""
    ran = finish(start(folder, job, *args, cold=cold), folder)
    assert ran.code == expect, f"exit code {ran.code}:\n{ran.out[-2000:]}\n{ran.err[-4000:]}\n{_tails(folder)}"
    return ran


def script_job(folder: Path, source: str, mode: str = "sync", every: int = 3) -> Path:
    """A job of seed 0 whose script is this text, with a checkpoint every so many steps."""
    job = manifest(folder, ["train.py"], training={"mode": mode, "seed": 0}, checkpoint={"everySteps": every, "periodSeconds": 3600})
    (folder / "train.py").write_text(source)
    return job


def run_script(folder: Path, source: str, *words: str, mode: str = "sync", every: int = 3) -> Ran:
    """Run such a job to its end, however it ends."""
    return finish(start(folder, script_job(folder, source, mode, every), *words), folder)


def check_recovery(recovery: Mapping[str, Any], manifests: int = 2) -> None:
    """The kill fell after `manifests` committed ones with step > 0, and after a step that the shard had acknowledged since."""
    first, passed = recovery["secondsToFirstPush"], recovery["secondsToPassStep"]
    print(f"{recovery['fault']}: {first:.2f} s to the first push, {passed:.2f} s to the step")
    assert recovery["manifests"] >= manifests and max(recovery["acknowledged"].values()) > recovery["checkpointStep"] > 0, recovery


def stopped_from(folder: Path, job: Path, step: int) -> Ran:
    """Start the job, and stop it as Ctrl-C does once a checkpoint of that step or a later one is committed."""
    process, limit = start(folder, job), time.monotonic() + SECONDS / 2
    while not any(max(steps_of(run), default=0) >= step for run in folder.glob(".psjob/*")):
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    return finish(process, folder)


def check_torn(ran: Ran, shard: int) -> None:
    """The one fault has hit this shard with a file unfinished, which no manifest names, and it came back from a checkpoint before."""
    (recovery,) = ran.summary["recoveries"]
    assert recovery["manifests"] >= 2 and recovery["torn"], recovery
    assert [attempt > 1 for attempt in ran.summary["attempts"]] == [index == shard for index in range(len(ran.summary["attempts"]))]
    whole = recovery["torn"].removesuffix(".tmp")
    manifests = {path.name: path.read_text() for path in ran.folder.glob("manifest-*.json")}
    assert len(manifests) > recovery["manifests"] and whole not in manifests and not any(whole in text for text in manifests.values())


def faults(*texts: str) -> list[str]:
    """The words of `--fault`, each."""
    return [word for text in texts for word in ("--fault", text)]


def _tails(folder: Path) -> str:
    logs = sorted(folder.glob(".psjob/*/logs/*.log"), key=lambda path: path.stat().st_mtime)
    return "\n".join(f"-- {path.name}\n{path.read_text()[-1200:]}" for path in logs[-12:])
