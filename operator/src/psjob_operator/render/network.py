"""Who may open connections to the pods of a run: a NetworkPolicy for its shards and one for its workers. What they open is left alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from psjob_operator.contract import DATA_PORT, STATUS_PORT
from psjob_operator.plan import naming
from psjob_operator.plan.config import ConfigSource
from psjob_operator.plan.snapshot import Role
from psjob_operator.render.names import Document, labels, metadata, pods_of, run_of

Peer = Mapping[str, Any]
"""A NetworkPolicyPeer of networking.k8s.io/v1."""
_PEER = frozenset({"podSelector", "namespaceSelector", "ipBlock"})
_DECIDES = ("podSelector", "policyTypes", "ingress")


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
        "metadata": metadata(job, naming.policy(job.name, role), labels(job, role)),
        "spec": {"podSelector": {"matchLabels": pods_of(job, role)}, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def rules(spec: Mapping[str, Any]) -> str:
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
