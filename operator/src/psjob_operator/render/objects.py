"""What stands around the pods: the headless Service, the config, the checkpoint claim, NetworkPolicies; and the labels of all.

Of a NetworkPolicy only what it lets in is restricted: who may open connections to a run's shards and workers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from psjob_operator.api.claim_template import ONE, claim_metadata, claim_spec, retained
from psjob_operator.contract import CONFIG_FORMAT, DATA_PORT, GROUP, KIND, STATUS_PORT, VERSION
from psjob_operator.plan import objects
from psjob_operator.plan.actions import Beside
from psjob_operator.plan.objects import ConfigSource, cluster_config, config_digest, config_text
from psjob_operator.plan.observed_state import Role

LABEL_JOB = f"{GROUP}/job-name"
LABEL_RUN = f"{GROUP}/run"
LABEL_ROLE = f"{GROUP}/role"
"""`shard` or `worker`."""
LABEL_INDEX = f"{GROUP}/index"
LABEL_NUMBER = f"{GROUP}/number"
"""Attempt of a shard, start of a worker."""
LABEL_ATTEMPT = f"{GROUP}/attempt"
LABEL_START = f"{GROUP}/start"
LABEL_TERM = f"{GROUP}/term"
LABEL_STAGE = f"{GROUP}/stage"
"""Of a worker: the name of its stage, where the model is cut in stages."""
LABEL_PAIR = f"{GROUP}/pair"
"""Of a shard and a worker that mount one volume: its number (CreateProcess.pair)."""
LABEL_VOLUME_GROUP = f"{GROUP}/placement"
"""Of a shard: the number that those who share a volume have in common."""
ANNOTATION_CONTAINER = f"{GROUP}/container"
"""Of a pod: the container whose end is the process's end, whatever stands before it."""
ANNOTATION_WAITED = f"{GROUP}/waited-seconds"
"""Of a pod: for how long its start was held back (plan/restarts.py); absent means not at all."""
ANNOTATION_DEFAULT = "kubectl.kubernetes.io/default-container"
"""What `kubectl logs` and `kubectl exec` take where no container is named."""
LABEL_DIGEST = f"{GROUP}/digest"
"""Of the ConfigMap: names its content."""
HOSTNAME = "kubernetes.io/hostname"
"""Of a node: its name, by which pods are put on the same one or on others."""

Document = dict[str, Any]


CONFIG_FILE = "config.json"
PAIR_STORAGE = "1Mi"
"""Of a pair's volume; a provisioner makes more of it where it has a least size."""
Peer = Mapping[str, Any]
"""A NetworkPolicyPeer of networking.k8s.io/v1."""
_PEER = frozenset({"podSelector", "namespaceSelector", "ipBlock"})
_DECIDES = ("podSelector", "policyTypes", "ingress")


def labels(job: ConfigSource, component: str) -> dict[str, str]:
    """Labels that every child has. Nothing of the job's own metadata is copied: tools would take the child for what it is not."""
    return {
        "app.kubernetes.io/name": "psjob",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/managed-by": "psjob-operator",
        LABEL_JOB: job.name,
        LABEL_RUN: job.uid,
    }


