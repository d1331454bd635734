"""A template means in a job what it means to the API server: its pods differ from bare ones only in what docs/operations.md says.

Workers' pods are compared with a bare pod of the template, shards' pods with what server-side apply lays over psjob's own.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from hack.cluster.api import ApiError
from psjob_client.cli.manifest_commands import documents
from psjob_operator.api.validate import validate_job
from psjob_operator.render.shard import KEYED, merge_templates
from tests.support.cluster_fixtures import Cluster
from tests.unit.api_manifest import MANY_NODES

pytestmark = pytest.mark.cluster
COUNT = 120
BASE = {"name": "worker", "image": "me/digits:1", "command": ["python", "train.py"]}
OVERHEAD = {
    "apiVersion": "node.k8s.io/v1",
    "kind": "RuntimeClass",
    "metadata": {"name": "sandbox"},
    "handler": "runsc",
    "overhead": {"podFixed": {"cpu": "250m", "memory": "120Mi"}},
}
LOST = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
POWERLESS = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
TOKEN = "kube-api-access"


@pytest.fixture(scope="module")
def place(control_plane: Cluster) -> Iterator[str]:
    name = control_plane.create_namespace("templates")
    control_plane.api.create("/apis/node.k8s.io/v1/runtimeclasses", OVERHEAD)
    yield name
    control_plane.api.delete("/apis/node.k8s.io/v1/runtimeclasses/sandbox")
    control_plane.api.delete(f"/api/v1/namespaces/{name}")


def test_a_worker_is_its_template_and_what_psjob_adds(control_plane: Cluster, place: str) -> None:
    differ = {}
    for name, part in templates("worker", COUNT).items():
        template = merge_templates({"spec": {"containers": [BASE]}}, part)
        made = _made(control_plane, _pods(place, template, {})[1])
        bare = _made(control_plane, _bare(place, template, made))
        differ[name] = _difference(_without_ours(made, "worker"), bare)
    assert len(differ) == COUNT
    assert not {name: told for name, told in differ.items() if told}


def test_a_shard_is_what_server_side_apply_lays_over_psjobs_own(control_plane: Cluster, place: str) -> None:
    differ = {}
    plain = {"spec": {"containers": [BASE]}}
    placements = ({"placement": "Spread"}, {"placement": "Packed"})
    own = [_pods(place, plain, ps)[0] for ps in placements]
    for number, pod in enumerate(own):
        _apply(control_plane, place, f"base-{number}", "base", pod)
    for number, (name, over) in enumerate(templates("shard", COUNT).items()):
        which = number % len(placements)
        made = _made(control_plane, _pods(place, plain, {**placements[which], "template": over})[0])
        merged = _apply(control_plane, place, f"base-{which}", "over", over, "&dryRun=All")
        expected = _made(control_plane, _documented(merged, own[which], over, made))
        differ[name] = _difference(_without_ours(made, "shard"), _without_ours(expected, "shard"))
    assert len(differ) == COUNT
    assert not {name: told for name, told in differ.items() if told}


def test_what_the_api_server_takes_of_no_new_pod_is_refused_by_name() -> None:
    debug = {"spec": {"containers": [BASE], "ephemeralContainers": [{"name": "debug", "image": "busybox"}]}}
    _, problems = validate_job(_job("ns", debug, {}))
    assert [problem.field for problem in problems] == ["spec.workers.template.spec.ephemeralContainers"]


def _job(namespace: str, template: Template, ps: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "psjob.dev/v1alpha1",
        "kind": "PSTrainingJob",
        "metadata": {"name": "job", "namespace": namespace},
        "spec": {
            "shards": {"replicas": 2, **ps},
            "workers": {"replicas": 1, "template": template},
            "checkpoint": MANY_NODES,
        },
    }


def _pods(namespace: str, template: Template, ps: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pods of shard 0 and of the worker."""
    job, problems = validate_job(_job(namespace, template, ps))
    assert job is not None, [str(problem) for problem in problems]
    pods = [document for document in documents(job, "psjob-runtime:test") if document["kind"] == "Pod"]
    return pods[0], pods[-1]


