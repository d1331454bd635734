"""Judges a cluster for a user who wants to train on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from psjob_client.doctor.findings import Finding, ok, problem, warning

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
class Node:
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
class Claim:
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
    nodes: tuple[Node, ...] | None = None
    pull_secrets: tuple[str, ...] | None = None
    """Of the namespace's default service account."""
    claims: Mapping[str, Claim] | None = None
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
