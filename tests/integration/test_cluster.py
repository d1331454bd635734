"""The test cluster itself: what other tests take for granted."""

from __future__ import annotations

import itertools
import json

import pytest

from hack.cluster.paths import assets, kubernetes
from hack.cluster.proc import wait_for
from tests.support.cluster_fixtures import Cluster, KwokNodes

pytestmark = pytest.mark.cluster

POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "none"}]}}


def _phase(cluster: Cluster, namespace: str, name: str = "p") -> str:
    return str(cluster.api.get(f"/api/v1/namespaces/{namespace}/pods/{name}")["status"].get("phase"))


def test_kubectl_and_the_api_server_are_the_same_release(control_plane: Cluster) -> None:
    versions = json.loads(control_plane.run_kubectl("version", "-o", "json").stdout)
    assert versions["clientVersion"]["gitVersion"] == versions["serverVersion"]["gitVersion"]
    assert assets() is not None or versions["serverVersion"]["gitVersion"] == kubernetes()


def test_the_crd_is_served_and_explained(control_plane: Cluster) -> None:
    assert "shards" in control_plane.run_kubectl("explain", "pstrainingjobs.spec.shards").stdout


def test_a_pod_runs_on_a_pretended_node_and_ends_as_told(control_plane: Cluster, namespace: str, kwok_nodes: KwokNodes) -> None:
    kwok_nodes(1)
    control_plane.api.create(f"/api/v1/namespaces/{namespace}/pods", POD)
    wait_for("the pod to run", lambda: _phase(control_plane, namespace) == "Running", 30)
    control_plane.finish_pod(namespace, "p", exit_code=3)
    assert _phase(control_plane, namespace) == "Failed"


def test_nodes_of_another_test_are_out_of_reach(control_plane: Cluster, namespace: str, kwok_nodes: KwokNodes) -> None:
    kwok_nodes(1)
    other = control_plane.create_namespace("other")
    control_plane.api.create(f"/api/v1/namespaces/{other}/pods", POD)

    def refused() -> bool:
        conditions = control_plane.api.get(f"/api/v1/namespaces/{other}/pods/p")["status"].get("conditions", [])
        return any(condition.get("reason") == "Unschedulable" for condition in conditions)

    wait_for("the scheduler's refusal", refused, 30)
    control_plane.api.delete(f"/api/v1/namespaces/{other}")


def test_gpus_are_counted_by_the_scheduler(control_plane: Cluster, namespace: str, kwok_nodes: KwokNodes) -> None:
    kwok_nodes(1, {"nvidia.com/gpu": "2"})
    container = {"name": "c", "image": "none", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    for name in ("a", "b", "c"):
        control_plane.api.create(
            f"/api/v1/namespaces/{namespace}/pods", {**POD, "metadata": {"name": name}, "spec": {"containers": [container]}}
        )

    def settled() -> bool:
        pods = control_plane.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]
        words = [condition.get("message", "") for pod in pods for condition in pod["status"].get("conditions", [])]
        return sum(pod["status"]["phase"] == "Running" for pod in pods) == 2 and any(
            "Insufficient nvidia.com/gpu" in word for word in words
        )

    wait_for("two of three pods to run", settled, 30)


def test_a_claim_of_the_default_class_is_bound(control_plane: Cluster, namespace: str) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "data"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"
    control_plane.api.create(path, claim)
    wait_for("the claim to be bound", lambda: control_plane.api.get(f"{path}/data")["status"].get("phase") == "Bound", 30)


def test_a_watch_tells_what_has_changed_since_a_list(control_plane: Cluster, namespace: str) -> None:
    api, path = control_plane.api, f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
    version = api.get(path)["metadata"]["resourceVersion"]
    policy = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "p"}, "spec": {"podSelector": {}}}
    api.create(path, policy)
    api.delete(f"{path}/p")
    heard = itertools.islice(api.watch(path, version), 2)
    assert [(type_, item["metadata"]["name"]) for type_, item in heard] == [("ADDED", "p"), ("DELETED", "p")]


def test_a_user_of_its_own_is_found_in_the_audit_log(control_plane: Cluster, namespace: str) -> None:
    config = control_plane.user_kubeconfig("someone")
    denied = control_plane.run_kubectl(f"--kubeconfig={config}", "get", "pods", "-n", namespace, check=False)
    assert "Forbidden" in denied.stderr
    events = control_plane.audit(user="someone", namespace=namespace)
    assert [event["responseStatus"]["code"] for event in events] == [403]
