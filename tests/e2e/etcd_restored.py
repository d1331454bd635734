"""The API server's data: a copy of it, and the loss of all that was written after."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.kube import wait_for
from tests.e2e.node_faults import NODES
from tests.support.cluster_fixtures import Cluster

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
