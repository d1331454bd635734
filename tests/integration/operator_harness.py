"""The operator as a real process beside a real API server, and what a test needs to play the user and the kubelet.

Every operator here serves one namespace, under a user of its own whose rights are the operator's: other tests do not see it, the audit
log can be read by user, and a right that is missing fails the test.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import yaml

from hack.cluster.api import Api, ApiError
from hack.cluster.paths import REPO
from hack.cluster.pki import Authority
from tests.integration.operator_nursery import Nursery
from tests.support.cluster_fixtures import Cluster
from tests.support.statusport import own_loopback, run_keys

JOBS = "/apis/psjob.dev/v1alpha1"
ROOTS = {"pstrainingjobs": JOBS, "networkpolicies": "/apis/networking.k8s.io/v1", "roles": "/apis/rbac.authorization.k8s.io/v1"}
"""By kind; the core's for the others."""
RBAC = "rbac.authorization.k8s.io"
IMAGE = "psjob-runtime:test"
PATIENCE = 80.0
"""Seconds until a state is given up that comes within a few on a quiet machine."""
SHARE_SECONDS = 0.1
"""So long a shared read waits for others who will ask for the same."""
T = TypeVar("T")

RULES = REPO / "charts" / "psjob" / "templates" / "_rules.tpl"
NAMESPACED_RULES: list[dict[str, list[str]]] = [
    *yaml.safe_load("\n".join(line for line in RULES.read_text().splitlines() if "{{" not in line)),
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "patch"]},
]
"""The chart's, without what values may add; the Lease's stand in a Role of their own there."""
CLUSTER_RULES: list[dict[str, list[str]]] = [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]


class Launcher(Protocol):
    """Starts operators, and knows the processes."""

    def start(self, arguments: list[str], log: Path) -> int:
        """The pid of a new one."""

    def poll(self, pid: int) -> int | None:
        """Its exit code once it has ended."""

    def wait(self, pid: int) -> int:
        """Its exit code, waited for."""


@dataclass
class Operator:
    """One operator process."""

    kubeconfig: Path
    namespace: str
    log: Path
    options: tuple[str, ...] = ()
    port: int = 0
    pid: int = 0
    launcher: Launcher | None = None
    """What starts its process; None: this checkout's operator."""

    @property
    def by(self) -> Launcher:
        return self.launcher or Nursery.get()

    def start(self, ready: bool = True) -> None:
        """Start it; wait until it says that it is ready unless told otherwise."""
        self.port = free_port()
        arguments = ["run", f"--kubeconfig={self.kubeconfig}", f"--namespace={self.namespace}", f"--runtime-image={IMAGE}"]
        arguments += ["--health-host=127.0.0.1", f"--health-port={self.port}", "--log-format=json", *self.options]
        if self.launcher is None and not any(option.startswith("--key-file") for option in self.options):
            arguments.append(f"--key-file={self.log.parent / 'operator.key'}")
        self.pid = self.by.start(arguments, self.log)
        if ready:
            until("the operator to be ready", self.ready, also=lambda: self.log.read_text()[-3000:])

    def ready(self) -> bool:
        """Whether /readyz says so."""
        assert self.alive(), f"the operator ended: {self.log.read_text()[-3000:]}"
        return self.answers("/readyz")

    def answers(self, path: str) -> bool:
        """Whether this path of its health port answers 200."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def role(self) -> str:
        """leader, standby or alone; empty where it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=2) as answer:
                return str(json.load(answer)["role"])
        except (urllib.error.URLError, OSError):
            return ""

    def alive(self) -> bool:
        """Whether the process runs."""
        return self.pid != 0 and self.by.poll(self.pid) is None

    def freeze(self) -> None:
        """SIGSTOP: it does nothing, and is not told of it."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it has gone."""
        if self.alive():
            os.kill(self.pid, signal.SIGKILL)
            self.by.wait(self.pid)

    def stop(self) -> int:
        """SIGTERM; answers the exit code."""
        os.kill(self.pid, signal.SIGTERM)
        return self.by.wait(self.pid)

    def lines(self) -> list[dict[str, Any]]:
        """Its log."""
        found = []
        for line in self.log.read_text().splitlines() if self.log.exists() else []:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found


