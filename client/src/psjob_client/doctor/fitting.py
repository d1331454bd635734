"""Judges whether a job would fit into a cluster: its pods against nodes, quota and limit ranges, its checkpoints against storage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from psjob_client.doctor.findings import ClusterFacts, Finding, Limit, NodeFacts, ok, problem, warning
from psjob_operator.api.base import quantity
from psjob_operator.api.claim_template import MANY, claim_spec
from psjob_operator.api.spec import PSTrainingJob
from psjob_operator.plan import objects
from psjob_operator.plan.objects import named_claim, volume
from psjob_operator.render.objects import LABEL_ROLE, LABEL_STAGE

ONE_NODE = frozenset({
    "rancher.io/local-path", "kubernetes.io/no-provisioner", "kubernetes.io/host-path", "k8s.io/minikube-hostpath", "docker.io/hostpath",
    "ebs.csi.aws.com", "kubernetes.io/aws-ebs", "pd.csi.storage.gke.io", "kubernetes.io/gce-pd", "disk.csi.azure.com",
    "kubernetes.io/azure-disk", "cinder.csi.openstack.org", "dobs.csi.digitalocean.com", "csi.hetzner.cloud", "topolvm.io",
})  # fmt: skip
"""Provisioners whose volumes one node mounts at a time."""
Amounts = Mapping[str, Decimal]


@dataclass(frozen=True)
class PodGroup:
    """Pods of one role, and of one stage."""

    role: str
    count: int
    requests: Amounts
    limits: Amounts
    containers: tuple[tuple[Amounts, Amounts], ...]
    """(requests, limits) of each."""
    images: tuple[str, ...]
    secrets: bool
    """Does the template name imagePullSecrets?"""
    stage: str = ""
    """Name of the workers' stage, where the model is cut in stages."""
    claims: tuple[str, ...] = ()
    """Claims that their volumes name."""
    classes: tuple[str, ...] = ()
    """Storage classes of claims that are made with each pod."""
    priority: str = ""
    """Their priority class."""

    @property
    def words(self) -> str:
        """Which pods."""
        return f"{self.role} pods of stage {self.stage}" if self.stage else f"{self.role} pods"


def pod_groups(job: PSTrainingJob, documents: list[dict[str, Any]]) -> list[PodGroup]:
    """What the pods of `job` ask for, of the objects that the operator would create."""
    found = []
    stages = [(stage.name, stage.replicas) for stage in job.spec.stages or ()] or [("", job.spec.workers.replicas)]
    for role, stage, count in (("shard", "", job.spec.shards.replicas), *(("worker", *it) for it in stages)):
        pod = next((one for one in documents if one["kind"] == "Pod" and _seat(one) == (role, stage)), None)
        if pod is not None:
            found.append(_pods(role, count, pod["spec"], stage))
    return found


def judge_fit(facts: ClusterFacts, job: PSTrainingJob, pods: list[PodGroup], given: list[PodGroup] | None = None) -> list[Finding]:
    """Every line about `job` in this cluster. `given`: its pods without what psjob's own parts ask for, which gives way to a LimitRange."""
    if facts.unreachable:
        return []
    found = [problem(f"job: {what}", "is refused", "", sentence) for what, sentence in facts.refused]
    if facts.untried:
        why = "look at the pods' words once it runs, or ask who may make pods there"
        found.append(
            warning("job: admission", f"this user may make no pods in {facts.namespace}", "Pod Security and policies not asked", why)
        )
    found += [*_nodes(facts, pods), *_quota(facts, pods), *_limits(facts, given or pods), *_checkpoints(facts, job)]
    return [*found, *_volumes(facts, job, pods), *_priorities(facts, pods), *_images(facts, pods)]


def _seat(pod: Mapping[str, Any]) -> tuple[str, str]:
    """Its role, and its stage where it has one."""
    labels = pod["metadata"].get("labels") or {}
    return str(labels.get(LABEL_ROLE, "")), str(labels.get(LABEL_STAGE, ""))


