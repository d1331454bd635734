"""Pairs of a shard and a worker on two real nodes, placed by a real scheduler: who fails alone comes back, and a lost node takes both."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from hack.cluster.options import BRIDGE_ADDRESS
from tests.e2e import digits
from tests.e2e.digits import accuracy, complete, coordinator, final_weights, pod_of, ready_to_kill
from tests.e2e.kube import Kube, wait_for
from tests.e2e.node_faults import lose, operator_on, ready
from tests.support.cluster_fixtures import Cluster

pytestmark = [pytest.mark.soak, pytest.mark.serial]
NAME = "pairs"


def job() -> dict[str, Any]:
    """Two workers on two nodes, as long as there are two, and a shard beside each."""
    kept = {"periodSeconds": 2, "everySteps": 25, "volumeClaimTemplate": {"spec": {"accessModes": ["ReadWriteMany"]}}}
    made = digits.job(NAME, args=[f"--epochs={digits.LONG_EPOCHS}"], checkpoint=kept, shards={"replicas": 2, "placement": "Colocated"})
    selector = {"matchLabels": {"psjob.dev/job-name": NAME, "psjob.dev/role": "worker"}}
    made["spec"]["workers"]["template"]["spec"]["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "DoNotSchedule",
            "nodeTaintsPolicy": "Honor",
            "labelSelector": selector,
        }
    ]
    return made


def node_of(kube: Kube, role: str, index: int, number: int = 1) -> str | None:
    """The node on which the newest pod of a seat runs; None before one of this number or a later one does."""
    pod = pod_of(kube, NAME, role, index)
    runs = pod["status"].get("phase") == "Running" and int(pod["metadata"]["labels"]["psjob.dev/number"]) >= number
    return str(pod["spec"]["nodeName"]) if runs else None


def pair(kube: Kube, index: int) -> tuple[str | None, str | None]:
    return node_of(kube, "shard", index), node_of(kube, "worker", index)


@pytest.mark.timeout(900)
def test_a_lost_node_takes_a_pair_that_starts_again_together(kube: Kube, home: Kube, node_cluster: Cluster, nodes: set[int]) -> None:
    kube.apply(job())
    ready_to_kill(kube, NAME)
    first, second = pair(kube, 0), pair(kube, 1)
    assert first[0] == first[1] and second[0] == second[1] and first[0] != second[0], (first, second)
    victim = pod_of(kube, NAME, "worker", 1)
    kube.kubectl("delete", "pod", victim["metadata"]["name"], "--wait=false", "--grace-period=0", "--force")
    back = wait_for("the worker's next start", lambda: node_of(kube, "worker", 1, 2), 120, story=lambda: kube.story(NAME))
    assert back == second[0], "it comes back to its shard"
    assert pod_of(kube, NAME, "shard", 1)["metadata"]["labels"]["psjob.dev/number"] == "1"
    ready_to_kill(kube, NAME)
    lost = str(second[0])
    operator_on(home, lost, False)
    step = (coordinator(kube, NAME) or {"step": 0})["step"]
    at = lose(node_cluster, [kube, home], lost, nodes)
    again = wait_for("the pair elsewhere", lambda: _moved(kube, lost), 180, story=lambda: kube.story(NAME))
    told = wait_for("steps after it", lambda: _beyond(kube, step), 120, story=lambda: kube.story(NAME))
    print(f"\n{lost} lost; the pair on {again}, step {told} after {step}, at {at:.0f}")
    for kubelet in nodes:
        os.kill(kubelet, signal.SIGCONT)
    wait_for(f"{lost} to be Ready again", lambda: ready(node_cluster, lost) == "True", 60)
    status = complete(kube, NAME)
    print(f"restarts {status['restarts']}")
    assert status["restarts"]["counted"] == 0 and status["restarts"]["causes"] == {"Deleted": 1, "NodeLost": 2}
    counts = {(it["role"], it["index"]): it["count"] for it in status["restarts"]["byProcess"]}
    assert counts == {("shard", 1): 1, ("worker", 1): 2}, "one restart each for the node, and one of the worker for its pod"
    assert accuracy(final_weights(kube, NAME)) >= 0.95


def _moved(kube: Kube, lost: str) -> str | None:
    shard, worker = node_of(kube, "shard", 1, 2), node_of(kube, "worker", 1, 3)
    return shard if shard is not None and shard == worker and shard != lost else None


def _beyond(kube: Kube, step: int) -> int | None:
    said = coordinator(kube, NAME)
    return int(said["step"]) if said and said["step"] > step else None


@pytest.mark.timeout(600)
def test_a_pair_in_the_network_of_its_node_shares_memory(home: Kube, node_cluster: Cluster) -> None:
    """The way that docs/operations.md names; a pair with a network each goes over TCP."""
    space = node_cluster.create_namespace("pairs", {"pod-security.kubernetes.io/enforce": "privileged"}, isolated=False)
    kube = replace(home, namespace=space)
    # A node of these tests reaches the cluster's DNS only at its own address, not at that of the Service.
    wait = [{"name": "timeout", "value": "1"}, {"name": "attempts", "value": "1"}]
    dns = {"dnsPolicy": "ClusterFirstWithHostNet", "dnsConfig": {"nameservers": [BRIDGE_ADDRESS], "options": wait}}
    try:
        for name, network, transport in (("near", {"hostNetwork": True, **dns}, "shared"), ("apart", {}, "tcp")):
            epochs = [f"--epochs={digits.LONG_EPOCHS}"]
            made = digits.job(
                name, workers=1, args=epochs, shards={"replicas": 1, "placement": "Colocated"}, checkpoint={"periodSeconds": 2}
            )
            made["spec"]["workers"]["template"]["spec"] |= network
            made["spec"]["shards"]["template"]["spec"] |= network
            kube.apply(made)
            said = wait_for(f"{name} to train", partial(_trains, kube, name), 120, story=partial(kube.story, name))
            print(f"\n{name}: blocks go by {said['transport']}")
            assert said["transport"] == transport, said
            kube.kubectl("delete", "pstrainingjob", name, "--wait=true")
    finally:
        home.kubectl("delete", "namespace", space, "--wait=false")
        wait_for("the namespace's pods to be gone", lambda: not kube.list("pods"), 60)


@pytest.mark.timeout(600)
def test_a_pair_of_a_restricted_namespace_shares_memory_by_a_volume(kube: Kube) -> None:
    """Neither pod is in the network of its node. Who is killed comes back to the volume of the other."""
    kept = {"periodSeconds": 2, "everySteps": 25}
    shards = {"replicas": 1, "placement": "Colocated", "pairStorageClassName": "standard"}
    epochs = [f"--epochs={digits.LONG_EPOCHS}"]
    kube.apply(digits.job(NAME, workers=2, args=epochs, shards=shards, checkpoint=kept))
    said = wait_for("the job to train", partial(_trains, kube, NAME), 120, story=partial(kube.story, NAME))
    assert said["transport"] == "mixed", "worker 1 has no shard of its own"
    (volume,) = _pair_volumes(kube)
    for role in ("worker", "shard"):
        ready_to_kill(kube, NAME)
        pod = pod_of(kube, NAME, role, 0)["metadata"]["name"]
        kube.kubectl("delete", "pod", pod, "--wait=false", "--grace-period=0", "--force")
        wait_for(f"the {role}'s next start", partial(node_of, kube, role, 0, 2), 120, story=partial(kube.story, NAME))
        step = ready_to_kill(kube, NAME)
        told = wait_for("steps after it", partial(_beyond, kube, step), 120, story=partial(kube.story, NAME))
        assert _pair_volumes(kube) == [volume], "it mounts what the other has"
        said = coordinator(kube, NAME)
        assert said is not None and said["transport"] == "mixed", f"step {told}: {said}"
    status = complete(kube, NAME)
    assert status["restarts"]["counted"] == 0 and status["restarts"]["causes"]["Deleted"] == 2
    assert accuracy(final_weights(kube, NAME)) >= 0.95


RATES = """
import statistics, time, torch, psjob as ps
model = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(1024, 1024)) for _ in range(25))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
model, optimizer = ps.attach(model, optimizer)
for p in model.parameters():
    p.grad = torch.ones_like(p)
