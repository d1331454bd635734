"""What psjob renders is what a real API server takes: strictly, and under the restricted Pod Security level."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hack.cluster.api import ApiError
from psjob_client.cli.manifest_commands import documents
from psjob_operator.api.spec import PSTrainingJob
from tests.support.cluster_fixtures import Cluster

pytestmark = pytest.mark.cluster
PATHS = {
    "Service": "services",
    "ConfigMap": "configmaps",
    "PersistentVolumeClaim": "persistentvolumeclaims",
    "Secret": "secrets",
    "Pod": "pods",
}
SAFE = {
    "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
    "containers": [
        {
            "name": "worker",
            "image": "me/digits:1",
            "command": ["python", "train.py"],
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        }
    ],
}
PLAIN = {"containers": [{"name": "worker", "image": "me/digits:1", "command": ["python", "train.py"]}]}
GPU = {
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "nodeSelector": {"gpu": "a100"},
    "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    "initContainers": [{"name": "logs", "image": "fluent", "restartPolicy": "Always"}],
    "containers": [
        {
            "name": "worker",
            "image": "me/gpu:1",
            "command": ["python", "train.py"],
            "resources": {"limits": {"nvidia.com/gpu": 1}},
            "securityContext": {"privileged": True, "capabilities": {"add": ["IPC_LOCK"]}},
            "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
        },
        {"name": "metrics", "image": "exporter"},
    ],
}
OVER = {
    "metadata": {"labels": {"tier": "shards"}},
    "spec": {
        "priorityClassName": "system-cluster-critical",
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "volumes": [{"name": "scratch", "emptyDir": {}}],
        "containers": [
            {"name": "shard", "resources": {"limits": {"memory": "2Gi"}}, "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}]}
        ],
    },
}


@pytest.fixture(scope="module")
def namespaces(control_plane: Cluster) -> Iterator[dict[str, str]]:
    made = {
        level: control_plane.create_namespace(level, {"pod-security.kubernetes.io/enforce": level})
        for level in ("restricted", "privileged")
    }
    yield made
    for name in made.values():
        control_plane.api.delete(f"/api/v1/namespaces/{name}")


def rendered(namespace: str, template: dict[str, Any], **spec: Any) -> list[dict[str, Any]]:
    shards = {"replicas": 1, **spec.pop("shards", {})}
    job = {
        "metadata": {"name": "job", "namespace": namespace},
        "spec": {"shards": shards, "workers": {"replicas": 1, "template": {"spec": template}}, **spec},
    }
    return documents(PSTrainingJob.model_validate(job), "psjob-runtime:test")


CLAIMED = {
    "volumeClaimTemplate": {
        "metadata": {"labels": {"team": "a"}, "annotations": {"example.com/backup": "daily"}},
        "spec": {"storageClassName": "fast", "accessModes": ["ReadWriteOnce", "ReadWriteMany"], "selector": {"matchLabels": {"a": "b"}}},
    },
    "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete"},
}


def ask(cluster: Cluster, document: dict[str, Any]) -> dict[str, Any]:
    path = f"/api/v1/namespaces/{document['metadata']['namespace']}/{PATHS[document['kind']]}"
    answer: dict[str, Any] = cluster.api.call("POST", f"{path}?dryRun=All&fieldValidation=Strict", document)
    return answer


@pytest.mark.parametrize(
    ("level", "template", "spec"),
    [
        ("restricted", SAFE, {}),
        ("restricted", SAFE, {"injection": "None"}),
        ("restricted", SAFE, {"checkpoint": {"disabled": True}}),
        ("restricted", SAFE, {"checkpoint": CLAIMED}),
        ("privileged", GPU, {}),
        ("privileged", {**GPU, "hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}, {"shards": {"template": OVER}}),
        ("privileged", GPU, {"injection": "None"}),
        ("privileged", {**PLAIN, "securityContext": {"runAsUser": 0}}, {"checkpoint": {"volume": {"hostPath": {"path": "/data"}}}}),
    ],
)
def test_every_object_is_taken(
    control_plane: Cluster, namespaces: dict[str, str], level: str, template: dict[str, Any], spec: dict[str, Any]
) -> None:
    for document in rendered(namespaces[level], template, **spec):
        answer = ask(control_plane, document)
        assert answer["metadata"]["name"] == document["metadata"]["name"]
        for key, value in document["spec"].items() if document["kind"] == "Pod" else ():
            if key not in ("containers", "initContainers", "volumes", "tolerations", "nodeSelector"):
                assert answer["spec"][key] == value, f"the API server changed {key}"


def test_a_shard_is_restricted_whatever_its_worker_is(control_plane: Cluster, namespaces: dict[str, str]) -> None:
    root = {**GPU, "securityContext": {"runAsUser": 0, "runAsNonRoot": False, "seccompProfile": {"type": "Unconfined"}}}
    sidecar = {"spec": {"securityContext": None, "containers": [{"name": "shard", "securityContext": None}, {"name": "log", "image": "i"}]}}
    for template, over in ((PLAIN, {}), (GPU, {}), (root, {}), (PLAIN, sidecar), (root, sidecar)):
        *_, shard, worker = rendered(namespaces["restricted"], template, shards={"template": over})
        ask(control_plane, shard)
        with pytest.raises(ApiError, match="violates PodSecurity"):
            ask(control_plane, worker)
