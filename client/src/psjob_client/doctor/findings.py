"""What the facts of a machine or of a cluster mean for training: one `Finding` a line of the doctor.

machine_facts.py and cluster_facts.py see the facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from psjob_client.text import amount
from psjob_operator.api.spec import PSTrainingJob
from psjob_operator.api.template import TRAINED, container_of
from psjob_operator.contract import INSTALL

Level = Literal["ok", "warning", "problem"]
MIB, GIB = 1 << 20, 1 << 30
PYTHON = (3, 11)
PROCESS_BYTES = 350 * MIB
"""Memory of a process that has imported torch, before a model."""
LEAST_SHM = 64 * MIB
LEAST_FILES, OWN_FILES = 1024, 128
"""Open files: what a shell has as a rule; what a shard needs beside a stream for each worker."""
LEAST_DISK, LITTLE_DISK = 100 * MIB, 2 * GIB
PORTS_EACH = 2
"""Ports of a shard: for workers, and for its status."""
PROCESSES_A_CORE = 16
RIGHTS = (
    ("psjob.dev", "pstrainingjobs", ("get", "list", "watch", "create", "patch", "delete")),
    ("", "pods", ("get", "list")),
    ("", "pods/log", ("get",)),
    ("", "events", ("list",)),
    ("", "persistentvolumeclaims", ("get", "list")),
)
"""(group, resource, verbs) that psjob's commands use."""
NEEDED = frozenset({("pstrainingjobs", "create"), ("pstrainingjobs", "get")})
"""Without these no job can be submitted; without others a command or two does not work."""
TOLD = 6
"""Names in a line."""


@dataclass(frozen=True)
class Finding:
    """What was looked at, the figure, the limit, and what to do."""

    level: Level
    about: str
    """Such as `/dev/shm`."""
    figure: str
    limit: str = ""
    """What it should be; empty where there is no number to it."""
    remedy: str = ""
    """Empty where it is ok."""


def ok(about: str, figure: str, limit: str = "") -> Finding:
    """Nothing to do."""
    return Finding("ok", about, figure, limit)


def warning(about: str, figure: str, limit: str, remedy: str) -> Finding:
    """A job may suffer from it."""
    return Finding("warning", about, figure, limit, remedy)


def problem(about: str, figure: str, limit: str, remedy: str) -> Finding:
    """A job fails or waits for it."""
    return Finding("problem", about, figure, limit, remedy)


def judge(good: bool, about: str, figure: str, limit: str, remedy: str, bad: Callable[[str, str, str, str], Finding] = problem) -> Finding:
    """It is ok, or else `bad`, with the same figure and limit."""
    return ok(about, figure, limit) if good else bad(about, figure, limit, remedy)


def sick(findings: Iterable[Finding]) -> bool:
    """Is there a problem?"""
    return any(finding.level == "problem" for finding in findings)


@dataclass(frozen=True)
class Disk:
    """One place that files go to."""

    path: str
    free: int | None
    """None: it cannot be asked."""
    writable: bool


@dataclass(frozen=True)
class MachineFacts:
    """What is known of this machine; None where it cannot be found out."""

    python: tuple[int, int, int]
    client: str
    runtime: str | None
    """Version of the distribution psjob beside this one."""
    torch: str | None
    cores: float
    """Those that this process may use: by affinity and by its cgroup."""
    memory: int | None
    """Bytes that are free for new processes, by the system and by its cgroup."""
    shm: int | None
    """Free bytes of /dev/shm."""
    files: int | None
    """Hard limit of open files; None: no limit."""
    ports: int | None
    """Ports that the system gives to who asks for any."""
    loopback: str
    """Why a port of 127.0.0.1 cannot be had; empty where it can."""
    runs: Disk
    cache: Disk
    gpus: tuple[str, ...] = ()
    """Name and memory of each."""
    driver: str | None = None
    torch_cuda: str | None = None
    """Version of CUDA that torch was built for; None: none, or not asked."""
    cuda_usable: bool | None = None


def judge_machine(facts: MachineFacts, job: PSTrainingJob | None = None) -> list[Finding]:
    """Every line about this machine; with `job`, whether that job fits on it."""
    found = [*_software(facts), *_sizes(facts), *_disks(facts), *_gpu(facts)]
    return found + (list(_fits(facts, job)) if job is not None else [])


