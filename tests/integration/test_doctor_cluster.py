"""`psjob doctor` against a real API server: as its administrator, and as a user who may do next to nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.command import psjob
from tests.support.cluster_fixtures import Cluster, KwokNodes
from tests.unit.api_manifest import GOOD, changed

pytestmark = pytest.mark.cluster
WORKER = "spec.workers.template.spec.containers.0"
SIZES = {"requests": {"cpu": "1", "memory": "1Gi"}}


def doctor(kubeconfig: Path, *words: str) -> tuple[int, dict[str, list[Mapping[str, Any]]]]:
    """Exit code, and the findings by what they are about."""
    done = psjob("doctor", *words, "--kubeconfig", str(kubeconfig), "-o", "json")
    assert "Traceback" not in done.stderr and done.stdout, done.stderr
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in json.loads(done.stdout)["findings"]:
        found.setdefault(row["about"], []).append(row)
    return done.returncode, found


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(changed(GOOD, {f"{WORKER}.resources": SIZES, f"{WORKER}.image": "registry.example.com/a/b:1"})))
    return path


def test_an_administrator_sees_all_of_it(control_plane: Cluster, namespace: str, kwok_nodes: KwokNodes, manifest: Path) -> None:
    kwok_nodes(2, {"cpu": "4", "memory": "8Gi", "pods": "10", "nvidia.com/gpu": "2"})
    code, found = doctor(control_plane.kubeconfig, str(manifest), "-n", namespace)
    for about in (
        "API server",
        "namespace",
        "CRD",
        "rights: pstrainingjobs",
        "rights: pods/log",
        "nodes",
        "job: worker pods",
        "job: shard pods",
    ):
        assert found[about][0]["level"] == "ok", found[about]
    assert "Kubernetes v1." in found["API server"][0]["figure"] and "nvidia.com/gpu" in found["nodes"][0]["figure"]
    assert "job: manifest" not in found
    assert code == (1 if any(row["level"] == "problem" for rows in found.values() for row in rows) else 0)
    assert found["operator"][0]["level"] == "problem" and code == 1, "no chart is installed here"


def test_quota_limit_range_and_size_are_measured_and_tried(
    control_plane: Cluster, namespace: str, kwok_nodes: KwokNodes, manifest: Path
) -> None:
    kwok_nodes(1, {"cpu": "4", "memory": "8Gi", "pods": "10"})
    objects = [
        {"kind": "ResourceQuota", "metadata": {"name": "tight"}, "spec": {"hard": {"requests.cpu": "2", "pods": "50"}}},
        {
            "kind": "LimitRange",
            "metadata": {"name": "small"},
            "spec": {"limits": [{"type": "Container", "max": {"memory": "512Mi"}}]},
        },
    ]
    for one in objects:
        control_plane.run_kubectl("-n", namespace, "apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", **one}))
    code, found = doctor(control_plane.kubeconfig, str(manifest), "-n", namespace)
    assert code == 1
    assert any(row["level"] == "problem" and "requests.cpu" in row["figure"] for row in found["job: quota tight"]), found[
        "job: quota tight"
    ]
    assert any(row["level"] == "problem" and "memory" in row["figure"] for row in found["job: limit range small"])
    refusals = [row for about, rows in found.items() if about.startswith("job: digits-") for row in rows]
    assert any("memory" in row["remedy"] and "512Mi" in row["remedy"] for row in refusals), refusals


def test_a_user_without_rights_is_told_which_and_nothing_breaks(control_plane: Cluster, namespace: str, manifest: Path) -> None:
    code, found = doctor(control_plane.user_kubeconfig("nobody"), str(manifest), "-n", namespace)
    rights = found["rights: pstrainingjobs"][0]
    assert code == 1 and rights["level"] == "problem" and "create" in rights["figure"]
    for about in ("operator", "storage", "nodes"):
        assert found[about][0]["level"] == "warning" and "seen by this user" in found[about][0]["figure"]
    assert found["CRD"][0]["level"] == "ok", "discovery is everybody's"


def test_a_namespace_that_is_not_there_and_a_server_that_is_gone(control_plane: Cluster, tmp_path: Path) -> None:
    code, found = doctor(control_plane.kubeconfig, "-n", "no-such-place")
    assert code == 1 and found["namespace"][0]["level"] == "problem"
    gone = yaml.safe_load(control_plane.kubeconfig.read_text())
    gone["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:9"
    other = tmp_path / "gone"
    other.write_text(yaml.safe_dump(gone))
    code, found = doctor(other, "--cluster")
    assert code == 1 and list(found) == ["API server"] and "127.0.0.1:9" in found["API server"][0]["figure"]
