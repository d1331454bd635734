"""What a person's client asks of a running job through the real API server's proxy, with the person's rights to the run's Secret."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from psjob_client.jobs import cluster
from psjob_client.jobs.cluster import ClusterJobs
from psjob_client.jobs.view import HistoryView, JobView
from tests.integration.operator_harness import World, manifest, world
from tests.support.cluster_fixtures import Cluster
from tests.support.statusport import StatusPort

pytestmark = pytest.mark.cluster
RBAC, GROUP = "/apis/rbac.authorization.k8s.io/v1", "rbac.authorization.k8s.io"


@pytest.fixture
def place(control_plane: Cluster, namespace: str, tmp_path: Path) -> Iterator[World]:
    with world(control_plane, namespace, tmp_path) as made:
        yield made


def own_address() -> str:
    """One of this machine's that is not loopback: the API server's proxy goes to no other. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


def told(path: str) -> dict[str, Any]:
    if path == "/history":
        return {"entries": [{"time": 1790000000.0, "step": 20, "rate": 2.0, "metrics": {"loss": 0.5}}]}
    return {"index": 0, "attempt": 1, "coordinator": {"step": 123, "mode": "sync", "metrics": {}, "workers": []}}


def look(config: Path, namespace: str) -> tuple[JobView, HistoryView]:
    async def ask() -> tuple[JobView, HistoryView]:
        source = ClusterJobs(*await cluster.reach(None, namespace, str(config)))
        try:
            return await source.get("job"), await source.history("job")
        finally:
            await source.close()

    return asyncio.run(ask())


def person(place: World, *rules: dict[str, Any]) -> Path:
    """The kubeconfig of someone with these rights in the namespace."""
    name = f"person-{len(rules)}"
    api = f"{RBAC}/namespaces/{place.namespace}"
    metadata, version = {"name": name}, f"{GROUP}/v1"
    place.cluster.api.create(f"{api}/roles", {"apiVersion": version, "kind": "Role", "metadata": metadata, "rules": list(rules)})
    binding = {
        "apiVersion": version,
        "kind": "RoleBinding",
        "metadata": metadata,
        "roleRef": {"apiGroup": GROUP, "kind": "Role", "name": name},
        "subjects": [{"kind": "User", "apiGroup": GROUP, "name": name}],
    }
    place.cluster.api.create(f"{api}/rolebindings", binding)
    folder = place.folder / name
    folder.mkdir()
    return place.cluster.user_kubeconfig(name, folder=folder)


def test_live_numbers_are_for_who_may_read_the_runs_secret(place: World) -> None:
    place.operator("--progress-seconds=3600")
    place.create(manifest())
    place.until("the pods", lambda: len(place.pods()) == 3)
    key = place.run_keys()["questions"]
    address = own_address()
    port = StatusPort(told, lambda: key)
    server = port.serve(address)
    try:
        place.run("job-shard-0-a1", "job-worker-0-r1", "job-worker-1-r1", node=place.node(f"{place.namespace}-n"), address=address)
        place.until_phase("Running")
        jobs = {"apiGroups": ["psjob.dev"], "resources": ["pstrainingjobs"], "verbs": ["get", "list"]}
        pods = {"apiGroups": [""], "resources": ["pods", "pods/proxy"], "verbs": ["get", "list"]}
        secrets = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}
        view, history = look(person(place, jobs, pods, secrets), place.namespace)
        assert view.fresh and view.progress.step == 123 and not view.limited
        assert history.of("loss") is not None and {"/status", "/history"} <= set(port.asked)
        asked = len(port.asked)
        view, history = look(person(place, jobs, pods), place.namespace)
        assert not view.fresh and view.phase == "Running" and len(port.asked) == asked
        assert "the right `get secrets` is missing" in view.limited and "-key-" in view.limited
        assert history.of("loss") is None and not history.complete
    finally:
        server.shutdown()
        server.server_close()
