"""A shard that lives on behind a cut-off kubelet while its successor trains: nothing of it is ever read."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import digits
from tests.e2e.digits import accuracy, complete, coordinator, final_weights, pod_of, ready_to_kill
from tests.e2e.kube import Kube, processes, wait_for
from tests.support.cluster_fixtures import Cluster

pytestmark = [pytest.mark.soak, pytest.mark.serial]
TERM = {"labelSelector": {"matchLabels": {"psjob.dev/role": "shard"}}, "topologyKey": "kubernetes.io/hostname"}
APART = {"weight": 100, "podAffinityTerm": TERM}


@pytest.fixture
def stop(node_cluster: Cluster) -> Iterator[Callable[[int], None]]:
    """SIGSTOP to a process; whatever happens, it continues after the test."""
    stopped: list[int] = []

    def send(pid: int) -> None:
        stopped.append(pid)
        os.kill(pid, signal.SIGSTOP)

    yield send
    for pid in stopped:
        proceed(pid)


def proceed(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass


def ready_node(kube: Kube, node: str) -> str:
    conditions = (kube.get("node", node) or {})["status"]["conditions"]
    return next(entry["status"] for entry in conditions if entry["type"] == "Ready")


def spread(name: str) -> dict[str, Any]:
    """The job with its shards on different nodes where it can be."""
    volume = {"periodSeconds": 2, "everySteps": 25, "volumeClaimTemplate": {"spec": {"accessModes": ["ReadWriteMany"]}}}
    job = digits.job(name, args=[f"--epochs={digits.LONG_EPOCHS}"], checkpoint=volume)
    preferred = {"preferredDuringSchedulingIgnoredDuringExecution": [APART]}
    job["spec"]["shards"]["template"]["spec"]["affinity"] = {"podAntiAffinity": preferred}
    return job


@pytest.mark.timeout(900)
@pytest.mark.parametrize("frozen", [False, True], ids=["running", "frozen"])
def test_a_zombie_shard_is_fenced_and_never_read(
    kube: Kube, home: Kube, node_cluster: Cluster, stop: Callable[[int], None], frozen: bool
) -> None:
    """`frozen`: the zombie itself stands still too, and wakes up when its successor has long committed."""
    name = "digits"
    kube.apply(spread(name))
    ready_to_kill(kube, name)
    zombie = pod_of(kube, name, "shard", 0)
    own = processes(zombie, "psjob.shard")
    node = zombie["spec"]["nodeName"]
    kubelet = node_cluster.pid(f"{node}/kubelet")
    stop(kubelet)
    if frozen:
        for process in own:
            stop(process)
    wait_for(f"{node} to be Unknown", lambda: ready_node(kube, node) == "Unknown", 60)
    kube.kubectl("delete", "pod", zombie["metadata"]["name"], "--force", "--grace-period=0")
    assert all(Path(f"/proc/{process}").exists() for process in own), "the process lives on though its pod is gone"

    def succeeded() -> bool:
        newest = pod_of(kube, name, "shard", 0)
        said = coordinator(kube, name)
        return newest["metadata"]["uid"] != zombie["metadata"]["uid"] and bool(
            said and said["checkpoint"] and said["checkpoint"]["term"] >= 2
        )

    wait_for("the successor to commit a checkpoint of its own view", succeeded, 180, story=lambda: kube.story(name))
    if frozen:
        for process in own:
            proceed(process)
    wait_for("the zombie to end by itself", lambda: not any(Path(f"/proc/{process}").exists() for process in own), 60)
    proceed(kubelet)
    wait_for(f"{node} to be Ready again", lambda: ready_node(kube, node) == "True", 60)
    status = complete(kube, name)
    assert accuracy(final_weights(kube, name)) >= 0.95
    assert status["shards"][0]["attempt"] >= 2 and status["internal"]["term"] >= 2
    assert status["restarts"]["counted"] == 0, "a lost node is nobody's failure"
    folder = final_weights(kube, name).parent
    claimed = (folder / "CLAIM-000002").stat().st_mtime
    late = [file.name for file in folder.glob("manifest-v000001-*") if file.stat().st_mtime > claimed + 1]
    assert not late, "a zombie committed after its successor had claimed the run"