def _made(cluster: Cluster, pod: dict[str, Any]) -> dict[str, Any]:
    """The pod as the API server would store it."""
    path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods?dryRun=All&fieldValidation=Strict"
    try:
        made = cluster.api.call("POST", path, pod)
    except ApiError as error:
        raise AssertionError(f"{json.dumps(pod['spec'])[:2000]}: {error}") from error
    return _nameless(dict(made))


def _nameless(made: dict[str, Any]) -> dict[str, Any]:
    """The token's volume under a name that is not drawn."""
    drawn = [volume["name"] for volume in made["spec"].get("volumes", []) if volume["name"].startswith(TOKEN)]
    found: dict[str, Any] = json.loads(json.dumps(made).replace(drawn[0], TOKEN)) if drawn else made
    return found


def _bare(namespace: str, template: Template, made: Mapping[str, Any]) -> dict[str, Any]:
    """A pod of the template, with the defaults that are psjob's."""
    pod = copy.deepcopy(template)
    pod["metadata"] = {**pod.get("metadata", {}), "name": "bare", "namespace": namespace}
    shared = {key: value for key, value in made["metadata"]["labels"].items() if key.startswith("app.kubernetes.io/")}
    pod["metadata"]["labels"] = shared | pod["metadata"].get("labels", {})
    defaults = {"restartPolicy": "Never", "automountServiceAccountToken": False, "enableServiceLinks": False}
    pod["spec"] = defaults | pod["spec"]
    pod["spec"]["containers"][0].setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    return pod


def _without_ours(pod: Mapping[str, Any], trained: str) -> dict[str, Any]:
    """The pod without what psjob adds to each."""
    made = copy.deepcopy(dict(pod))
    spec, metadata = made["spec"], made["metadata"]
    for word in ("hostname", "subdomain"):
        assert spec.pop(word)
    for word in ("volumes", "initContainers"):
        spec[word] = [item for item in spec.get(word, []) if not item["name"].startswith("psjob-")]
    container = next(item for item in spec["containers"] if item["name"] == trained)
    container["env"] = [item for item in container["env"] if not item["name"].startswith("PSJOB_")]
    container["volumeMounts"] = [item for item in container["volumeMounts"] if not item["name"].startswith("psjob-")]
    assert container["command"][:4:3] == ["/psjob/bin/sh", "psjob"]
    container["command"] = container["command"][4:]
    for word in ("labels", "annotations"):
        metadata[word] = {key: value for key, value in metadata[word].items() if not key.startswith("psjob.dev/")}
    metadata["annotations"].pop("kubectl.kubernetes.io/default-container")
    return made


def _apply(cluster: Cluster, namespace: str, name: str, manager: str, template: Mapping[str, Any], more: str = "") -> dict[str, Any]:
    """Server-side apply of a PodTemplate, which is the API's own pod template and can be laid over."""
    metadata = {key: value for key, value in template.get("metadata", {}).items() if key in ("labels", "annotations", "finalizers")}
    body = {
        "apiVersion": "v1",
        "kind": "PodTemplate",
        "metadata": {"name": name},
        "template": {"metadata": metadata, "spec": template.get("spec", {})},
    }
    path = f"/api/v1/namespaces/{namespace}/podtemplates/{name}?fieldManager={manager}&force=true&fieldValidation=Strict{more}"
    answer = cluster.api.call("PATCH", path, body, "application/apply-patch+yaml")
    return dict(answer["template"])


