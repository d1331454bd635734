"""`psjob validate --server`: what only a cluster knows is said before the job waits for it, and nothing is made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.command import psjob
from tests.support.cluster_fixtures import Cluster
from tests.unit.api_manifest import GOOD, MY_CLAIM, changed

pytestmark = pytest.mark.cluster
POD = "spec.workers.template.spec"
WORKER = f"{POD}.containers.0"
ASKS = {"spec": {"containers": [{"name": "shard", "resources": {"requests": {"cpu": "500m"}}}]}}
OWN = {"accessModes": ["ReadWriteOnce"], "storageClassName": "no-such", "resources": {"requests": {"storage": "1Gi"}}}
# Without a class of its own the plane makes no claim for checkpoints.
BASE = {"spec.checkpoint": {"disabled": True}}
SMALL = {"limits": [{"type": "Container", "default": {"cpu": "250m", "memory": "512Mi"}}]}
ROWS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "limit range": (
        [{"kind": "LimitRange", "metadata": {"name": "small"}, "spec": SMALL}],
        {"spec.shards.template": ASKS},
        "LimitRange small of namespace {} limits cpu",
    ),
    "limit range that psjob's numbers give way to": ([{"kind": "LimitRange", "metadata": {"name": "small"}, "spec": SMALL}], {}, ""),
    "quota": (
        [{"kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}}],
        {},
        "quota few: pods: 6 needed, 1 of 1 left; ",
    ),
    "claim": (
        [],
        {f"{POD}.volumes": [{"name": "d", "persistentVolumeClaim": {"claimName": "data"}}]},
        "claim data: is not there",
    ),
    "checkpoints": (
        [],
        {"spec.checkpoint": MY_CLAIM},
        "checkpoints: claim mine is not there",
    ),
    "storage class": (
        [],
        {f"{POD}.volumes": [{"name": "d", "ephemeral": {"volumeClaimTemplate": {"spec": OWN}}}]},
        "storage class no-such: is not there",
    ),
    "priority class": ([], {f"{POD}.priorityClassName": "no-such"}, "priority class no-such: is not there"),
    "pod security": ([], {f"{POD}.hostPID": True}, 'violates PodSecurity "baseline:latest"'),
    "nothing": ([], {}, ""),
}


@pytest.fixture
def validate(control_plane: Cluster, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Exit code and lines of `psjob validate` of a changed manifest."""

    def run(change: dict[str, Any], *words: str, kubeconfig: Path | None = None) -> tuple[int, str]:
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(changed(GOOD, {**BASE, **change})))
        done = psjob("validate", str(path), *words, kubeconfig=kubeconfig or control_plane.kubeconfig)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.parametrize("row", ROWS)
def test_what_only_the_cluster_knows(control_plane: Cluster, validate: Callable[..., tuple[int, str]], row: str) -> None:
    objects, change, words = ROWS[row]
    labels = {"pod-security.kubernetes.io/enforce": "baseline"} if row == "pod security" else None
    namespace = control_plane.create_namespace("validate", labels)
    try:
        for one in objects:
            control_plane.run_kubectl("-n", namespace, "apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", **one}))
        assert validate(change)[0] == 0, "the manifest is right by itself"
        code, text = validate(change, "--server", "-n", namespace)
        assert (code, words.format(namespace) in text) == (1 if words else 0, True), text
        assert not control_plane.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]
    finally:
        control_plane.api.delete(f"/api/v1/namespaces/{namespace}")


def test_a_namespace_that_is_not_there_and_a_cluster_that_does_not_answer(
    control_plane: Cluster, validate: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    code, text = validate({}, "-n", "no-such-place")
    assert code == 1 and "namespace: no-such-place, is not there; kubectl create namespace" in text
    gone = tmp_path / "gone"
    gone.write_text(control_plane.kubeconfig.read_text().replace(control_plane.url, "https://127.0.0.1:9"))
    code, text = validate({}, "--server", kubeconfig=gone)
    assert code == 2 and "127.0.0.1:9" in text and "look at --context" in text


def test_who_may_make_no_pods_is_told_what_was_not_asked(
    control_plane: Cluster, namespace: str, validate: Callable[..., tuple[int, str]]
) -> None:
    nobody = control_plane.user_kubeconfig("nobody")
    code, text = validate({}, "--server", "--strict", "-n", namespace, kubeconfig=nobody)
    assert f"admission: this user may make no pods in {namespace}" in text and code == 1, text
    assert validate({}, "--server", "-n", namespace, kubeconfig=nobody)[0] == 0
