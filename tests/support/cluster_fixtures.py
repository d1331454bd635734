"""Real clusters for tests: one control plane (and one cluster of real nodes) a run of pytest, shared by all its forks, a namespace a test.

A test asks for `control_plane` (or `node_cluster`), `namespace` (or `node_namespace`) and `kwok_nodes`. The cluster belongs to the process
that runs pytest: it ends with that process, however that ends, so nothing is counted and nothing can be left behind.
Programs that the chosen tests need are built before the first of them starts, so that no test's time-out runs meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import itertools
import json
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hack.cluster import build, kwok, lifecycle, nodes, pack, torchsite
from hack.cluster.api import Api
from hack.cluster.options import Options, Ready
from hack.cluster.paths import REPO, ClusterError, Unavailable
from hack.cluster.pki import Authority, kubeconfig
from hack.cluster.proc import started_at, wait_for
from tests.support.forks import MAIN, in_main, shared_path

CRD = REPO / "crds" / "psjob.dev_pstrainingjobs.yaml"
SELECTOR = "scheduler.alpha.kubernetes.io/node-selector"
OURS = "psjob.dev/test"
RUNTIME_IMAGE, OPERATOR_IMAGE, WORKER_IMAGE = "psjob.local/psjob-runtime:dev", "psjob.local/psjob-operator:dev", "psjob.local/digits:dev"
IMAGES_LOADED = "images-loaded"
"""In the state folder once they are; it holds why they are not the Dockerfile's, or nothing."""
NODES, NODE_GRACE, NODE_WAIT = 2, 6.0, 300.0
PROGRAMS = {"plane_programs": "integration", "gitops_programs": "gitops", "node_programs": "e2e"}
"""By fixture: the parts that hack/cluster builds for it."""
BROKEN: dict[str, ClusterError] = {}
"""Why parts could not be built, by name: no fork tries again."""
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
        known = _audits.setdefault((self.audit_log, user, namespace), Audit(self.audit_log, user, namespace))
        return known.read()

    def pid(self, name: str) -> int:
        """The process of a component: kube-apiserver, kube-scheduler, …; on real nodes node1/kubelet, node1/containerd."""
        return nodes.component(self.state, name)

    def create_namespace(self, prefix: str = "t", labels: dict[str, str] | None = None, *, isolated: bool = True) -> str:
        """A new namespace, usable at once. `isolated`: its pods continuely to nodes that `kwok_nodes` made for it."""
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


@dataclass
class Audit:
    """What of an audit log is about one user and one namespace. Each line is read once: polls ask again and again."""

    log: Path
    user: str | None
    namespace: str | None
    seen: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)

    def read(self) -> list[dict[str, Any]]:
        """All of them so far."""
        with self.log.open("rb") as file:
            file.seek(self.seen)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]  # the last line may be half written
        self.seen += len(whole)
        words = [json.dumps(word).encode() for word in (self.user, self.namespace) if word is not None]
        for line in whole.splitlines():
            if all(word in line for word in words):
                event = json.loads(line)
                of_user = self.user in (None, event["user"].get("username"))
                if of_user and self.namespace in (None, event.get("objectRef", {}).get("namespace")):
                    self.events.append(event)
        return list(self.events)


_audits: dict[tuple[Path, str | None, str | None], Audit] = {}


@pytest.fixture(scope="session")
def plane_programs() -> None:
    """The programs of a control plane are there."""
    built("integration")


@pytest.fixture(scope="session")
def gitops_programs() -> None:
    """The engines of Argo CD and Flux are there."""
    built("gitops")


@pytest.fixture(scope="session")
def node_programs() -> None:
    """The programs of real nodes are there, and this machine can run them."""
    try:
        nodes.check(_node_options())
    except Unavailable as error:
        pytest.skip(str(error))
    built("e2e")


@pytest.fixture(scope="session")
def control_plane(plane_programs: None) -> Cluster:
    """etcd, API server, controller-manager, scheduler, kwok on loopback, with an audit log and the CRD; one for all forks of the run."""
    return shared(_plane_options())