def _software(facts: MachineFacts) -> Iterator[Finding]:
    version = ".".join(str(part) for part in facts.python)
    wanted = f"at least {PYTHON[0]}.{PYTHON[1]}"
    yield judge(facts.python[:2] >= PYTHON, "python", version, wanted, "make an environment with a newer Python")
    remedy = f"install it {INSTALL}" if facts.runtime is None else f"install both anew, {INSTALL}"
    runtime, same = facts.runtime or "not installed here", facts.runtime == facts.client
    yield judge(same, "psjob", runtime, f"{facts.client}, as psjob-client", remedy)
    yield judge(facts.torch is not None, "torch", facts.torch or "not installed here", "", "pip install torch")


def _sizes(facts: MachineFacts) -> Iterator[Finding]:
    yield ok("cores", f"{facts.cores:g}")
    least = 2 * PROCESS_BYTES
    wanted = f"{amount(least)} for a worker and a shard, beside the model"
    if facts.memory is None:
        yield warning("memory", "unknown", wanted, "look at it yourself")
    else:
        remedy = "end other programs, or raise the container's limit"
        yield judge(facts.memory >= least, "memory", f"{amount(facts.memory)} free", wanted, remedy)
    if facts.shm is None:
        yield warning("/dev/shm", "is not there", "", "set spec.training.transport: tcp")
    else:
        remedy = "give the container more (docker run --shm-size 1g), or set spec.training.transport: tcp"
        yield judge(facts.shm >= LEAST_SHM, "/dev/shm", f"{amount(facts.shm)} free", amount(LEAST_SHM), remedy, warning)
    remedy, enough = "raise the hard limit: ulimit -Hn, or limits.conf", facts.files is None or facts.files >= LEAST_FILES
    yield judge(enough, "open files", _files(facts), str(LEAST_FILES), remedy, warning)
    there = f"{facts.ports} on 127.0.0.1" if facts.ports is not None else "127.0.0.1 is there"
    figure, remedy = f"127.0.0.1: {facts.loopback}", "processes meet on the loopback address: bring it up (ip link set lo up)"
    yield judge(not facts.loopback, "ports", figure if facts.loopback else there, "", remedy)


def _files(facts: MachineFacts) -> str:
    return "no limit" if facts.files is None else f"{facts.files} at most"


def _disks(facts: MachineFacts) -> Iterator[Finding]:
    yield _disk("run folder", facts.runs, "start psjob in a folder with room, or remove old runs below .psjob")
    yield _disk("cache", facts.cache, "data sets and compiled kernels go there: make room, or set XDG_CACHE_HOME")


def _disk(about: str, disk: Disk, remedy: str) -> Finding:
    level = problem if about == "run folder" else warning
    if not disk.writable:
        return level(about, f"{disk.path} cannot be written to", "", remedy)
    if disk.free is None:
        return warning(about, f"{disk.path}: room unknown", amount(LITTLE_DISK), remedy)
    figure = f"{amount(disk.free)} free at {disk.path}"
    if disk.free < LEAST_DISK:
        return level(about, figure, amount(LEAST_DISK), remedy)
    return judge(disk.free >= LITTLE_DISK, about, figure, amount(LITTLE_DISK), remedy, warning)


def _gpu(facts: MachineFacts) -> Iterator[Finding]:
    if facts.driver is None and not facts.gpus:
        yield ok("GPU", "none; jobs train on the CPU")
        return
    if not facts.gpus:
        yield warning("GPU", f"driver {facts.driver}, and no GPU", "", "nvidia-smi says why; in a container start it with --gpus all")
        return
    yield ok("GPU", f"{', '.join(facts.gpus)}; driver {facts.driver}")
    if facts.cuda_usable is False:
        built = f"built for CUDA {facts.torch_cuda}" if facts.torch_cuda else "built without CUDA"
        remedy = "update the driver, or install a torch built for an older CUDA" if facts.torch_cuda else "install a torch built for CUDA"
        yield warning("torch on GPU", f"torch {facts.torch} is {built} and sees none", "", remedy)
    elif facts.cuda_usable:
        yield ok("torch on GPU", f"CUDA {facts.torch_cuda}")


