"""A node that is lost, and nodes that are drained: the job continues elsewhere by itself, with the storage that a claim gets by default."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import Any

import pytest

from tests.e2e import digits
from tests.e2e.digits import LABEL_JOB, accuracy, complete, coordinator, final_weights, pod_of, pods_of, ready_to_kill
from tests.e2e.kube import Kube, shard_status, wait_for
from tests.e2e.node_faults import drained, lose, one_of_each, operator_on, ready
from tests.support.cluster_fixtures import Cluster
from tests.support.soaking import soak

pytestmark = [pytest.mark.nodes, pytest.mark.serial]
NAME = "digits"


def begins(mode: str) -> dict[str, Any]:
    """Checkpoints often, on a claim as the operator makes it where nothing else is said: ReadWriteOnce, one node for all shards."""
    # As the example of async has it: momentum and stale gradients together would diverge at this learning rate.
    args = [f"--epochs={digits.LONG_EPOCHS}", *(["--momentum=0"] if mode == "async" else [])]
    job = digits.job(NAME, args=args, checkpoint={"periodSeconds": 2, "everySteps": 25}, training={"mode": mode})
    assert "volumeClaimTemplate" not in job["spec"]["checkpoint"] and "volume" not in job["spec"]["checkpoint"]
    return job


def pushed(kube: Kube, attempt: int) -> float | None:
    """Unix time of the first push that counted on a shard 0 after that attempt; None before."""
    said = successor(kube, attempt)
    return said["counters"]["firstApplied"] if said else None


def resumed(kube: Kube, attempt: int) -> int | None:
    """The step at which a shard 0 after that attempt began; None before its first push."""
    said = successor(kube, attempt)
    return int(said["coordinator"]["step"]) if said and said["counters"]["firstApplied"] else None


def successor(kube: Kube, attempt: int) -> dict[str, Any] | None:
    first = pods_of(kube, NAME, "shard", 0)
    said = shard_status(kube, first[0]) if first else None
    return said if said and said["attempt"] > attempt else None


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("mode", "beside"),
    [
        ("sync", True),
        soak("sync", False),
        soak("async", True),
        soak("async", False),
    ],
)
def test_a_lost_node_is_left_at_once(kube: Kube, home: Kube, node_cluster: Cluster, nodes: set[int], mode: str, beside: bool) -> None:
    """Nothing is deleted by hand. `beside`: the operator that acts stood on that node too."""
    kube.apply(begins(mode))
    ready_to_kill(kube, NAME)
    first = pod_of(kube, NAME, "shard", 0)
    node, attempt = first["spec"]["nodeName"], int(first["metadata"]["labels"]["psjob.dev/number"])
    operator_on(home, node, beside)
    at = lose(node_cluster, [kube, home], node, nodes)
    again = wait_for("the first push on the other node", lambda: pushed(kube, attempt), 120, story=lambda: kube.story(NAME))
    print(f"{mode}: {again - at:.1f} s from the loss of {node}{' with the operator' * beside} to the first push on the other node")
    assert pod_of(kube, NAME, "shard", 0)["spec"]["nodeName"] != node
    there = [pod for pod in kube.list("pods", f"{LABEL_JOB}={NAME}") if pod["spec"].get("nodeName") == node]
    assert not there, "what a lost node held is taken off, or it would keep its volume"
    for kubelet in nodes:
        os.kill(kubelet, signal.SIGCONT)
    wait_for(f"{node} to be Ready again", lambda: ready(node_cluster, node) == "True", 60)
    one_of_each(kube, NAME)
    status = complete(kube, NAME)
    assert status["restarts"]["counted"] == 0 and set(status["restarts"]["causes"]) <= {"NodeLost", "Retry"}, status["restarts"]
    assert accuracy(final_weights(kube, NAME)) >= (0.95 if mode == "sync" else 0.9)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_drain_takes_a_checkpoint_and_loses_no_step(kube: Kube, home: Kube, node_cluster: Cluster, nodes: set[int]) -> None:
    """First the node of the shards, then the one that they went to. The operator that acts is drained in one of these at least."""
    kube.apply(begins("sync"))
    ready_to_kill(kube, NAME)
    for turn in range(2):
        first = pod_of(kube, NAME, "shard", 0)
        node, attempt = first["spec"]["nodeName"], int(first["metadata"]["labels"]["psjob.dev/number"])
        if turn == 0:
            operator_on(home, node, False)
        said = coordinator(kube, NAME)
        assert said is not None
        again = drained(kube, NAME, node, partial(resumed, kube, attempt))
        assert again >= said["step"], f"it continued from step {again}, and step {said['step']} was made before the drain"
        told = partial(_told, kube, int(said["step"]))
        wait_for("the status to tell of the checkpoint that the drain took", told, 15, story=partial(kube.story, NAME))
        assert pod_of(kube, NAME, "shard", 0)["spec"]["nodeName"] != node
        one_of_each(kube, NAME)
        if turn == 0:
            causes = kube.status(NAME)["restarts"]["causes"]
            assert set(causes) <= {"Drained", "Moved", "Retry"}, "the operator saw how each of them ended"
        node_cluster.run_kubectl("uncordon", node)
    status = complete(kube, NAME)
    assert status["restarts"]["counted"] == 0, status["restarts"]
    assert accuracy(final_weights(kube, NAME)) >= 0.95


def _told(kube: Kube, step: int) -> bool:
    return bool(kube.status(NAME)["checkpoint"]["step"] >= step)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("mode", "fault"), [("sync", "lost"), ("async", "lost"), ("sync", "drained")])
def test_a_node_of_workers_leaves_the_shards_where_they_are(
    kube: Kube, home: Kube, node_cluster: Cluster, nodes: set[int], mode: str, fault: str
) -> None:
    job = begins(mode)
    apart = {"labelSelector": {"matchLabels": {LABEL_JOB: NAME}}, "topologyKey": "kubernetes.io/hostname"}
    rule = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": apart}]}
    job["spec"]["workers"]["template"]["spec"]["affinity"] = {"podAntiAffinity": rule}
    kube.apply(job)
    ready_to_kill(kube, NAME)
    shard = pod_of(kube, NAME, "shard", 0)
    away = [pod for pod in pods_of(kube, NAME, "worker") if pod["spec"]["nodeName"] != shard["spec"]["nodeName"]]
    assert away, "a worker stands on another node than the shards"
    node = away[0]["spec"]["nodeName"]
    starts = {int(pod["metadata"]["labels"]["psjob.dev/index"]): int(pod["metadata"]["labels"]["psjob.dev/number"]) for pod in away}

    def back() -> int | None:
        """The step that was made after all workers of that node had joined again."""
        said = coordinator(kube, NAME)
        joined = {it["rank"]: it["start"] for it in (said or {}).get("workers", []) if it["here"]}
        return int(said["step"]) if said and all(joined.get(rank, 0) > start for rank, start in starts.items()) else None

    if fault == "drained":
        drained(kube, NAME, node, back)
    else:
        at = lose(node_cluster, [kube, home], node, nodes)
        wait_for("training to continue", back, 60, story=lambda: kube.story(NAME))
        print(f"{mode}: {time.time() - at:.1f} s from the loss of {node} until its workers had joined again elsewhere")
        for kubelet in nodes:
            os.kill(kubelet, signal.SIGCONT)
    assert pod_of(kube, NAME, "shard", 0)["metadata"]["uid"] == shard["metadata"]["uid"], "no shard was touched"
    one_of_each(kube, NAME)
    status = complete(kube, NAME)
    cause = "Drained" if fault == "drained" else "NodeLost"
    assert status["restarts"]["counted"] == 0 and set(status["restarts"]["causes"]) <= {cause, "Retry"}, status["restarts"]
    assert accuracy(final_weights(kube, NAME)) >= (0.95 if mode == "sync" else 0.9)
