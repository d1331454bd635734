"""Nodes that only pretend: kwok sets their pods Running, the real scheduler places on what they offer."""

from __future__ import annotations

import contextlib
from typing import Any

from hack.cluster.api import Api, ApiError
from hack.cluster.options import Options
from hack.cluster.paths import file_of, program
from hack.cluster.pki import Authority, kubeconfig
from hack.cluster.proc import Keeper, wait_for

ANNOTATION = "kwok.x-k8s.io/node"
TAINT = {"key": ANNOTATION, "value": "fake", "effect": "NoSchedule"}
CAPACITY = {"cpu": "32", "memory": "256Gi", "pods": "256", "ephemeral-storage": "1Ti"}


def start(options: Options, keeper: Keeper, url: str, authority: Authority) -> None:
    """Run the kwok controller for every node that carries its annotation."""
    pair = authority.client("kwok", "psjob-kwok", ("system:masters",))
    config = kubeconfig(options.state / "kwok.kubeconfig", url, authority.ca.cert, pair)
    command = [str(program("kwok")), f"--kubeconfig={config}", f"--config={file_of('kwok', 'stages.yaml')}"]
    command += [
        "--manage-all-nodes=false",
        f"--manage-nodes-with-annotation-selector={ANNOTATION}=fake",
        "--node-lease-duration-seconds=40",
    ]
    keeper.start("kwok", [*command, "--server-address=", "--cidr=10.245.0.0/16", "--node-ip=10.243.0.250"])


def node(
    name: str, capacity: dict[str, str] | None = None, labels: dict[str, str] | None = None, *, tainted: bool = False
) -> dict[str, Any]:
    """A Node document that kwok takes over. `capacity` adds to CAPACITY, for instance {"nvidia.com/gpu": "4"}."""
    room = {**CAPACITY, **(capacity or {})}
    known = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64", "type": "kwok"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "annotations": {ANNOTATION: "fake"}, "labels": {**known, **(labels or {})}},
        "spec": {"taints": [TAINT] if tainted else []},
        "status": {"capacity": room, "allocatable": room},
    }


def add_nodes(api: Api, documents: list[dict[str, Any]], seconds: float = 30.0) -> None:
    """Create the nodes and wait until all are Ready. Raises ClusterError after `seconds`."""
    for document in documents:
        api.create("/api/v1/nodes", document)
    names = {document["metadata"]["name"] for document in documents}
    wait_for(f"{len(names)} kwok nodes to be Ready", lambda: names <= _ready(api), seconds)


def remove_nodes(api: Api, names: list[str]) -> None:
    """Delete the nodes; pods bound to them are collected by the controller-manager."""
    for name in names:
        with contextlib.suppress(ApiError):
            api.delete(f"/api/v1/nodes/{name}")


def _ready(api: Api) -> set[str]:
    found = set()
    for item in api.get("/api/v1/nodes?labelSelector=type%3Dkwok")["items"]:
        conditions = {condition["type"]: condition["status"] for condition in item["status"].get("conditions", [])}
        waiting = [taint for taint in item["spec"].get("taints", []) if taint["key"].startswith("node.kubernetes.io/")]
        if conditions.get("Ready") == "True" and not waiting:
            found.add(item["metadata"]["name"])
    return found