def _fits(facts: MachineFacts, job: PSTrainingJob) -> Iterator[Finding]:
    workers, shards = job.spec.workers.replicas, job.spec.shards.replicas
    processes = workers + shards
    fewer = "have fewer processes here: --set spec.workers.replicas=2"
    figure = f"{processes} processes ({workers} workers, {shards} shards)"
    yield judge(processes <= PROCESSES_A_CORE * facts.cores, "job: cores", figure, f"{facts.cores:g} cores", fewer, warning)
    needed = processes * PROCESS_BYTES
    if facts.memory is not None:
        yield judge(facts.memory >= needed, "job: memory", f"{amount(needed)} before the model", f"{amount(facts.memory)} free", fewer)
    streams = job.spec.training.streams
    files = workers * (streams if isinstance(streams, int) else 1) + shards + OWN_FILES
    remedy = "raise the hard limit (ulimit -Hn), or use fewer workers or streams"
    yield judge(facts.files is None or facts.files >= files, "job: open files", f"{files} a shard", _files(facts), remedy)
    if facts.ports is not None and facts.ports < shards * PORTS_EACH:
        yield problem("job: ports", str(shards * PORTS_EACH), f"{facts.ports}", "widen net.ipv4.ip_local_port_range, or use fewer shards")
    trained = [container_of(template, TRAINED) or {} for template in job.spec.worker_templates().values()]
    limits = {name for container in trained for name in (container.get("resources") or {}).get("limits") or {}}
    if any(str(name).endswith("/gpu") for name in limits) and not facts.gpus:
        yield warning(
            "job: GPU", "workers ask for one", "none here", "psjob run does not give GPUs out: a script that needs one fails here"
        )


@dataclass(frozen=True)
class Operator:
    """A Deployment of the operator."""

    namespace: str
    name: str
    ready: int
    version: str


@dataclass(frozen=True)
class StorageClass:
    """A StorageClass."""

    name: str
    provisioner: str
    default: bool


@dataclass(frozen=True)
class NodeFacts:
    """A node: what pods may use of it, as quantities."""

    name: str
    usable: bool
    """Ready, and not cordoned."""
    allocatable: Mapping[str, str]


@dataclass(frozen=True)
class Quota:
    """One number of a ResourceQuota."""

    quota: str
    resource: str
    hard: str
    used: str


@dataclass(frozen=True)
class Limit:
    """One number of a LimitRange for containers."""

    range: str
    bound: str
    """min, max, default or defaultRequest."""
    resource: str
    value: str


@dataclass(frozen=True)
class ClaimFacts:
    """A PersistentVolumeClaim."""

    modes: tuple[str, ...]
    phase: str
    ours: bool
    going: bool = False
    """It is being deleted."""


@dataclass(frozen=True)
class ClusterFacts:
    """What a user sees of a cluster; None where the user may not see it."""

    server: str
    namespace: str
    client: str
    """Version of the client."""
    version: str | None = None
    unreachable: str = ""
    """Why there is no answer."""
    namespace_there: bool | None = None
    served: bool = False
    """Is PSTrainingJob known?"""
    absent_fields: tuple[str, ...] = ()
    """Fields of a job that the client knows and the cluster's CRD does not."""
    operators: tuple[Operator, ...] | None = None
    rights: Mapping[tuple[str, str], bool] = field(default_factory=dict)
    """(resource, verb) -> allowed."""
    classes: tuple[StorageClass, ...] | None = None
    quotas: tuple[Quota, ...] | None = None
    limits: tuple[Limit, ...] | None = None
    nodes: tuple[NodeFacts, ...] | None = None
    pull_secrets: tuple[str, ...] | None = None
    """Of the namespace's default service account."""
    claims: Mapping[str, ClaimFacts] | None = None
    priorities: tuple[str, ...] | None = None
    """Names of the priority classes."""
    untried: bool = False
    """This user may not make pods, so that admission was not asked about those of the job."""
    refused: tuple[tuple[str, str], ...] = ()
    """(object, sentence) of what the API server would refuse of the job."""


def judge_cluster(facts: ClusterFacts) -> list[Finding]:
    """Every line about the cluster itself."""
    if facts.unreachable:
        remedy = "look at --context and the kubeconfig: kubectl cluster-info"
        return [problem("API server", f"{facts.server}: {facts.unreachable}", "", remedy)]
    found = [ok("API server", f"{facts.server}, Kubernetes {facts.version or 'of an unknown version'}")]
    return [*found, *_namespace(facts), *_crd(facts), *_operator(facts), *_rights(facts), *_storage(facts), *_room(facts), *_pulling(facts)]


def _namespace(facts: ClusterFacts) -> Iterator[Finding]:
    if facts.namespace_there is False:
        yield problem("namespace", facts.namespace, "is not there", f"kubectl create namespace {facts.namespace}, or give -n")
    else:
        yield ok("namespace", facts.namespace)