def _pods(role: str, count: int, spec: Mapping[str, Any], stage: str = "") -> PodGroup:
    containers = []
    for container in spec["containers"]:
        resources = container.get("resources") or {}
        limits = _amounts(resources.get("limits"))
        containers.append(({**limits, **_amounts(resources.get("requests"))}, limits))
    images = tuple(str(container.get("image")) for container in spec["containers"])
    return PodGroup(
        role,
        count,
        _sum(requests for requests, _ in containers),
        _sum(limits for _, limits in containers),
        tuple(containers),
        images,
        bool(spec.get("imagePullSecrets")),
        stage,
        tuple(str(it["persistentVolumeClaim"].get("claimName")) for it in spec.get("volumes") or () if it.get("persistentVolumeClaim")),
        tuple(name for it in spec.get("volumes") or () if (name := _class_of(it))),
        str(spec.get("priorityClassName") or ""),
    )


def _class_of(volume: Mapping[str, Any]) -> str:
    """The storage class that a volume of the pod's own names; empty where it names none."""
    template = (volume.get("ephemeral") or {}).get("volumeClaimTemplate") or {}
    return str((template.get("spec") or {}).get("storageClassName") or "")


def _amounts(given: Any) -> dict[str, Decimal]:
    there = given if isinstance(given, Mapping) else {}
    return {str(name): number for name, value in there.items() if (number := quantity(value)) is not None}


def _sum(parts: Any) -> dict[str, Decimal]:
    total: dict[str, Decimal] = {}
    for part in parts:
        for name, number in part.items():
            total[name] = total.get(name, Decimal(0)) + number
    return total


def _nodes(facts: ClusterFacts, pods: list[PodGroup]) -> Iterator[Finding]:
    if facts.nodes is None:
        return
    usable = [node for node in facts.nodes if node.usable]
    for one in pods:
        about = f"job: {one.words}"
        fitting = [node for node in usable if _fits(node, one)]
        asked = _said(one.requests) or "nothing asked for"
        if not fitting and usable:
            name, most = _shortest(usable, one)
            yield problem(
                about,
                f"{one.count} x {asked}",
                f"at most {most} {name} on a node",
                "ask for less, or add a larger node; taints are not looked at",
            )
            continue
        places = sum(_places(node, one, one.count) for node in fitting)
        if places < one.count:
            yield problem(about, f"{one.count} x {asked}", f"room for {places} on empty nodes", "have fewer or smaller pods, or add nodes")
        else:
            yield ok(about, f"{one.count} x {asked}", f"{len(fitting)} of {len(usable)} nodes are large enough when empty")


def _fits(node: NodeFacts, pods: PodGroup) -> bool:
    return _places(node, pods, 1) >= 1


def _places(node: NodeFacts, pods: PodGroup, most: int) -> int:
    """Pods of this role that an empty node takes, at most `most`."""
    room = most
    for name, number in pods.requests.items():
        if number > 0:
            room = min(room, int((quantity(node.allocatable.get(name, "0")) or Decimal(0)) / number))
    return room


def _shortest(nodes: list[NodeFacts], pods: PodGroup) -> tuple[str, str]:
    """The resource that no node has enough of, and the most that one has."""
    for name, number in pods.requests.items():
        most = max(nodes, key=lambda node: quantity(node.allocatable.get(name, "0")) or Decimal(0)).allocatable.get(name, "0")
        if (quantity(most) or Decimal(0)) < number:
            return name, most
    return "of all that it asks for", "less"


def _said(amounts: Amounts) -> str:
    return ", ".join(f"{_short(name, number)} {name}" for name, number in amounts.items())


def _short(name: str, number: Decimal) -> str:
    if name in ("memory", "ephemeral-storage", "storage"):
        return f"{float(number) / 2**30:.3g}Gi"
    return f"{float(number):g}"


