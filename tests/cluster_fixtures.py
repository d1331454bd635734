"""Real clusters for tests: one control plane (and one cluster of real nodes) a test run, shared by all xdist workers, a namespace a test.

A test asks for `control_plane` (or `node_cluster`), `namespace` (or `node_namespace`) and `kwok_nodes`. The cluster belongs to the process
that runs pytest: it ends with that process, however that ends, so nothing is counted and nothing can be left behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hack.cluster import build, kwok, lifecycle, nodes, pack, torchsite
from hack.cluster.api import Api
from hack.cluster.options import Options, Ready
from hack.cluster.paths import REPO, Unavailable
from hack.cluster.pki import Authority, kubeconfig
from hack.cluster.proc import started_at, wait_for

CRD = REPO / "crds" / "psjob.dev_pstrainingjobs.yaml"
SELECTOR = "scheduler.alpha.kubernetes.io/node-selector"
OURS = "psjob.dev/test"
RUNTIME_IMAGE, OPERATOR_IMAGE, WORKER_IMAGE = "psjob.local/psjob-runtime:dev", "psjob.local/psjob-operator:dev", "psjob.local/digits:dev"
IMAGES_LOADED = "images-loaded"
"""In the state folder once they are; it holds why they are not the Dockerfile's, or nothing."""
NODES, NODE_GRACE, NODE_WAIT = 2, 6.0, 300.0
KwokNodes = Callable[..., list[str]]