def _crd(facts: ClusterFacts) -> Iterator[Finding]:
    if not facts.served:
        yield problem(
            "CRD", "PSTrainingJob is not known here", "psjob.dev/v1alpha1", "install the chart, or: psjob crd | kubectl apply -f -"
        )
    elif facts.absent_fields:
        names = ", ".join(facts.absent_fields[:TOLD]) + (
            f" and {len(facts.absent_fields) - TOLD} more" if len(facts.absent_fields) > TOLD else ""
        )
        yield warning(
            "CRD", f"does not know {names}", f"psjob-client {facts.client}",
            f"upgrade chart and CRD to {facts.client}, or use the client of the cluster's version",
        )  # fmt: skip
    else:
        yield ok("CRD", "psjob.dev/v1alpha1", f"psjob-client {facts.client}")


def _operator(facts: ClusterFacts) -> Iterator[Finding]:
    if facts.operators is None:
        yield warning("operator", "Deployments cannot be seen by this user", "", "ask its administrator whether psjob's operator runs")
        return
    if not facts.operators:
        yield problem("operator", "no Deployment of it", "1", "install it as docs/install.md says, On a cluster")
    for one in facts.operators:
        name = f"{one.namespace}/{one.name}"
        if one.ready < 1:
            yield problem("operator", f"{name} has no ready pod", "1", f"kubectl -n {one.namespace} describe deployment {one.name}")
        elif one.version != facts.client:
            yield warning(
                "operator",
                f"{name} is {one.version or 'of an unknown version'}",
                f"psjob-client {facts.client}",
                "use the same version of both",
            )
        else:
            yield ok("operator", f"{name} {one.version}", f"psjob-client {facts.client}")


def _rights(facts: ClusterFacts) -> Iterator[Finding]:
    """One line a resource, naming the verbs that are not allowed."""
    by_resource: dict[str, list[tuple[str, bool]]] = {}
    for (resource, verb), allowed in facts.rights.items():
        by_resource.setdefault(resource, []).append((verb, allowed))
    for resource, verbs in by_resource.items():
        lacking = [verb for verb, allowed in verbs if not allowed]
        wanted = ", ".join(verb for verb, _ in verbs)
        if not lacking:
            yield ok(f"rights: {resource}", wanted)
            continue
        level = problem if any((resource, verb) in NEEDED for verb in lacking) else warning
        remedy = f"ask for a Role with them in {facts.namespace} (the chart adds psjob's own to the roles view and edit)"
        yield level(f"rights: {resource}", f"may not {', '.join(lacking)}", wanted, remedy)


def _storage(facts: ClusterFacts) -> Iterator[Finding]:
    if facts.classes is None:
        yield warning(
            "storage", "storage classes cannot be seen by this user", "", "ask for the name of a class, or of a claim, for checkpoints"
        )
        return
    default = [one for one in facts.classes if one.default]
    if not default:
        there = ", ".join(one.name for one in facts.classes[:TOLD]) or "none at all"
        yield warning(
            "storage",
            f"no default storage class ({there})",
            "1",
            "name a class in spec.checkpoint.volumeClaimTemplate, or a claim of your own in spec.checkpoint.volume",
        )
    else:
        yield ok("storage", f"default class {default[0].name} ({default[0].provisioner})")


def _room(facts: ClusterFacts) -> Iterator[Finding]:
    for one in facts.quotas or ():
        yield ok(f"quota {one.quota}", f"{one.resource}: {one.used} used", one.hard)
    for limit in facts.limits or ():
        yield ok(f"limit range {limit.range}", f"{limit.bound} {limit.resource} of a container", limit.value)
    if facts.nodes is None:
        yield warning("nodes", "cannot be seen by this user", "", "ask its administrator how large nodes are, and which have GPUs")
        return
    usable = [node for node in facts.nodes if node.usable]
    if not usable:
        yield problem("nodes", f"{len(facts.nodes)}, none is ready", "1", "kubectl get nodes")
        return
    gpus = {name for node in usable for name, count in node.allocatable.items() if name.endswith("/gpu") and count != "0"}
    figure = ", ".join(f"{sum(int(node.allocatable.get(name, '0')) for node in usable)} {name}" for name in sorted(gpus)) or "no GPU"
    yield ok("nodes", f"{len(usable)} ready; {figure}")


def _pulling(facts: ClusterFacts) -> Iterator[Finding]:
    if facts.pull_secrets:
        yield ok("image pull", f"secrets of the default service account: {', '.join(facts.pull_secrets[:TOLD])}")
    elif facts.pull_secrets is not None:
        yield ok(
            "image pull", "no secret on the default service account: images of a private registry need imagePullSecrets in the template"
        )