def _quota(facts: ClusterFacts, pods: list[PodGroup]) -> Iterator[Finding]:
    for quota in facts.quotas or ():
        kind = next((word for word in ("requests", "limits") if quota.resource.startswith(f"{word}.")), "")
        name = quota.resource.removeprefix(f"{kind}.")
        if quota.resource in ("pods", "count/pods"):
            needed = Decimal(sum(one.count for one in pods))
        elif (kind and name != "storage") or name in ("cpu", "memory"):
            of = [one.limits if kind == "limits" else one.requests for one in pods]
            if name in ("cpu", "memory") and any(name not in amounts for amounts in of) and not _defaulted(facts, name):
                which = next(one.words for one, amounts in zip(pods, of, strict=True) if name not in amounts)
                yield problem(
                    f"job: quota {quota.quota}",
                    f"{which} have no {quota.resource}",
                    quota.hard,
                    f"a quota on it wants {kind or 'requests'} of {name}: add them",
                )
                continue
            needed = sum((amounts.get(name, Decimal(0)) * one.count for one, amounts in zip(pods, of, strict=True)), Decimal(0))
        else:
            continue
        hard, used = quantity(quota.hard), quantity(quota.used)
        if needed == 0 or hard is None or used is None:
            continue
        figure = f"{quota.resource}: {_short(name, needed)} needed"
        if used + needed > hard:
            yield problem(
                f"job: quota {quota.quota}",
                figure,
                f"{_short(name, hard - used)} of {quota.hard} left",
                "have fewer or smaller pods, or ask for more quota",
            )
        else:
            yield ok(f"job: quota {quota.quota}", figure, f"{_short(name, hard - used)} of {quota.hard} left")


def _defaulted(facts: ClusterFacts, resource: str) -> bool:
    return any(limit.resource == resource and limit.bound in ("default", "defaultRequest") for limit in facts.limits or ())


def _limits(facts: ClusterFacts, pods: list[PodGroup]) -> Iterator[Finding]:
    for limit in facts.limits or ():
        bound = quantity(limit.value)
        if bound is None or limit.bound not in ("min", "max"):
            continue
        for one in pods:
            for requests, limits in one.containers:
                given = (requests if limit.bound == "min" else {**requests, **limits}).get(limit.resource)
                if given is not None and (given < bound if limit.bound == "min" else given > bound):
                    yield _breach(limit, one.role, given)


def _breach(limit: Limit, role: str, given: Decimal) -> Finding:
    figure = f"a {role} asks for {_short(limit.resource, given)} {limit.resource}"
    return problem(f"job: limit range {limit.range}", figure, f"{limit.bound} {limit.value}", "change the resources of the template")


def _volumes(facts: ClusterFacts, job: PSTrainingJob, pods: list[PodGroup]) -> Iterator[Finding]:
    """Claims of the pods that are not there, or go; those of checkpoints have a line of their own unless they go."""
    own = {objects.claim_name(job.metadata.name), named_claim(job.spec)}
    pairs = f"{job.metadata.name}-pair-"  # made for the job, as its own for checkpoints
    for name in dict.fromkeys(name for one in pods for name in one.claims if not name.startswith(pairs)):
        there = (facts.claims or {}).get(name)
        if there is not None and there.going:
            yield problem(f"job: claim {name}", "is being deleted", "", "wait until it is gone and make it anew, or name another one")
        elif facts.claims is not None and there is None and name not in own:
            yield problem(f"job: claim {name}", "is not there", "", f"make it in {facts.namespace}, or take the volume out of the template")
    meeting = job.spec.shards.pair_storage_class_name
    for name in dict.fromkeys([*(name for one in pods for name in one.classes), *([meeting] if meeting else [])]):
        if facts.classes is not None and name not in {one.name for one in facts.classes}:
            yield problem(f"job: storage class {name}", "is not there", "", "name one of kubectl get storageclass")


def _priorities(facts: ClusterFacts, pods: list[PodGroup]) -> Iterator[Finding]:
    for name in dict.fromkeys(one.priority for one in pods if one.priority):
        if facts.priorities is not None and name not in facts.priorities:
            yield problem(f"job: priority class {name}", "is not there", "", "name one of kubectl get priorityclass, or have it made")


