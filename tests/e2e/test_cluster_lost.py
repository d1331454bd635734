"""A node that is lost, and nodes that are drained: the job goes on elsewhere by itself, with the storage that a claim gets by default."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.cluster_fixtures import Cluster
from tests.e2e import digits
from tests.e2e.digits import LABEL_JOB, accuracy, complete, coordinator, final_weights, pod_of, pods_of, ready_to_kill
from tests.e2e.kube import Kube, processes, shard_status, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.serial, pytest.mark.e2e]
NAME = "digits"


@pytest.fixture
def nodes(node_cluster: Cluster) -> Iterator[set[int]]:
    """Kubelets that a test stops; whatever happens, they go on and every node takes pods after it."""
    stopped: set[int] = set()
    yield stopped
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    for node in ("node1", "node2"):
        node_cluster.run_kubectl("uncordon", node, check=False)
        wait_for(f"{node} to take pods again", partial(usable, node_cluster, node), 60)


def usable(cluster: Cluster, node: str) -> bool:
    return ready(cluster, node) == "True" and not cluster.api.get(f"/api/v1/nodes/{node}")["spec"].get("taints")


def ready(cluster: Cluster, node: str) -> str:
    conditions = cluster.api.get(f"/api/v1/nodes/{node}")["status"]["conditions"]
    return next(str(entry["status"]) for entry in conditions if entry["type"] == "Ready")


def lose(cluster: Cluster, kubes: list[Kube], node: str, stopped: set[int]) -> float:
    """The node is gone from one moment to the next: its kubelet, and the processes of those namespaces' pods there. The unix time of it."""
    kubelet = cluster.pid(f"{node}/kubelet")
    there = [pod for kube in kubes for pod in kube.list("pods") if pod["spec"].get("nodeName") == node]
    stopped.add(kubelet)
    os.kill(kubelet, signal.SIGSTOP)
    at = time.time()
    for pod in there:
        for pid in processes(pod, ""):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return at


def begins(mode: str) -> dict[str, Any]:
    """Checkpoints often, on a claim as the operator makes it where nothing else is said: ReadWriteOnce, one node for all shards."""
    job = digits.job(
        NAME, args=[f"--epochs={digits.LONG_EPOCHS}"], checkpoint={"interval": "2s", "everySteps": 25}, training={"mode": mode}
    )
    assert "accessMode" not in job["spec"]["checkpoint"] and "volume" not in job["spec"]["checkpoint"]
    return job


def pushed(kube: Kube, attempt: int) -> float | None:
    """Unix time of the first push that counted on a shard 0 after that attempt; None before."""
    first = pods_of(kube, NAME, "shard", 0)
    said = shard_status(first[0]) if first else None
    return said["counters"]["firstApplied"] if said and said["attempt"] > attempt else None


def one_of_each(kube: Kube) -> None:
    """No two pods that run sit in one seat, and all shards that run are on one node."""
    alive = [pod for pod in kube.list("pods", f"{LABEL_JOB}={NAME}") if pod["status"].get("phase") in ("Pending", "Running")]
    labels = [pod["metadata"]["labels"] for pod in alive]
    seats = Counter((it["psjob.dev/role"], it["psjob.dev/index"]) for it in labels)
    assert seats and max(seats.values()) == 1, seats
    assert len({pod["spec"]["nodeName"] for pod in alive if pod["metadata"]["labels"]["psjob.dev/role"] == "shard"}) <= 1


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.soak)])
def test_a_lost_node_is_left_at_once(kube: Kube, home: Kube, node_cluster: Cluster, nodes: set[int], mode: str) -> None:
    """Nothing is deleted by hand, and where the operator stands does not matter."""
    kube.apply(begins(mode))
    ready_to_kill(kube, NAME)
    first = pod_of(kube, NAME, "shard", 0)
    node, attempt = first["spec"]["nodeName"], int(first["metadata"]["labels"]["psjob.dev/number"])
    at = lose(node_cluster, [kube, home], node, nodes)
    again = wait_for("the first push on the other node", lambda: pushed(kube, attempt), 120, story=lambda: kube.story(NAME))
    print(f"{mode}: {again - at:.1f} s from the loss of {node} to the first push on the other node")
    assert pod_of(kube, NAME, "shard", 0)["spec"]["nodeName"] != node
    there = [pod for pod in kube.list("pods", f"{LABEL_JOB}={NAME}") if pod["spec"].get("nodeName") == node]
    assert not there, "what a lost node held is taken off, or it would keep its volume"
    for kubelet in nodes:
        os.kill(kubelet, signal.SIGCONT)
    wait_for(f"{node} to be Ready again", lambda: ready(node_cluster, node) == "True", 60)
    one_of_each(kube)
    status = complete(kube, NAME)
    assert status["restarts"]["counted"] == 0 and set(status["restarts"]["causes"]) <= {"NodeLost", "Retry"}, status["restarts"]
    assert accuracy(final_weights(kube, NAME)) >= (0.95 if mode == "sync" else 0.9)


@pytest.mark.timeout(900)
def test_a_drain_takes_a_checkpoint_and_loses_no_step(kube: Kube, node_cluster: Cluster, nodes: set[int]) -> None:
    """First the node of the shards, then the one that they went to."""
    kube.apply(begins("sync"))
    ready_to_kill(kube, NAME)
    for _ in range(2):
        first = pod_of(kube, NAME, "shard", 0)
        node, attempt = first["spec"]["nodeName"], int(first["metadata"]["labels"]["psjob.dev/number"])
        said = coordinator(kube, NAME)
        assert said is not None
        at = time.time()
        kube.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=120s", timeout=150)
        again = wait_for("the first push on the other node", partial(pushed, kube, attempt), 120, story=lambda: kube.story(NAME))
        print(f"{again - at:.1f} s from the drain of {node} to the first push on the other node")
        kept = kube.status(NAME)["checkpoint"]["step"]
        assert kept >= said["step"], f"the last checkpoint has step {kept}, and step {said['step']} was made before the drain"
        assert pod_of(kube, NAME, "shard", 0)["spec"]["nodeName"] != node
        one_of_each(kube)
        node_cluster.run_kubectl("uncordon", node)
    status = complete(kube, NAME)
    assert status["restarts"]["counted"] == 0, status["restarts"]
    assert "Missing" not in status["restarts"]["causes"], status["restarts"]
    assert accuracy(final_weights(kube, NAME)) >= 0.95