times = []
while ps.step() < 60:
    began = time.monotonic()
    optimizer.step()
    times.append(time.monotonic() - began)
print(f"median {statistics.median(times[20:]):.4f} best {min(times[20:]):.4f}", flush=True)
"""
"""100 MiB each way in a step that computes nothing."""


@pytest.mark.timeout(600)
def test_the_own_part_goes_at_the_speed_of_memory(kube: Kube) -> None:
    """Shows the figure of docs/performance/placement.md; what it must be is for the docs to say, not for a test."""
    rates = {}
    for name, given in (("meets", {"pairStorageClassName": "standard"}), ("apart", {})):
        made = digits.job(name, workers=1, shards={"replicas": 1, "placement": "Colocated", **given})
        (container,) = made["spec"]["workers"]["template"]["spec"]["containers"]
        container["command"], container["args"] = ["python", "-c", RATES], []
        kube.apply(made)
        complete(kube, name)
        words = kube.kubectl("logs", pod_of(kube, name, "worker", 0)["metadata"]["name"], "-c", "worker").split()
        rates[name] = float(words[words.index("median") + 1])
        print(f"\n{name}: {1e3 * rates[name]:.1f} ms a step, {2 * 25 * 4 * 2**20 / rates[name] / 1e9:.1f} GB/s both ways")
        kube.kubectl("delete", "pstrainingjob", name, "--wait=true")
    assert rates["meets"] < rates["apart"]


def _pair_volumes(kube: Kube) -> list[str]:
    """The claims that pods of pair 0 which run mount in common."""
    pods = [pod_of(kube, NAME, role, 0) for role in ("shard", "worker")]
    mounted = [{it.get("persistentVolumeClaim", {}).get("claimName") for it in pod["spec"]["volumes"]} - {None} for pod in pods]
    return sorted(mounted[0] & mounted[1])


def _trains(kube: Kube, name: str) -> dict[str, Any] | None:
    said = coordinator(kube, name)
    return said if said and said["step"] > 0 else None
