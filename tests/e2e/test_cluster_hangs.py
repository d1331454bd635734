"""A worker's pod that hangs on a real node: started again in time, counted, and what it said of where it stood.

- A model in stages on two real nodes: a stage's pod is deleted in the middle, and the weights are those of one process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e import digits
from tests.e2e.digits import complete, coordinator, final_weights, pod_of, pods_of, ready_to_kill
from tests.e2e.kube import Kube, processes, tool, wait_for
from tests.e2e.workloads.running import HERE, ROOT

pytestmark = [pytest.mark.soak, pytest.mark.serial]
LIMIT = 5
WITHIN = 8.0
"""Seconds from the hang to the worker's next pod, with that limit."""
SCRIPT = (Path(__file__).parent / "scripts" / "hangs.py").read_text()


def job(name: str, how: str) -> dict[str, Any]:
    """scripts/hangs.py, of which a container has no file: it is given as a word of its command."""
    document = digits.job(name)
    document["spec"]["workers"]["progressDeadlineSeconds"] = LIMIT
    (container,) = document["spec"]["workers"]["template"]["spec"]["containers"]
    container["command"], container["args"] = ["python", "-c", SCRIPT, how], []
    return document


def hang(kube: Kube, name: str, how: str, said: Path) -> float:
    """Wait until worker 1 hangs; when that was. A pod's first process is not stopped by itself, so that is done from outside."""
    if how != "stopped":
        words = wait_for("worker 1 to hang", lambda: [w for w in said.read_text().splitlines() if w.startswith("hangs at")] or None, 120)
        return float(words[0].split()[-1])
    wait_for("some steps", lambda: ((coordinator(kube, name) or {}).get("step") or 0) > 5, 120, story=lambda: kube.story(name))
    (process,) = processes(pod_of(kube, name, "worker", 1), "hangs at")
    os.kill(process, signal.SIGSTOP)
    return time.time()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["busy", "held", "stopped"])
def test_a_worker_that_hangs_is_started_again(kube: Kube, how: str) -> None:
    name = "hangs"
    kube.apply(job(name, how))
    first = wait_for("worker 1 to run", lambda: running(kube, name), 180, story=lambda: kube.story(name))
    with tempfile.NamedTemporaryFile() as log:
        words = [tool("kubectl"), "--kubeconfig", kube.kubeconfig, "-n", kube.namespace, "logs", "-f", first]
        follower = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
        try:
            hung = hang(kube, name, how, Path(log.name))
            again = wait_for("its next pod", lambda: newer(kube, name, first), 60, story=lambda: kube.story(name))
            follower.wait(60)
        finally:
            follower.kill()
            follower.wait()
        told = Path(log.name).read_text()
    made = datetime.fromisoformat(again["metadata"]["creationTimestamp"].replace("Z", "+00:00")).timestamp()
    print(f"{how}: its next pod was made {made - hung:.0f} s after it began to hang")
    assert made - hung < WITHIN
    assert ('"<string>", line' in told) is (how != "stopped"), told
    status = complete(kube, name)
    assert status["restarts"]["causes"] == {"Hung": 1} and status["restarts"]["counted"] == 1


def running(kube: Kube, name: str) -> str | None:
    """The name of worker 1's pod once it runs."""
    pods = digits.pods_of(kube, name, "worker", 1)
    return pods[0]["metadata"]["name"] if pods and pods[0]["status"].get("phase") == "Running" else None


def newer(kube: Kube, name: str, first: str) -> dict[str, Any] | None:
    """Worker 1's pod once it is another one than `first`."""
    pods = digits.pods_of(kube, name, "worker", 1)
    return pods[0] if pods and pods[0]["metadata"]["name"] != first else None


STAGES = (HERE / "stages.py").read_text()


def staged_job(name: str, replicas: tuple[int, ...]) -> dict[str, Any]:
    """Stages of so many workers, spread over the nodes."""
    made = digits.job(name, workers=sum(replicas), checkpoint={"periodSeconds": 3600, "everySteps": 10})
    pod = made["spec"]["workers"]["template"]["spec"]
    pod["containers"][0] |= {"command": ["python", "-c", STAGES, "0.1"], "args": []}
    spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
    pod["topologySpreadConstraints"] = [spread | {"labelSelector": {"matchLabels": {"psjob.dev/role": "worker"}}}]
    stages: list[dict[str, Any]] = [{"name": f"part-{number}", "replicas": count} for number, count in enumerate(replicas)]
    for stage, cut in zip(stages[1:], ("2", "5"), strict=True):
        stage["cut"] = cut
    made["spec"] |= {"stages": stages, "training": {"mode": "sync"}}
    return made


def run(kube: Kube, name: str, replicas: tuple[int, ...], delete: int | None = None) -> dict[str, torch.Tensor]:
    """Its final weights. `delete`: the rank whose pod is deleted once it trains beyond a checkpoint."""
    kube.apply(staged_job(name, replicas))
    if delete is not None:
        ready_to_kill(kube, name)
        victim = pod_of(kube, name, "worker", delete)
        kube.kubectl("delete", "pod", victim["metadata"]["name"], "--wait=false", "--grace-period=0", "--force")
        uid = victim["metadata"]["uid"]
        wait_for("its successor", lambda: any(pod["metadata"]["uid"] != uid for pod in pods_of(kube, name, "worker", delete)), 120)
    status = complete(kube, name)
    workers = pods_of(kube, name, "worker")
    print(f"\n{name}: workers on {sorted(pod['spec'].get('nodeName', '-') for pod in workers)}")
    assert len({pod["spec"]["nodeName"] for pod in workers}) == 2
    assert {pod["metadata"]["labels"]["psjob.dev/stage"] for pod in workers} == {f"part-{number}" for number in range(len(replicas))}
    print(f"{name}: restarts {status.get('restarts')}")
    return load_file(final_weights(kube, name))


def test_a_stages_pod_is_deleted_and_no_bit_changes(kube: Kube, tmp_path: Path) -> None:
    calm = run(kube, "calm", (2, 1, 1))
    for name, rank in (("front", 1), ("middle", 2)):
        hit = run(kube, name, (2, 1, 1), delete=rank)
        assert all(torch.equal(hit[key], tensor) for key, tensor in calm.items()), name
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(HERE / "stages.py"), "0", "2", "5"], cwd=tmp_path, env=env, check=True, timeout=300)
    alone = torch.load(tmp_path / "alone.pt", weights_only=True)
    last = run(kube, "last", (1, 1, 1), delete=2)
    assert all(torch.equal(last[key], tensor) for key, tensor in alone.items())