def metadata(job: ConfigSource, name: str, own_labels: dict[str, str], owned: bool = True) -> Document:
    """ObjectMeta of a child; owned by the job unless it outlives it."""
    made: Document = {"name": name, "namespace": job.namespace, "labels": own_labels}
    if owned:
        made["ownerReferences"] = [
            {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": KIND,
                "name": job.name,
                "uid": job.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
    return made


def run_of(job: ConfigSource) -> dict[str, str]:
    """Selector of this run's pods; those of an earlier job of the same name are left out."""
    return {LABEL_JOB: job.name, LABEL_RUN: job.uid}


def pods_of(job: ConfigSource, role: Role) -> dict[str, str]:
    """Selector of this run's shards or workers."""
    return {**run_of(job), LABEL_ROLE: role}


def beside(job: ConfigSource, other: Beside) -> Document:
    """Affinity of a pod that requires the node of this very process; one before or after it does not match."""
    number = {LABEL_INDEX: str(other.index), LABEL_NUMBER: str(other.number)}
    term = {"labelSelector": {"matchLabels": {**pods_of(job, other.role), **number}}, "topologyKey": HOSTNAME}
    return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def service(job: ConfigSource) -> Document:
    """The headless Service under which shards are found, also before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job, objects.service_name(job.name), labels(job, "shard")),
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": pods_of(job, "shard"),
            "ports": [
                {"name": "data", "port": DATA_PORT, "targetPort": DATA_PORT, "protocol": "TCP"},
                {"name": "status", "port": STATUS_PORT, "targetPort": STATUS_PORT, "protocol": "TCP"},
            ],
        },
    }


def resolves(spec: Mapping[str, Any]) -> str:
    """Short name of what a Service's spec makes of its name. Fields that the API server adds do not count."""
    ports = [{key: port.get(key) for key in ("name", "port", "targetPort", "protocol")} for port in spec.get("ports") or ()]
    decides = {key: spec.get(key) for key in ("type", "clusterIP", "publishNotReadyAddresses", "selector")} | {"ports": ports}
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


def config(job: ConfigSource, config_format: int = CONFIG_FORMAT, encryption: str = "auto", resumed_from: str | None = None) -> Document:
    """The ConfigMap that every process of the job mounts."""
    content = cluster_config(job, config_format, encryption, resumed_from)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, objects.config_name(job.name), {**labels(job, "config"), LABEL_DIGEST: config_digest(content)}),
        "data": {CONFIG_FILE: config_text(content)},
    }


def claim(job: ConfigSource) -> Document:
    """The claim for checkpoints, of `checkpoint.volumeClaimTemplate`. One that outlives the job has no owner."""
    template = job.spec.checkpoint.volume_claim_template
    given, annotations = claim_metadata(template)
    own = labels(job, "checkpoints")
    # The names by which people group objects are the template's to give, as in a pod's; psjob finds the claim by its own.
    shared = {**own, **given, **{key: value for key, value in own.items() if key.startswith(f"{GROUP}/")}}
    made = metadata(job, objects.claim_name(job.name), shared, owned=not retained(job.spec.checkpoint))
    if annotations:
        made["annotations"] = annotations
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": made, "spec": claim_spec(template)}


def pair_claim(job: ConfigSource, index: int, number: int) -> Document:
    """The claim of the volume that worker and shard of this index both mount. It holds a socket, so any size will do."""
    name, storage_class = objects.pair_claim_name(job.name, job.uid, index, number), job.spec.shards.pair_storage_class_name
    made = metadata(job, name, {**labels(job, "pair"), LABEL_INDEX: str(index), LABEL_PAIR: str(number)})
    spec = {"accessModes": [ONE], "resources": {"requests": {"storage": PAIR_STORAGE}}, "storageClassName": storage_class}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": made, "spec": spec}


def policy(job: ConfigSource, role: Role, askers: Sequence[Peer]) -> Document:
    """Shards take connections of the run on their data port, and of `askers` on their status port. Workers take those of the run."""
    run = {"from": [{"podSelector": {"matchLabels": run_of(job)}}]}
    # Who is on its node's network comes from the node's address, which no selector of pods finds.
    on_nodes = any((template.get("spec") or {}).get("hostNetwork") for template in job.spec.worker_templates().values())
    data = {} if on_nodes else run
    ingress = [{**data, **_port(DATA_PORT)}, {"from": list(askers), **_port(STATUS_PORT)}] if role == "shard" else [run]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(job, objects.policy_name(job.name, role), labels(job, role)),
        "spec": {"podSelector": {"matchLabels": pods_of(job, role)}, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def policy_rules(spec: Mapping[str, Any]) -> str:
    """Short name of what a policy's spec lets in. Fields that change nothing of that do not count."""
    decides = {key: spec.get(key) for key in _DECIDES}
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


def peer_of(text: str) -> Peer:
    """The peer that this JSON says, without the empty lists that the API server would leave out. Raises ValueError, which says why."""
    try:
        said = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is not JSON ({error})") from None
    if not isinstance(said, dict) or not said or not set(said) <= _PEER or not all(isinstance(part, dict) for part in said.values()):
        raise ValueError(f"must be an object with at least one of {', '.join(sorted(_PEER))}, each an object")
    return {key: {name: value for name, value in part.items() if value not in ([], {})} for key, part in said.items()}


def _port(number: int) -> Document:
    return {"ports": [{"protocol": "TCP", "port": number}]}