@dataclass(frozen=True)
class Cluster:
    """A running cluster as a test sees it; `api` and `run_kubectl` act as its administrator."""

    ready: Ready
    api: Api

    @property
    def state(self) -> Path:
        return Path(self.ready.state)

    @property
    def url(self) -> str:
        return self.ready.url

    @property
    def kubeconfig(self) -> Path:
        return Path(self.ready.kubeconfig)

    @property
    def kubectl(self) -> Path:
        return Path(self.ready.kubectl)

    @property
    def ca(self) -> Path:
        return Path(self.ready.ca)

    @property
    def cert(self) -> Path:
        return Path(self.ready.cert)

    @property
    def key(self) -> Path:
        return Path(self.ready.key)

    @property
    def audit_log(self) -> Path:
        assert self.ready.audit is not None
        return Path(self.ready.audit)

    def run_kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True, seconds: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run the built kubectl; a failure is an AssertionError with its words, unless `check` is False."""
        command = [str(self.kubectl), f"--kubeconfig={self.kubeconfig}", *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=seconds)
        assert not check or done.returncode == 0, f"kubectl {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()}"
        return done

    def user_kubeconfig(self, user: str, groups: tuple[str, ...] = (), folder: Path | None = None, url: str | None = None) -> Path:
        """A kubeconfig with a new client certificate for that user (for instance the operator's, to be found in the audit log)."""
        name = f"user-{uuid.uuid4().hex[:8]}"
        pair = Authority(self.ca.parent).client(name, user, groups)
        return kubeconfig((folder or self.state) / f"{name}.kubeconfig", url or self.url, self.ca, pair)

    def audit(self, user: str | None = None, namespace: str | None = None) -> list[dict[str, Any]]:
        """The audit events so far (level Metadata, stages after RequestReceived), oldest first."""
        events = []
        for line in self.audit_log.read_text().splitlines():
            with contextlib.suppress(ValueError):  # the last line may be half written
                event = json.loads(line)
                if user in (None, event["user"].get("username")) and namespace in (None, event.get("objectRef", {}).get("namespace")):
                    events.append(event)
        return events

    def pid(self, name: str) -> int:
        """The process of a component: kube-apiserver, kube-scheduler, …; on real nodes node1/kubelet, node1/containerd."""
        return nodes.component(self.state, name)

    def create_namespace(self, prefix: str = "t", labels: dict[str, str] | None = None, *, isolated: bool = True) -> str:
        """A new namespace, usable at once. `isolated`: its pods go only to nodes that `kwok_nodes` made for it."""
        name = f"{prefix}-{uuid.uuid4().hex[:8]}"
        metadata: dict[str, Any] = {"name": name, "labels": labels or {}}
        if isolated:
            metadata["annotations"] = {SELECTOR: f"{OURS}={name}"}
        self.api.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        wait_for(f"ServiceAccount default of {name}", lambda: self.api.ok(f"/api/v1/namespaces/{name}/serviceaccounts/default"), 30)
        return name

    def install_crd(self) -> None:
        """Apply the generated CRD and wait until it is served."""
        self.run_kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
        group = "apis/psjob.dev/v1alpha1"  # kubectl explain needs the second path, which follows the first by up to a second
        wait_for("the CRD to be served", lambda: self.api.ok(f"/{group}/pstrainingjobs") and self.api.ok(f"/openapi/v3/{group}"), 30)

    def load(self, archive: Path) -> list[str]:
        """Import an image archive into every real node; the names in it."""
        return nodes.load(self.state, self.ready.nodes, archive)

    def load_worker(self, name: str, folder: Path) -> str:
        """Make and import a worker image (Python, torch at /torch, `folder` as WORKDIR /app); give pods imagePullPolicy IfNotPresent."""
        archive = pack.pack(self.state / f"image-{uuid.uuid4().hex[:8]}.tar", workers={name: folder})
        self.load(archive)
        archive.unlink()
        return name

    def finish_pod(self, namespace: str, name: str, exit_code: int = 0, reason: str | None = None, container: str | None = None) -> None:
        """Be the kubelet of a kwok pod: its containers (or one) ended with that code; the phase follows from it."""
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        pod = self.api.get(path)
        ended = {
            "exitCode": exit_code,
            "reason": reason or ("Completed" if exit_code == 0 else "Error"),
            "finishedAt": _now(),
            "startedAt": _now(),
        }
        statuses = pod["status"].get("containerStatuses") or [
            {"name": item["name"], "image": item["image"], "imageID": "", "restartCount": 0} for item in pod["spec"]["containers"]
        ]
        for status in statuses:
            if container in (None, status["name"]):
                status.update(ready=False, started=False, state={"terminated": ended})
        over = all("terminated" in status.get("state", {}) for status in statuses)
        phase = ("Failed" if exit_code else "Succeeded") if over else pod["status"]["phase"]
        self.api.merge(f"{path}/status", {"status": {"phase": phase, "containerStatuses": statuses}})


@pytest.fixture(scope="session")
def control_plane() -> Cluster:
    """etcd, API server, controller-manager, scheduler, kwok on loopback, with an audit log and the CRD; one for all workers of the run."""
    return shared("plane", Options(state=_state("plane"), audit=True, isolate=True), "integration")


@pytest.fixture
def fresh_control_plane(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """A function that starts a control plane of the test's own (4 s), without the CRD; keywords are those of Options."""
    started: list[Path] = []

    def start(**options: Any) -> Cluster:
        built("integration")
        state = tmp_path / f"plane{len(started)}"
        started.append(state)
        return _start(Options(**{"audit": True, "isolate": True, **options, **_owner(), "state": state}))

    yield start
    for state in started:
        lifecycle.down(state)


@pytest.fixture
def namespace(control_plane: Cluster) -> Iterator[str]:
    """A namespace of the test's own on `control_plane`; its pods go only to nodes made by `kwok_nodes`."""
    name = control_plane.create_namespace()
    yield name
    control_plane.api.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture
def kwok_nodes(control_plane: Cluster, namespace: str) -> Iterator[KwokNodes]:
    """`kwok_nodes(2, {"nvidia.com/gpu": "4"})` adds two Ready nodes for the test's namespace alone and returns their names."""
    made: list[str] = []

    def add(count: int = 1, capacity: dict[str, str] | None = None, labels: dict[str, str] | None = None) -> list[str]:
        names = [f"{namespace}-n{len(made) + index}" for index in range(count)]
        made.extend(names)
        kwok.add_nodes(control_plane.api, [kwok.node(name, capacity, {OURS: namespace, **(labels or {})}) for name in names])
        return names

    yield add
    kwok.remove_nodes(control_plane.api, made)


@pytest.fixture(scope="session")
def node_cluster() -> Cluster:
    """Two real nodes (kubelet, containerd, kube-proxy, DNS), torch mounted, our images in place; Unknown after 6 silent seconds."""
    state = _state("nodes")
    try:
        options = Options(state=state, nodes=NODES, audit=True, isolate=True, grace=NODE_GRACE, wait=NODE_WAIT)
        nodes.check(options)
        mounts = ((str(torchsite.torch_site()), torchsite.TARGET),)
    except Unavailable as error:
        pytest.skip(str(error))
    return shared("nodes", dataclasses.replace(options, mounts=mounts), "e2e", _load_images)


@pytest.fixture
def node_namespace(node_cluster: Cluster) -> Iterator[str]:
    """A namespace of the test's own on the real nodes."""
    name = node_cluster.create_namespace(isolated=False)
    yield name
    node_cluster.api.delete(f"/api/v1/namespaces/{name}")


def _load_images(cluster: Cluster) -> None:
    """The three images that every test on real nodes starts from, made from the checkout as it is now."""
    done = cluster.state / IMAGES_LOADED
    if not done.exists():
        folder = cluster.state / "images"
        workers = {WORKER_IMAGE: REPO / "examples" / "digits"}
        made = pack.make(folder, runtime=RUNTIME_IMAGE, operator=OPERATOR_IMAGE, workers=workers)
        for archive in made.archives:
            cluster.load(archive)
        shutil.rmtree(folder)
        done.write_text(made.packed_because or "")


def shared(kind: str, options: Options, only: str, prepare: Callable[[Cluster], None] | None = None) -> Cluster:
    """The run's cluster of that kind: the first worker that asks starts it, the others wait for it. Skips, by name, where it cannot be."""
    built(only)
    with options.state.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cluster = _start(dataclasses.replace(options, **_owner()))
        if CRD.exists():
            cluster.install_crd()
        if prepare:
            prepare(cluster)
    return cluster


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    loaded = _state("nodes") / IMAGES_LOADED
    if loaded.exists() and (reason := loaded.read_text()):
        terminalreporter.line(f"the images of operator and runtime were not built from the Dockerfile: {reason}")


def pytest_unconfigure(config: pytest.Config) -> None:
    """The run is over: end its clusters now rather than when their holder notices. Workers leave that to the process that started them."""
    if hasattr(config, "workerinput"):
        return
    for kind in ("plane", "nodes"):
        state = _state(kind)
        if state.exists():
            lifecycle.down(state)
            shutil.rmtree(state, ignore_errors=True)
        state.with_suffix(".lock").unlink(missing_ok=True)


def _start(options: Options) -> Cluster:
    try:
        ready = lifecycle.up(options)
    except Unavailable as error:
        pytest.skip(str(error))
    return Cluster(ready, ready.api())


def built(only: str) -> None:
    """Have these parts built; the test is skipped, by name, where this machine cannot."""
    try:
        build.build(only, quiet=True)
    except Unavailable as error:
        pytest.skip(str(error))


def _runner() -> int:
    """The process that runs pytest: an xdist worker's parent, or this one."""
    return os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()


def _owner() -> dict[str, Any]:
    return {"owner": _runner(), "owner_started": started_at(_runner())}


def _state(kind: str) -> Path:
    return Path(tempfile.gettempdir()) / f"psjob-test-{kind}-{_runner()}-{started_at(_runner())}"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