class Shared(Generic[T]):
    """What several threads read at the same time: one read answers all who asked before it began."""

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._turn = threading.Lock()
        self._next: Future[T] | None = None
        """The read that has not begun."""
        self._joining = threading.Lock()

    def get(self) -> T:
        """What a read that begins from now on finds."""
        with self._joining:
            mine = self._next is None
            if self._next is None:
                self._next = Future()
            end = self._next
        if mine:
            with self._turn:
                time.sleep(SHARE_SECONDS)
                with self._joining:
                    self._next = None
                try:
                    end.set_result(self._read())
                except BaseException as error:
                    end.set_exception(error)
        return end.result()


@dataclass
class World:
    """A namespace with an operator that serves it, seen by the user and by whoever plays the kubelet."""

    cluster: Cluster
    namespace: str
    folder: Path
    user: str = field(default_factory=lambda: f"psjob-operator-{uuid.uuid4().hex[:8]}")
    operators: list[Operator] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    address: str = field(default_factory=own_loopback)
    """The IP of played pods: no other test's status port answers there."""
    silent: set[str] = field(default_factory=set)
    beating: threading.Lock = field(default_factory=threading.Lock)
    """Held from the look at `silent` to the beat: a node that has become silent must not be kept alive once more."""
    heart: threading.Thread | None = None
    over: threading.Event = field(default_factory=threading.Event)
    shared: dict[str, Shared[list[dict[str, Any]]]] = field(default_factory=dict)
    """Lists by kind, where many threads look at this namespace."""

    def share_reads(self) -> None:
        """From now on threads that ask for the same kind at the same time are answered by one request."""
        for kind in ("pstrainingjobs", "pods", "events"):
            self.shared[kind] = Shared(functools.partial(self._list, kind))

    def allow(self) -> None:
        """Give the operator's user the operator's rights, and no other."""
        allow(self.cluster.api, self.user, "Role", NAMESPACED_RULES, self.namespace)
        allow(self.cluster.api, self.user, "ClusterRole", CLUSTER_RULES)

    def certificate(self) -> tuple[Path, Path]:
        """Client certificate and key of the operator's user, for a proxy that speaks for it."""
        pair = Authority(self.cluster.ca.parent).client(f"user-{uuid.uuid4().hex[:8]}", self.user, ())
        return pair.cert, pair.key

    def operator(
        self, *options: str, url: str | None = None, start: bool = True, ready: bool = True, launcher: Launcher | None = None
    ) -> Operator:
        """An operator for this namespace, through `url` (a proxy) if given; of another commit with its `launcher`."""
        kubeconfig = self.cluster.user_kubeconfig(self.user, folder=self.folder, url=url)
        made = Operator(kubeconfig, self.namespace, self.folder / f"operator{len(self.operators)}.log", options, launcher=launcher)
        self.operators.append(made)
        if start:
            made.start(ready)
        return made

    def close(self) -> None:
        """End all operators; take back what is not in the namespace."""
        self.over.set()
        for operator in self.operators:
            operator.kill()
        for node in self.nodes:
            self.cluster.api.delete(f"/api/v1/nodes/{node}")
        for kind in ("clusterrolebindings", "clusterroles"):
            self.cluster.api.delete(f"/apis/rbac.authorization.k8s.io/v1/{kind}/{self.user}")

    # -- the user ------------------------------------------------------------------------------

    def apply(self, manifest: Mapping[str, Any], *options: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """kubectl apply."""
        return self.cluster.run_kubectl("apply", "-n", self.namespace, "-f", "-", *options, stdin=json.dumps(manifest), check=check)

    def create(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """POST a job; quicker than kubectl."""
        made = self.cluster.api.create(f"{JOBS}/namespaces/{self.namespace}/pstrainingjobs", dict(manifest), or_exists=False)
        return dict(made)

    def make(self, kind: str, name: str, **body: Any) -> dict[str, Any]:
        """POST an object of this kind (`Pod`, `NetworkPolicy`, …) to the namespace; `body` is all but its kind and name."""
        plural = kind.lower().removesuffix("y") + ("ies" if kind.endswith("y") else "s")
        version = ROOTS.get(plural, "v1").removeprefix("/apis/")
        metadata = {"name": name, **body.pop("metadata", {})}
        return dict(
            self.cluster.api.create(self.path(plural), {"apiVersion": version, "kind": kind, "metadata": metadata, **body}, or_exists=False)
        )

    def path(self, kind: str, name: str = "") -> str:
        """Where a kind, or one object of it, is."""
        return f"{ROOTS.get(kind, '/api/v1')}/namespaces/{self.namespace}/{kind}" + (f"/{name}" if name else "")

    def job(self, name: str = "job") -> dict[str, Any]:
        """The job as stored."""
        if self.shared:
            found = next((job for job in self.items("pstrainingjobs") if job["metadata"]["name"] == name), None)
            if found is None:
                raise ApiError(404, f"there is no job {name}")
            return found
        return dict(self.cluster.api.get(self.path("pstrainingjobs", name)))

    def status(self, name: str = "job") -> dict[str, Any]:
        """Its status."""
        return dict(self.job(name).get("status") or {})

    def conditions(self, name: str = "job") -> dict[str, dict[str, Any]]:
        """Its conditions by type."""
        return {entry["type"]: entry for entry in self.status(name).get("conditions") or []}

    def items(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        """All objects of a core kind in the namespace."""
        if kind in self.shared and not selector:
            return self.shared[kind].get()
        return self._list(kind, selector)

    def _list(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        query = f"?labelSelector={selector}" if selector else ""
        return list(self.cluster.api.get(self.path(kind) + query)["items"])

    def pods(self, job: str = "") -> dict[str, dict[str, Any]]:
        """Pods by name: all, or those whose name says that they are of `job`, whoever made them."""
        found = {pod["metadata"]["name"]: pod for pod in self.items("pods")}
        return {name: pod for name, pod in found.items() if name.startswith(f"{job}-" if job else "")}

    def run_keys(self, name: str = "job") -> dict[str, bytes]:
        """The keys of the job's run, read as only an administrator may."""
        job = self.job(name)
        number = job["status"]["internal"]["pinned"]["key"]
        return run_keys(self.cluster.api, self.namespace, name, job["metadata"]["uid"], number)

    def events(self, reason: str = "", job: str = "") -> list[dict[str, Any]]:
        """Events about jobs, or about one."""
        found = [event for event in self.items("events") if event["involvedObject"]["kind"] == "PSTrainingJob"]
        return [event for event in found if reason in ("", event["reason"]) and job in ("", event["involvedObject"]["name"])]

    def edit(self, job: str, **spec: Any) -> None:
        """Merge these fields into a job's spec; None takes one out."""
        self.cluster.api.merge(self.path("pstrainingjobs", job), {"spec": spec})

    def lay(self, job: str = "job", /, **status: Any) -> dict[str, Any]:
        """Merge these fields into a job's status, as another operator would; answers the job."""
        return dict(self.cluster.api.merge(self.path("pstrainingjobs", job) + "/status", {"status": status}))

    def trains(self, name: str = "job", node: str = "", address: str = "", shards: int = 1, workers: int = 2, **spec: Any) -> list[str]:
        """Create a job, run its pods, and wait until it is Running; answers their names, shards first."""
        self.create(manifest(name, shards, workers, **spec))
        pods = [*(f"{name}-shard-{index}-a1" for index in range(shards)), *(f"{name}-worker-{index}-r1" for index in range(workers))]
        self.run(*pods, node=node, address=address, job=name)
        return pods

    def suspend(self, name: str = "job") -> dict[str, Any]:
        """Suspend a job, whose pods end when they are told to; answers its status."""
        self.edit(name, suspend=True)
        self.take_off(*self.until_going(name))
        return self.until_phase("Suspended", name)

    # -- the kubelet ---------------------------------------------------------------------------

    def report(self, pod: str, **status: Any) -> None:
        """Write a pod's status as a kubelet would."""
        self.cluster.api.merge(self.path("pods", pod) + "/status", {"status": status})

    def bind(self, pod: str, node: str) -> None:
        """Be the scheduler."""
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": {"kind": "Node", "name": node}}
        self.cluster.api.create(self.path("pods", pod) + "/binding", body)

    def node(self, name: str, ready: bool = True) -> str:
        """A node of this test's own, without a kubelet: what it says is what the test says. A ready one is kept alive."""
        metadata = {"name": name, "labels": {"kubernetes.io/hostname": name}}
        self.cluster.api.create("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": metadata})
        if name not in self.nodes:
            self.nodes.append(name)
        with self.beating:
            (self.silent.discard if ready else self.silent.add)(name)
            self._beat(name, "True" if ready else "Unknown")
            if self.heart is None:
                self.heart = threading.Thread(target=self._keep_beating, daemon=True)
                self.heart.start()
        return name

    def _beat(self, name: str, status: str) -> None:
        condition = {"type": "Ready", "status": status, "lastHeartbeatTime": stamp(), "lastTransitionTime": stamp()}
        body = {"status": {"conditions": [condition], "capacity": {"cpu": "64", "pods": "500", "memory": "256Gi"}}}
        self.cluster.api.merge(f"/api/v1/nodes/{name}/status", body)

    def _keep_beating(self) -> None:
        # The controller-manager gives up a node that is silent for 50 s.
        while not self.over.wait(10):
            for name in list(self.nodes):
                with self.beating, contextlib.suppress(ApiError, OSError):
                    if name not in self.silent:
                        self._beat(name, "True")

    def scheduled(self, pod: str, node: str, ago: float = 0) -> None:
        """The pod was bound to the node so many seconds ago."""
        self.bind(pod, node)
        self.report(pod, conditions=[{"type": "PodScheduled", "status": "True", "lastTransitionTime": stamp(-ago)}])

    def run(self, *pods: str, node: str = "", address: str = "", job: str = "") -> None:
        """The pods' containers run and are ready, on a node of the namespace's own if none is named; then `job` is Running."""
        if not node:
            node = self.nodes[0] if self.nodes else self.node(f"{self.namespace}-n")
        for pod in pods:
            self.play(self.until(f"pod {pod}", lambda pod=pod: self.pods().get(pod)), node, address)
        if job:
            self.until_phase("Running", job)

    def play(self, raw: Mapping[str, Any], node: str, address: str = "") -> None:
        """This pod is bound, runs and is ready; nothing happens where it has gone meanwhile."""
        pod = raw["metadata"]["name"]
        with contextlib.suppress(ApiError):
            self.bind(pod, node)
            conditions = [
                {"type": kind, "status": "True", "lastTransitionTime": stamp()} for kind in ("PodScheduled", "Ready", "ContainersReady")
            ]
            states = [container_status(item["name"], {"running": {"startedAt": stamp()}}) for item in raw["spec"]["containers"]]
            self.report(
                pod, phase="Running", conditions=conditions, containerStatuses=states, podIP=address or self.address, startTime=stamp()
            )

    def wait(self, pod: str, reason: str, message: str, container: str = "worker", init: bool = False) -> None:
        """A container of the pod waits."""
        field = "initContainerStatuses" if init else "containerStatuses"
        self.report(pod, **{field: [container_status(container, {"waiting": {"reason": reason, "message": message}})]})

    def end(self, pod: str, code: int = 0, reason: str = "", message: str = "", **status: Any) -> None:
        """The pod's one container ended; `status` adds to the pod's status."""
        raw = self.pods()[pod]
        ended = {"exitCode": code, "reason": reason or ("Error" if code else "Completed"), "message": message}
        state = {"terminated": {**ended, "startedAt": stamp(-1), "finishedAt": stamp()}}
        states = [container_status(item["name"], state) for item in raw["spec"]["containers"]]
        self.report(pod, **{"phase": "Failed" if code else "Succeeded", "containerStatuses": states, **status})

    def remove(self, pod: str) -> None:
        """Force-delete a pod, as a kubelet does when its processes have gone."""
        with contextlib.suppress(ApiError):
            self.cluster.api.call("DELETE", self.path("pods", pod), {"gracePeriodSeconds": 0})

    def take_off(self, *pods: str) -> None:
        """Remove these pods, each once it has been told to end."""
        for pod in pods:
            self.until(f"{pod} to be told to end", lambda pod=pod: self.pods()[pod]["metadata"].get("deletionTimestamp"))
            self.remove(pod)

    # -- waiting -------------------------------------------------------------------------------

    def until(self, what: str, check: Callable[[], T], seconds: float = PATIENCE) -> T:
        """Wait for it, and say what the job and the operator said if it does not come."""
        return until(what, check, seconds, also=self.story)

    def until_going(self, job: str = "") -> list[str]:
        """Wait until all pods, or those of `job`, have been told to end; answers their names."""
        going = lambda: all(raw["metadata"].get("deletionTimestamp") for raw in self.pods(job).values())  # noqa: E731
        self.until("the pods to be told to end", going)
        return list(self.pods(job))

    def until_phase(self, phase: str, name: str = "job", seconds: float = PATIENCE) -> dict[str, Any]:
        """Wait until the job is in that phase; answers its status."""
        self.until(f"{name} to be {phase}", lambda: self.status(name).get("phase") == phase, seconds)
        return self.status(name)

    def until_counts(self, name: str, workers: str, seconds: float = PATIENCE) -> dict[str, Any]:
        """Wait until status.workersReady says this; answers the status."""
        self.until(f"{name} to have {workers} workers", lambda: self.status(name).get("workersReady") == workers, seconds)
        return self.status(name)

    def story(self) -> str:
        """For the failure message: jobs' status, pods, the operator's last lines."""
        jobs = [json.dumps(job.get("status"), indent=1) for job in self.items("pstrainingjobs")]
        pods = [f"{name}: {pod['status'].get('phase')} {pod['metadata'].get('deletionTimestamp', '')}" for name, pod in self.pods().items()]
        logs = [operator.log.read_text()[-2500:] for operator in self.operators if operator.log.exists()]
        return "\n".join([*jobs, *pods, *logs])


def allow(api: Api, user: str, kind: str, rules: list[dict[str, Any]], namespace: str = "") -> None:
    """Give a user these rights by a Role or ClusterRole of the user's name."""
    base = f"/apis/{RBAC}/v1{f'/namespaces/{namespace}' if namespace else ''}/{kind.lower()}"
    api.create(f"{base}s", {"apiVersion": f"{RBAC}/v1", "kind": kind, "metadata": {"name": user}, "rules": rules})
    bind(api, user, kind, user, namespace)


def bind(api: Api, user: str, kind: str, role: str, namespace: str = "") -> None:
    """Bind a user to a role that is there: in the namespace, or of the whole cluster."""
    place, binding = (f"/namespaces/{namespace}", "RoleBinding") if namespace else ("", "ClusterRoleBinding")
    body = {
        "apiVersion": f"{RBAC}/v1",
        "kind": binding,
        "metadata": {"name": user if role == user else f"{user}-{role}"},
        "roleRef": {"apiGroup": RBAC, "kind": kind, "name": role},
        "subjects": [{"apiGroup": RBAC, "kind": "User", "name": user}],
    }
    api.create(f"/apis/{RBAC}/v1{place}/{binding.lower()}s", body)


@contextlib.contextmanager
def world(cluster: Cluster, namespace: str, folder: Path) -> Iterator[World]:
    """A World that ends its operators."""
    made = World(cluster, namespace, folder)
    made.allow()
    try:
        yield made
    finally:
        made.close()


def psjob_operator(folder: Path, *words: str) -> tuple[int, str]:
    """Exit code and words of `psjob-operator` with these arguments, forked from a process that has imported it."""
    log = folder / f"psjob-operator-{uuid.uuid4().hex[:8]}.log"
    nursery = Nursery.get()
    return nursery.wait(nursery.start(list(words), log)), log.read_text()


def manifest(name: str = "job", shards: int = 1, workers: int = 2, pod: Mapping[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    """A small job; `spec` adds or replaces top fields of the spec, `pod` fields of the workers' pod spec."""
    container = {"name": "worker", "image": "me/digits:1", "command": ["python", "train.py"]}
    template = {"spec": {"containers": [container], **(pod or {})}}
    body = {"shards": {"replicas": shards, **spec.pop("of_shards", {})}, "workers": {"replicas": workers, "template": template}, **spec}
    return {"apiVersion": "psjob.dev/v1alpha1", "kind": "PSTrainingJob", "metadata": {"name": name}, "spec": body}


def until(what: str, check: Callable[[], T], seconds: float = PATIENCE, also: Callable[[], str] = str) -> T:
    """Poll until `check` answers something true, and answer that; AssertionError after the deadline."""
    deadline = time.monotonic() + seconds
    while True:
        found = check()
        if found:
            return found
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}\n{also()}"
        time.sleep(0.05)


def container_status(name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """A container's entry in a pod's status."""
    running = "running" in state
    return {"name": name, "image": "none", "imageID": "", "restartCount": 0, "ready": running, "started": running, "state": dict(state)}


def stamp(offset: float = 0) -> str:
    """Now, or so many seconds later, as the API server writes it."""
    return (datetime.now(UTC) + timedelta(seconds=offset)).strftime("%Y-%m-%dT%H:%M:%SZ")


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