def _documented(
    merged: dict[str, Any], own: Mapping[str, Any], over: Mapping[str, Any], made: Mapping[str, Any]
) -> dict[str, Any]:  # fmt: skip
    """The pod that server-side apply makes, with the differences that docs/operations.md names: tolerations, affinity, no powers."""
    spec, given = merged["spec"], over.get("spec", {})
    named = {toleration.get("key") for toleration in given.get("tolerations", [])}
    kept = [toleration for toleration in own["spec"]["tolerations"] if toleration["key"] in LOST and toleration["key"] not in named]
    spec["tolerations"] = [*kept, *given.get("tolerations", [])]
    for kind in ("podAffinity", "podAntiAffinity"):
        for when in ("required", "preferred"):
            terms = [
                (it.get("affinity") or {}).get(kind, {}).get(f"{when}DuringSchedulingIgnoredDuringExecution", [])
                for it in (own["spec"], given)
            ]
            if any(terms):
                spec["affinity"][kind][f"{when}DuringSchedulingIgnoredDuringExecution"] = [*terms[0], *terms[1]]
    for container in (*spec.get("initContainers", []), *spec["containers"]):
        container["securityContext"] = {**container.get("securityContext", {}), **POWERLESS}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**merged["metadata"], "name": "merged", "namespace": made["metadata"]["namespace"]},
        "spec": spec,
    }


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """If two pods differ, apart from what each object has of its own; lists with keys are compared by them."""
    left, right = _plain(one), _plain(other)
    return [f"{at}: {left.get(at)!r} is not {right.get(at)!r}" for at in sorted({*left, *right}) if left.get(at) != right.get(at)]


