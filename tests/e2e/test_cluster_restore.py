"""The API server is restored from an older backup under a job: numbers were given twice, and nothing counts twice or is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import counting, etcd_restored
from tests.e2e.digits import beyond_checkpoint, complete, coordinator, final_weights, pod_of, ready_to_kill
from tests.e2e.kube import Kube, wait_for
from tests.support.cluster_fixtures import Cluster

pytestmark = [pytest.mark.nodes, pytest.mark.serial]
NAME = "counts"
WORKERS, STEPS, PACE = 2, 500, 0.05
MANY = ("shard", "worker", "worker", "worker", "worker", "shard")
"""Lost after the backup, one after the other."""


def lose(kube: Kube, role: str) -> None:
    """Worker 1 or shard 0 is deleted; training continues beyond a new checkpoint."""
    index = 1 if role == "worker" else 0
    pod = pod_of(kube, NAME, role, index)
    number, step = int(pod["metadata"]["labels"]["psjob.dev/number"]), (coordinator(kube, NAME) or {}).get("step", 0)
    kube.kubectl("delete", "pod", pod["metadata"]["name"], "--force", "--grace-period=0")

    def on() -> bool:
        said = beyond_checkpoint(kube, NAME)
        newest = pod_of(kube, NAME, role, index)
        there = int(newest["metadata"]["labels"]["psjob.dev/number"]) > number and newest["status"].get("phase") == "Running"
        return there and said is not None and len(counting.joined(kube, NAME)) == WORKERS and said["checkpoint"]["step"] > step

    wait_for(f"training to continue after the loss of {pod['metadata']['name']}", on, 120, story=lambda: kube.story(NAME))


@pytest.mark.timeout(900)
@pytest.mark.soak
@pytest.mark.parametrize("losses", [MANY, ("worker",)], ids=["many", "the next number is in use"])
def test_a_job_ends_right_after_its_api_server_was_restored(
    kube: Kube, node_cluster: Cluster, tmp_path: Path, losses: tuple[str, ...]
) -> None:
    kube.apply(counting.job(NAME, STEPS, PACE, WORKERS, runPolicy={"backoffLimit": 2}))
    ready_to_kill(kube, NAME)
    etcd_restored.backup(node_cluster, tmp_path / "etcd")
    old = kube.status(NAME)
    for role in losses:
        lose(kube, role)
    lost, said = kube.status(NAME), coordinator(kube, NAME)
    assert said is not None and said["step"] < STEPS
    assert lost["internal"]["workerStart"] > old["internal"]["workerStart"]
    term, start = lost["internal"]["term"], lost["internal"]["workerStart"]
    print(f"lost: term {term}, start {start}, step {said['step']}; restored: term {old['internal']['term']}, start 1")
    etcd_restored.restore(node_cluster, tmp_path / "etcd")
    assert kube.status(NAME)["internal"]["workerStart"] == old["internal"]["workerStart"] == 1
    status = complete(kube, NAME)
    print(f"term {status['internal']['term']}, start {status['internal']['workerStart']}, {status['restarts']['causes']}")
    if losses == MANY:
        assert status["restarts"]["causes"]["Fenced"] >= 2
        assert status["internal"]["term"] > lost["internal"]["term"] and status["internal"]["workerStart"] > lost["internal"]["workerStart"]
    assert status["restarts"]["counted"] <= 1, "pods that ended after the backup are told of once more, without their last words"
    counting.check(final_weights(kube, NAME), STEPS, WORKERS)