@pytest.fixture
def fresh_control_plane(plane_programs: None, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """A function that starts a control plane of the test's own (4 s), without the CRD; keywords are those of Options."""
    with contextlib.ExitStack() as started:
        numbers = itertools.count()

        def start(**options: Any) -> Cluster:
            return started.enter_context(own_control_plane(tmp_path / f"plane{next(numbers)}", **options))

        yield start


@contextlib.contextmanager
def own_control_plane(state: Path, **options: Any) -> Iterator[Cluster]:
    """A control plane without the CRD, which ends with the context; keywords are those of Options."""
    try:
        yield _start(Options(**{"audit": True, "isolate": True, **options, **_owner(), "state": state}))
    finally:
        lifecycle.down(state)


@pytest.fixture
def namespace(control_plane: Cluster) -> Iterator[str]:
    """A namespace of the test's own on `control_plane`; its pods continuely to nodes made by `kwok_nodes`."""
    name = control_plane.create_namespace()
    yield name
    control_plane.api.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture
def kwok_nodes(control_plane: Cluster, namespace: str) -> Iterator[KwokNodes]:
    """`kwok_nodes(2, {"nvidia.com/gpu": "4"})` adds two Ready nodes for only the test's namespace and returns their names."""
    made: list[str] = []

    def add(count: int = 1, capacity: dict[str, str] | None = None, labels: dict[str, str] | None = None) -> list[str]:
        names = [f"{namespace}-n{len(made) + index}" for index in range(count)]
        made.extend(names)
        kwok.add_nodes(control_plane.api, [kwok.node(name, capacity, {OURS: namespace, **(labels or {})}) for name in names])
        return names

    yield add
    kwok.remove_nodes(control_plane.api, made)


@pytest.fixture(scope="session")
def node_cluster(node_programs: None) -> Cluster:
    """Two real nodes (kubelet, containerd, kube-proxy, DNS), torch mounted, our images in place; Unknown after 6 silent seconds."""
    try:
        mounts = ((str(torchsite.torch_site()), torchsite.TARGET),)
    except Unavailable as error:
        pytest.skip(str(error))
    return shared(dataclasses.replace(_node_options(), mounts=mounts), _load_images)


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


def shared(options: Options, prepare: Callable[[Cluster], None] | None = None) -> Cluster:
    """The run's cluster of that state: the first process that asks starts it, the others wait for it. Skips where it cannot be."""
    with options.state.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cluster = _start(dataclasses.replace(options, **_owner()))
        installed = cluster.state / "crd-installed"
        if CRD.exists() and not installed.exists():
            cluster.install_crd()
            installed.touch()
        if prepare:
            prepare(cluster)
    return cluster


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    loaded = shared_path("nodes") / IMAGES_LOADED
    if loaded.exists() and (reason := loaded.read_text()):
        terminalreporter.line(f"the images of operator and runtime were not built from the Dockerfile: {reason}")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build what the chosen tests need and no more, and say so: it takes minutes. What cannot be built is told by the tests' fixtures.

    The shared control plane is started too: on a busy machine that takes longer than a test may.
    """
    if session.config.option.collectonly or not in_main():
        return
    asked = {name for item in session.items if isinstance(item, pytest.Function) for name in item.fixturenames}
    capture = session.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        for fixture, only in PROGRAMS.items():
            if fixture in asked:
                try:
                    if fixture == "node_programs":
                        nodes.check(_node_options())
                    build.build(only)
                    if fixture == "plane_programs" and "control_plane" in asked:
                        shared(_plane_options())
                except (ClusterError, AssertionError) as error:
                    BROKEN[only] = error if isinstance(error, ClusterError) else ClusterError(str(error))


def pytest_unconfigure(config: pytest.Config) -> None:
    """The run is over: end its clusters now rather than when their holder notices. Forks leave that to the process that runs pytest."""
    if not in_main():
        return
    for kind in ("plane", "nodes"):
        state = shared_path(kind)
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
        if only in BROKEN:
            raise BROKEN[only]
        build.build(only, quiet=True)
    except Unavailable as error:
        pytest.skip(str(error))


def _plane_options() -> Options:
    return Options(state=shared_path("plane"), audit=True, isolate=True)


def _node_options() -> Options:
    return Options(state=shared_path("nodes"), nodes=NODES, audit=True, isolate=True, grace=NODE_GRACE, wait=NODE_WAIT)


def _owner() -> dict[str, Any]:
    return {"owner": MAIN, "owner_started": started_at(MAIN)}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