def _plain(pod: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {word: pod["metadata"].get(word) or None for word in ("labels", "annotations", "finalizers")}
    return dict(_leaves({"metadata": metadata, "spec": pod["spec"]}, "", ""))


def _leaves(value: Any, at: str, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{at}.{key}".removeprefix("."), f"{path}.{key}".removeprefix("."))
    elif isinstance(value, list) and value:
        keys = KEYED.get(path, ())
        names = ["/".join(str(item[key]) for key in keys) if keys else "" for item in value]
        for number, item in enumerate(value):
            # The second of one name is another item than the first.
            yield from _leaves(item, f"{at}[{names[number]}#{names[:number].count(names[number])}]", f"{path}[]")
    elif value not in (None, [], {}):
        yield at, value


Template = dict[str, Any]
HOSTNAME, ZONE = "kubernetes.io/hostname", "topology.kubernetes.io/zone"
MINE = {"labelSelector": {"matchLabels": {"app.kubernetes.io/name": "digits"}}}
TERMS = [{"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["a100", "h100"]}]}]


def of_pod(**spec: Any) -> Template:
    """A part of the pod."""
    return {"spec": spec}


def of_container(name: str, **fields: Any) -> Template:
    """A part of the container that trains or serves; it brings the volume that it mounts."""
    mounted = {"volumes": [{"name": "data", "emptyDir": {}}]} if "volumeMounts" in fields else {}
    return {"spec": {"containers": [{"name": name, **fields}], **mounted}}


def volume(**source: Any) -> Template:
    """A volume of that source."""
    return of_pod(volumes=[{"name": f"of-{next(iter(source)).lower()}", **source}])


def affinity(**kinds: Any) -> Template:
    """Affinity of the pod."""
    return of_pod(affinity=kinds)


def spread(*constraints: tuple[str, str]) -> Template:
    """Constraints by topology key and what holds if they cannot be met."""
    return of_pod(
        topologySpreadConstraints=[{"maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": when, **MINE} for key, when in constraints]
    )


def init(name: str, **fields: Any) -> Template:
    """A container that runs before, or beside."""
    return of_pod(initContainers=[{"name": name, "image": "busybox:1", **fields}])


def parts(name: str) -> dict[str, Template]:
    """Every part by its name; `name`: of the container that trains or serves."""
    required, preferred = "requiredDuringSchedulingIgnoredDuringExecution", "preferredDuringSchedulingIgnoredDuringExecution"
    term = {"topologyKey": ZONE, **MINE}
    http = {"httpGet": {"path": "/ready", "port": 9090}}
    items = [{"key": "a", "path": "b", "mode": 0o400}]
    projected = [
        {"serviceAccountToken": {"path": "token", "audience": "vault", "expirationSeconds": 3600}},
        {"configMap": {"name": "a", "items": items}},
        {"secret": {"name": "b", "optional": True}},
        {"downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
    ]
    two = [{"name": "quic", "containerPort": 9443, "protocol": "UDP"}, {"name": "https", "containerPort": 9443, "protocol": "TCP"}]
    reference = [
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "CPUS", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1m"}}},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token", "optional": True}}},
        {"name": "AT", "value": "$(NODE)"},
    ]
    chart = {"app.kubernetes.io/name": "digits", "app.kubernetes.io/managed-by": "Helm", "helm.sh/chart": "digits-1.2.3"}
    return {
        "labels of a chart": {"metadata": {"labels": chart}},
        "annotations": {"metadata": {"annotations": {"prometheus.io/scrape": "true", "checksum/config": "0" * 64}}},
        "finalizers": {"metadata": {"finalizers": ["example.com/keep"]}},
        "node selector": of_pod(nodeSelector={"kubernetes.io/arch": "amd64", "pool": "gpu"}),
        "node affinity": affinity(nodeAffinity={required: {"nodeSelectorTerms": TERMS}}),
        "node affinity preferred": affinity(nodeAffinity={preferred: [{"weight": 10, "preference": TERMS[0]}]}),
        "pod affinity": affinity(podAffinity={required: [term]}),
        "anti-affinity": affinity(podAntiAffinity={required: [{"topologyKey": HOSTNAME, **MINE}]}),
        "anti-affinity preferred": affinity(podAntiAffinity={preferred: [{"weight": 100, "podAffinityTerm": term}]}),
        "affinity by keys": affinity(podAffinity={required: [term | {"matchLabelKeys": ["pod-template-hash"]}]}),
        "spread over nodes": spread((HOSTNAME, "DoNotSchedule")),
        "spread twice over nodes": spread((HOSTNAME, "DoNotSchedule"), (HOSTNAME, "ScheduleAnyway")),
        "spread over zones": spread((ZONE, "ScheduleAnyway"), (HOSTNAME, "ScheduleAnyway")),
        "tolerations": of_pod(tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]),
        "toleration of a lost node": of_pod(
            tolerations=[{"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 900}]
        ),
        "toleration of everything": of_pod(tolerations=[{"operator": "Exists"}]),
        "two ports of one number": of_container(name, ports=two),
        "a port of the data's number": of_container(name, ports=[{"name": "gossip", "containerPort": 7070, "protocol": "UDP"}]),
        "a port of a host": of_container(name, ports=[{"containerPort": 9100, "hostPort": 9100, "hostIP": "127.0.0.1"}]),
        "readiness": of_container(name, readinessProbe=http),
        "a hook at the start": of_container(name, lifecycle={"postStart": {"httpGet": {"path": "/started", "port": 9090}}}),
        "a hook at the end": of_container(name, lifecycle={"preStop": {"exec": {"command": ["sleep", "5"]}}}),
        "references": of_container(name, env=reference),
        "variables from elsewhere": of_container(
            name, envFrom=[{"configMapRef": {"name": "c"}}, {"prefix": "S_", "secretRef": {"name": "s"}}]
        ),
        "resources": of_container(name, resources={"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"cpu": 2, "memory": "4Gi"}}),
        "storage of the node": of_container(
            name, resources={"requests": {"ephemeral-storage": "1Gi"}, "limits": {"ephemeral-storage": "2Gi"}}
        ),
        "mount of a part": of_container(name, volumeMounts=[{"name": "data", "mountPath": "/data", "subPath": "a", "readOnly": True}]),
        "mount by expression": of_container(
            name,
            env=[{"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
            volumeMounts=[{"name": "data", "mountPath": "/logs", "subPathExpr": "$(POD)"}],
        ),
        "mount that propagates": of_container(
            name, volumeMounts=[{"name": "data", "mountPath": "/x", "mountPropagation": "HostToContainer"}]
        ),
        "message elsewhere": of_container(name, terminationMessagePath="/dev/shm/end", terminationMessagePolicy="File"),
        "terminal": of_container(name, stdin=True, tty=True),
        "pull always": of_container(name, imagePullPolicy="Always"),
        "user of the container": of_container(name, securityContext={"runAsUser": 1001, "runAsNonRoot": True}),
        "memory": volume(emptyDir={"medium": "Memory", "sizeLimit": "8Gi"}),
        "config map": volume(configMap={"name": "c", "items": items, "defaultMode": 0o440}),
        "secret": volume(secret={"secretName": "s", "optional": True}),
        "projected": volume(projected={"sources": projected}),
        "downward": volume(downwardAPI={"items": [{"path": "cpu", "resourceFieldRef": {"containerName": name, "resource": "limits.cpu"}}]}),
        "claim": volume(persistentVolumeClaim={"claimName": "data", "readOnly": True}),
        "claim of the pod": volume(
            ephemeral={
                "volumeClaimTemplate": {
                    "metadata": {"labels": {"a": "b"}},
                    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
                }
            }
        ),
        "csi": volume(csi={"driver": "secrets-store.csi.k8s.io", "readOnly": True, "volumeAttributes": {"secretProviderClass": "v"}}),
        "nfs": volume(nfs={"server": "nfs.example.com", "path": "/"}),
        "init container": init("fetch", command=["sh", "-c", "true"]),
        "native sidecar": init("logs", restartPolicy="Always", ports=[{"containerPort": 2020}], startupProbe=http),
        "sidecar": of_pod(
            containers=[{"name": name}, {"name": "metrics", "image": "exporter:1", "ports": [{"containerPort": 9400, "name": "gpu"}]}]
        ),
        "sidecar with probes": of_pod(
            containers=[{"name": name}, {"name": "proxy", "image": "envoy:1", "livenessProbe": {"tcpSocket": {"port": 15021}}}]
        ),
        "host aliases": of_pod(hostAliases=[{"ip": "10.0.0.9", "hostnames": ["registry", "cache"]}]),
        "dns": of_pod(dnsConfig={"nameservers": ["10.0.0.10"], "searches": ["example.com"], "options": [{"name": "ndots", "value": "2"}]}),
        "host network": of_pod(hostNetwork=True, dnsPolicy="ClusterFirstWithHostNet"),
        "runtime class and overhead": of_pod(runtimeClassName="sandbox", overhead={"cpu": "250m", "memory": "120Mi"}),
        "priority": of_pod(priorityClassName="system-cluster-critical"),
        "scheduler": of_pod(schedulerName="volcano"),
        "gates": of_pod(schedulingGates=[{"name": "example.com/wait"}]),
        "readiness gates": of_pod(readinessGates=[{"conditionType": "example.com/ready"}]),
        "pull secrets": of_pod(imagePullSecrets=[{"name": "hub"}, {"name": "mirror"}]),
        "service account": of_pod(serviceAccountName="default", automountServiceAccountToken=True),
        "service links": of_pod(enableServiceLinks=True),
        "grace": of_pod(terminationGracePeriodSeconds=600),
        "deadline": of_pod(activeDeadlineSeconds=86400),
        "one process table": of_pod(shareProcessNamespace=True),
        "user of the pod": of_pod(securityContext={"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 2000, "supplementalGroups": [7, 8]}),
        "device claims": of_pod(resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]),
        "system": of_pod(os={"name": "linux"}),
    }


def templates(name: str, count: int) -> dict[str, Template]:
    """`count` templates by name: each part by itself, then pairs and triples of parts, always the same ones."""
    single = parts(name)
    names = list(single)
    whole = [(one,) for one in names]
    whole += [(names[at], names[(at * 7 + 11) % len(names)], names[(at * 13 + 29) % len(names)]) for at in range(len(names))]
    whole += list(itertools.pairwise(names))
    made: dict[str, Template] = {}
    for chosen in whole:
        if len(made) == count:
            break
        if len(set(chosen)) == len(chosen):
            made[" + ".join(chosen)] = _together([single[one] for one in chosen])
    return made


def _together(chosen: list[Mapping[str, Any]]) -> Template:
    made: Template = {}
    for part in chosen:
        made = merge_templates(made, copy.deepcopy(dict(part)))
    return made
