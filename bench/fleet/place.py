"""The control plane of a run, with pretending nodes and the CRD, and the operator as a process of its own user."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bench.fleet.kube import Kube, Refused, together
from hack.cluster import kwok, lifecycle
from hack.cluster.options import Options, Ready
from hack.cluster.paths import REPO
from hack.cluster.pki import Authority, kubeconfig
from hack.cluster.proc import started_at

CRD = REPO / "crds" / "psjob.dev_pstrainingjobs.yaml"
USER = "system:serviceaccount:psjob-system:psjob-operator"
GROUPS = ("system:serviceaccounts", "system:serviceaccounts:psjob-system")
ASKER = json.dumps({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "psjob-system"}}})
"""Whom the chart's operator lets in to the status ports of its runs."""
ROOM = {"cpu": "1000", "memory": "4Ti", "pods": "1000"}
PARTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kwok")


@dataclass
class Place:
    """A running cluster."""

    ready: Ready
    kube: Kube
    folder: Path
    processes: dict[str, int] = field(default_factory=dict)

    async def namespace(self, name: str) -> None:
        """Create it and wait until pods may be made in it."""
        await self.kube.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        await _when(self.kube, f"/api/v1/namespaces/{name}/serviceaccounts/default")

    async def install(self) -> None:
        """The CRD, and all rights for the operator's user: it is not exempt from flow control, as an administrator would be."""
        crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        await self.kube.call("POST", crds, yaml.safe_load(CRD.read_text()))
        api = "rbac.authorization.k8s.io"
        await self.kube.call(
            "POST",
            f"/apis/{api}/v1/clusterrolebindings",
            {
                "metadata": {"name": "psjob-operator"},
                "roleRef": {"apiGroup": api, "kind": "ClusterRole", "name": "cluster-admin"},
                "subjects": [{"apiGroup": api, "kind": "User", "name": USER}],
            },
        )
        await _when(self.kube, "/apis/psjob.dev/v1alpha1/pstrainingjobs")

    @asynccontextmanager
    async def operator(self, *options: str, python: tuple[str, ...] = ()) -> AsyncIterator[int]:
        """The operator as shipped, with these options more; its pid. `python`: words in the interpreter's place, for a profiler."""
        pair = Authority(Path(self.ready.ca).parent).client("bench-operator", USER, GROUPS)
        config = kubeconfig(self.folder / "operator.kubeconfig", self.ready.url, Path(self.ready.ca), pair)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [
            *(python or (sys.executable,)),
            "-m",
            "psjob_operator",
            "run",
            f"--kubeconfig={config}",
            "--runtime-image=psjob-runtime:bench",
            f"--network-policy={ASKER}",
        ]
        command += [f"--key-file={self.folder / 'operator.key'}", "--health-host=127.0.0.1", f"--health-port={port}", *options]
        with (self.folder / "operator.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        try:
            await _answers(port, process, self.folder / "operator.log")
            self.processes["operator"] = process.pid
            yield process.pid
        finally:
            process.terminate()
            try:
                await asyncio.to_thread(process.wait, 20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@asynccontextmanager
async def place(folder: Path, nodes: int) -> AsyncIterator[Place]:
    """A fresh control plane with `nodes` pretending nodes; it ends with this process."""
    me = os.getpid()
    options = Options(
        state=folder / "plane", audit=True, audit_users=(USER,), qps=2000, grace=600.0, owner=me, owner_started=started_at(me)
    )
    ready = await asyncio.to_thread(lifecycle.up, options)
    try:
        async with Kube(ready) as kube:
            await together(kube.call("POST", "/api/v1/nodes", kwok.node(f"fake-{number:03d}", ROOM)) for number in range(nodes))
            made = Place(ready, kube, folder)
            made.processes |= {part: int((options.state / "pids" / f"{part}.pid").read_text()) for part in PARTS}
            await made.install()
            await _ready_nodes(kube, nodes)
            yield made
    finally:
        await asyncio.to_thread(lifecycle.down, options.state)


async def _ready_nodes(kube: Kube, count: int) -> None:
    def usable(node: Mapping[str, Any]) -> bool:
        said = {it["type"]: it["status"] for it in node["status"].get("conditions") or []}
        return said.get("Ready") == "True" and not node["spec"].get("taints")

    for _ in range(600):
        if sum(usable(node) for node in (await kube.call("GET", "/api/v1/nodes"))["items"]) >= count:
            return
        await asyncio.sleep(0.2)
    raise TimeoutError(f"waited 120 s for {count} nodes")


async def _when(kube: Kube, path: str) -> None:
    for _ in range(300):
        try:
            await kube.call("GET", path)
        except Refused:
            await asyncio.sleep(0.1)
        else:
            return
    raise TimeoutError(f"waited 30 s for {path}")


async def _answers(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    def asked() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2) as answer:
                return bool(json.loads(answer.read())["ready"])
        except (urllib.error.URLError, OSError):
            return False

    for _ in range(600):
        if await asyncio.to_thread(asked):
            return
        if process.poll() is not None:
            raise RuntimeError(f"the operator ended with {process.returncode}: {log.read_text()[-2000:]}")
        await asyncio.sleep(0.1)
    raise TimeoutError(f"the operator was not ready in 60 s: {log.read_text()[-2000:]}")
