"""A model in stages on two real nodes: a stage's pod is deleted in the middle, and the weights are those of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e import digits
from tests.e2e.digits import complete, final_weights, pod_of, pods_of, ready_to_kill
from tests.e2e.kube import Kube, wait_for
from tests.e2e.workloads.running import HERE, ROOT

pytestmark = [pytest.mark.soak, pytest.mark.serial]
SCRIPT = (HERE / "stages.py").read_text()


def job(name: str, replicas: tuple[int, ...]) -> dict[str, Any]:
    """Stages of so many workers, spread over the nodes."""
    made = digits.job(name, workers=sum(replicas), checkpoint={"periodSeconds": 3600, "everySteps": 10})
    pod = made["spec"]["workers"]["template"]["spec"]
    pod["containers"][0] |= {"command": ["python", "-c", SCRIPT, "0.1"], "args": []}
    spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
    pod["topologySpreadConstraints"] = [spread | {"labelSelector": {"matchLabels": {"psjob.dev/role": "worker"}}}]
    stages: list[dict[str, Any]] = [{"name": f"part-{number}", "replicas": count} for number, count in enumerate(replicas)]
    for stage, cut in zip(stages[1:], ("2", "5"), strict=True):
        stage["cut"] = cut
    made["spec"] |= {"stages": stages, "training": {"mode": "sync"}}
    return made


def run(kube: Kube, name: str, replicas: tuple[int, ...], delete: int | None = None) -> dict[str, torch.Tensor]:
    """Its final weights. `delete`: the rank whose pod is deleted once it trains beyond a checkpoint."""
    kube.apply(job(name, replicas))
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