def _checkpoints(facts: ClusterFacts, job: PSTrainingJob) -> Iterator[Finding]:
    kept = job.spec.checkpoint
    if kept.disabled:
        yield warning("job: checkpoints", "disabled", "", "a lost shard fails the job: leave spec.checkpoint.disabled out")
        return
    source = volume(job.metadata.name, job.spec) or {}
    name = (source.get("persistentVolumeClaim") or {}).get("claimName")
    if name is None:
        yield ok("job: checkpoints", f"on a volume of kind {', '.join(source)}")
        return
    there = (facts.claims or {}).get(name)
    spec = claim_spec(kept.volume_claim_template)
    if there is not None:
        wanted = "" if kept.volume is not None else ", ".join(spec["accessModes"])
        yield from _claim(wanted, name, there.modes, there.phase, ours=there.ours or kept.volume is not None)
    elif kept.volume is not None:
        if facts.claims is not None:
            yield problem(
                "job: checkpoints", f"claim {name} is not there", "", f"make it in {facts.namespace}, or leave spec.checkpoint.volume out"
            )
    else:
        yield from _made(facts, spec, name)


def _claim(wanted: str, name: str, modes: tuple[str, ...], phase: str, *, ours: bool) -> Iterator[Finding]:
    if not ours:
        yield problem(
            "job: checkpoints",
            f"claim {name} is there and not psjob's",
            "",
            "rename the job, or name the claim in spec.checkpoint.volume.persistentVolumeClaim.claimName",
        )
    elif phase == "Lost":
        yield problem("job: checkpoints", f"claim {name} is Lost", "Bound", "its volume is gone: delete the claim, or name another one")
    elif MANY in wanted and MANY not in modes:
        yield problem(
            "job: checkpoints",
            f"claim {name} has {', '.join(modes)}",
            wanted,
            "leave accessModes out of spec.checkpoint.volumeClaimTemplate, or name another claim",
        )
    else:
        yield ok("job: checkpoints", f"claim {name}, {phase}", wanted)


def _made(facts: ClusterFacts, spec: Mapping[str, Any], name: str) -> Iterator[Finding]:
    asked, size, modes = spec.get("storageClassName"), spec["resources"]["requests"]["storage"], ", ".join(spec["accessModes"])
    if asked == "" or spec.get("volumeName"):  # of no class: it binds to a volume that somebody has made
        yield ok("job: checkpoints", f"claim {name} of {size} binds to a volume that is there", modes)
        return
    if facts.classes is None:
        return
    used = next((one for one in facts.classes if (one.name == asked if asked else one.default)), None)
    if used is None:
        yield problem(
            "job: checkpoints",
            f"claim {name} would wait forever",
            f"storage class {asked}" if asked else "a default storage class",
            "name one of kubectl get storageclass in spec.checkpoint.volumeClaimTemplate.spec.storageClassName",
        )
    elif MANY in modes and used.provisioner in ONE_NODE:
        yield problem(
            "job: checkpoints",
            f"class {used.name} ({used.provisioner}) has no {MANY}",
            modes,
            "leave accessModes out of spec.checkpoint.volumeClaimTemplate: shards then share a node",
        )
    else:
        yield ok("job: checkpoints", f"claim {name} of {size} is made of class {used.name}", modes)


def _images(facts: ClusterFacts, pods: list[PodGroup]) -> Iterator[Finding]:
    image = next((image for one in pods if one.role == "worker" for image in one.images), "")
    host = image.partition("/")[0] if "/" in image else ""
    private = "." in host or ":" in host
    if private and facts.pull_secrets == () and not any(one.secrets for one in pods):
        yield warning(
            "job: image", image, "no pull secret",
            f"if {host} asks for a login: kubectl create secret docker-registry, and name it in imagePullSecrets of the template",
        )  # fmt: skip
