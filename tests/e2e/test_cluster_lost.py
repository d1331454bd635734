"""A node that is lost, and nodes that are drained: the job continues elsewhere by itself, with the storage that a claim gets by default.

- A node with many workers is reset again and again: each reset is one event, and the job ends right.
- The real nodes themselves: what other end-to-end tests take for granted.
- A shard that lives on behind a cut-off kubelet while its successor trains: nothing of it is ever read.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import counting, digits
from tests.e2e.digits import LABEL_JOB, accuracy, beyond_checkpoint, complete, coordinator, final_weights, pod_of, pods_of, ready_to_kill
from tests.e2e.kube import Kube, processes, shard_status, wait_for
from tests.e2e.node_faults import drained, lose, one_of_each, operator_on, ready, reset
from tests.support.cluster_fixtures import RUNTIME_IMAGE, WORKER_IMAGE, Cluster
from tests.support.soaking import soak

pytestmark = pytest.mark.serial
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


@pytest.mark.nodes
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


@pytest.mark.nodes
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


@pytest.mark.nodes
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


COUNTS = "counts"
WORKERS, RESETS, STEPS, PACE = 8, 5, 240, 0.05


@pytest.mark.nodes
@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shards_on", ["node2", "node1"])
def test_a_node_of_eight_workers_reset_five_times_completes(kube: Kube, node_cluster: Cluster, shards_on: str) -> None:
    document = counting.job(COUNTS, STEPS, PACE, WORKERS, runPolicy={"backoffLimit": 3})
    document["spec"]["workers"]["template"]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": "node2"}
    document["spec"]["shards"]["template"]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": shards_on}
    kube.apply(document)
    began = time.time()
    before, kept = dict.fromkeys(range(WORKERS), 0), 0

    def trains() -> bool:
        """All workers were started again, and a new checkpoint and a step came after that."""
        said, joined = beyond_checkpoint(kube, COUNTS), counting.joined(kube, COUNTS)
        again = len(joined) == WORKERS and all(joined[rank] > start for rank, start in before.items())
        return again and said is not None and said["checkpoint"]["step"] > kept

    for turn in range(RESETS):
        wait_for(f"training to continue after {turn} resets", trains, 200, story=lambda: kube.story(COUNTS))
        before = counting.starts(kube, COUNTS)
        said = coordinator(kube, COUNTS)
        assert said is not None and said["step"] < STEPS, "it was over before the last reset"
        kept = said["checkpoint"]["step"]
        print(f"{time.time() - began:.0f} s: reset {turn + 1} at step {said['step']}; {kube.status(COUNTS)['restarts']['causes']}")
        reset(node_cluster, "node2")
    status = complete(kube, COUNTS)
    print(f"{time.time() - began:.0f} s: {status['restarts']['causes']}, {status['restarts']['counted']} counted")
    assert status["restarts"]["counted"] <= 3 and status["restarts"]["total"] >= RESETS * WORKERS, status["restarts"]
    counting.check(final_weights(kube, COUNTS), STEPS, WORKERS)


RESTRICTED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
SECURITY = {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000, "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def _pod(name: str, script: str, **spec: Any) -> dict[str, Any]:
    container = {
        "name": "c",
        "image": WORKER_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", script],
        "securityContext": RESTRICTED,
        "volumeMounts": [{"name": "lib", "mountPath": "/psjob"}, {"name": "data", "mountPath": "/data"}],
    }
    copy = {
        **container,
        "name": "copy",
        "image": RUNTIME_IMAGE,
        "command": ["/psjob-runtime/bin/busybox", "cp", "-R", "/psjob-runtime/.", "/psjob"],
    }
    volumes = [{"name": "lib", "emptyDir": {}}, {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    body = {"restartPolicy": "Never", "securityContext": SECURITY, "initContainers": [copy], "containers": [container], "volumes": volumes}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": "x"}}, "spec": {**body, **spec}}


def _claim(cluster: Cluster, namespace: str) -> None:
    body = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data"}, "spec": body}
    cluster.api.create(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims", claim)


def _logs(cluster: Cluster, namespace: str, pod: str) -> str:
    return cluster.run_kubectl("logs", "-n", namespace, pod, check=False).stdout


@pytest.mark.nodes
@pytest.mark.rotating
def test_pods_import_torch_find_each_other_and_share_a_claim(node_cluster: Cluster, node_namespace: str) -> None:
    cluster, path = node_cluster, f"/api/v1/namespaces/{node_namespace}"
    cluster.api.merge(path, {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}})
    _claim(cluster, node_namespace)
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": "x"}}
    cluster.api.create(f"{path}/services", {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "h"}, "spec": service})
    first = "import os, torch; open('/data/x', 'w').write('shared')"
    first += "; print(torch.ones(2).sum().item(), os.path.isdir('/psjob/lib/psjob'), flush=True)"
    linger = "import time; time.sleep(600)"
    named = {"hostname": "first", "subdomain": "h", "nodeName": "node1"}
    cluster.api.create(f"{path}/pods", _pod("first", f"{first}; {linger}", **named))
    wait_for("torch in the first pod", lambda: "2.0 True" in _logs(cluster, node_namespace, "first"), 120)
    second = "import socket; print(open('/data/x').read(), socket.gethostbyname('first.h'))"
    cluster.api.create(f"{path}/pods", _pod("second", second, nodeName="node2"))
    address = cluster.api.get(f"{path}/pods/first")["status"]["podIP"]
    wait_for("file and name in the second pod", lambda: f"shared {address}" in _logs(cluster, node_namespace, "second"), 60)


@pytest.mark.nodes
@pytest.mark.rotating
def test_a_stopped_kubelet_makes_its_node_unknown_and_comes_back(node_cluster: Cluster) -> None:
    def ready() -> str:
        conditions = node_cluster.api.get("/api/v1/nodes/node2")["status"]["conditions"]
        return next(str(item["status"]) for item in conditions if item["type"] == "Ready")

    kubelet = node_cluster.pid("node2/kubelet")
    os.kill(kubelet, signal.SIGSTOP)
    try:
        wait_for("node2 to be Unknown", lambda: ready() == "Unknown", 60)
    finally:
        os.kill(kubelet, signal.SIGCONT)
    wait_for("node2 to be Ready again", lambda: ready() == "True", 60)
    wait_for("its taints to go", lambda: not node_cluster.api.get("/api/v1/nodes/node2")["spec"].get("taints"), 60)


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


@pytest.mark.soak
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
