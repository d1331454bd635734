"""What is done to real nodes: taken from one moment to the next, drained, brought back; and what must hold afterwards.

- The API server's data: a copy of it, and the loss of all that was written after.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from tests.e2e.digits import LABEL_JOB
from tests.e2e.kube import Kube, processes, wait_for
from tests.support.cluster_fixtures import Cluster

NODES = ("node1", "node2")
T = TypeVar("T")


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


def reset(cluster: Cluster, node: str) -> None:
    """The node is reset: kubelet, containerd and each process end at once, and it comes up again on its disk. Waits until it does."""
    at = time.time()
    init = cluster.pid(node)
    os.kill(init, signal.SIGKILL)

    def heard() -> bool:
        conditions = cluster.api.get(f"/api/v1/nodes/{node}")["status"]["conditions"]
        beat = next(entry["lastHeartbeatTime"] for entry in conditions if entry["type"] == "Ready")
        return datetime.fromisoformat(beat.replace("Z", "+00:00")).timestamp() > at and ready(cluster, node) == "True"

    wait_for(f"{node} to come up again", lambda: cluster.pid(node) != init and heard(), 90)


def leader(home: Kube) -> dict[str, Any] | None:
    """The operator's pod that acts, by the Lease; None while nobody does."""
    holder = ((home.get("lease", "psjob") or {}).get("spec") or {}).get("holderIdentity") or ""
    return home.get("pod", holder.rpartition("_")[0]) if holder else None


def operator_on(home: Kube, node: str, here: bool) -> None:
    """Have the replica on that node act, or one elsewhere."""

    def there() -> bool:
        acts = leader(home)
        if acts is None or acts["metadata"].get("deletionTimestamp"):
            return False
        if (acts["spec"]["nodeName"] == node) == here:
            return True
        home.kubectl("delete", "pod", acts["metadata"]["name"], "--wait=true")  # it gives the Lease back
        home.kubectl("rollout", "status", "deployment/psjob", "--timeout=60s")
        return False

    wait_for(f"the operator that acts to be {'' if here else 'not '}on {node}", there, 120)


def drained(kube: Kube, job: str, node: str, back: Callable[[], T | None]) -> T:
    """Drain that node as a person does, and wait until `back` answers."""
    at = time.time()
    kube.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=120s", timeout=150)
    answer = wait_for("training to continue elsewhere", back, 120, story=lambda: kube.story(job))
    print(f"{time.time() - at:.1f} s from the drain of {node} until training continued")
    return answer


def one_of_each(kube: Kube, job: str) -> None:
    """No two pods that run sit in one seat, and all shards that run are on one node."""
    seats, homes = taken(kube, job)
    assert seats and max(seats.values()) == 1, seats
    assert len(set(homes.values())) <= 1, f"shards on several nodes: {homes}"


def taken(kube: Kube, job: str) -> tuple[Counter[tuple[str, str]], dict[str, str | None]]:
    """How many pods run in each seat, and the node of each shard; those that are being deleted count too."""
    alive = [pod for pod in kube.list("pods", f"{LABEL_JOB}={job}") if pod["status"].get("phase") in ("Pending", "Running")]
    labels = [pod["metadata"]["labels"] for pod in alive]
    homes = {
        pod["metadata"]["name"]: pod["spec"].get("nodeName")
        for pod, label in zip(alive, labels, strict=True)
        if label["psjob.dev/role"] == "shard"
    }
    return Counter((it["psjob.dev/role"], it["psjob.dev/index"]) for it in labels), homes


CONTROL = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "coredns", "storage", "policies")
"""What is started again after a restore, as Kubernetes' own documentation says; the operator is not."""


def backup(cluster: Cluster, to: Path) -> None:
    """A copy of etcd's disk at one instant."""
    etcd = cluster.pid("etcd")
    with _still(etcd):
        shutil.copytree(cluster.state / "etcd", to)


def restore(cluster: Cluster, copy: Path) -> None:
    """API server and etcd are lost, and come back with that copy; all that lives off the API server is started again."""
    data = cluster.state / "etcd"
    before = {name: cluster.pid(name) for name in ("etcd", *CONTROL) if (cluster.state / "pids" / f"{name}.pid").exists()}
    servers = [before.pop("kube-apiserver"), before.pop("etcd")]
    kubelets = [cluster.pid(f"{node}/kubelet") for node in NODES[: cluster.ready.nodes]]
    for pid in servers:
        os.kill(pid, signal.SIGKILL)
    # The keeper starts etcd again a second after it has seen its end.
    data.rename(data.with_name("etcd-lost"))
    copy.rename(data)
    for pid in (*before.values(), *kubelets):
        os.kill(pid, signal.SIGKILL)
    wait_for("etcd and the API server to be back", lambda: cluster.pid("etcd") != servers[1] and cluster.api.ok("/readyz"), 90)
    for name, pid in before.items():
        wait_for(f"{name} to be back", lambda name=name, pid=pid: cluster.pid(name) != pid, 30)  # type: ignore[misc]
    shutil.rmtree(data.with_name("etcd-lost"))


@contextmanager
def _still(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
