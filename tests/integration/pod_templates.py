"""Pod templates in the shapes that public charts have: small parts, each legal by itself, and pods made of one to three of them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any

from psjob_operator.render.shard import merge_templates

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
