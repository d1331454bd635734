"""The real nodes themselves: what other end-to-end tests take for granted."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from hack.cluster.proc import wait_for
from tests.support.cluster_fixtures import RUNTIME_IMAGE, WORKER_IMAGE, Cluster

pytestmark = [pytest.mark.nodes, pytest.mark.rotating, pytest.mark.serial]
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
