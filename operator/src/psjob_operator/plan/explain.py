"""One failure in words: container, code, limits and the last of the log."""

from __future__ import annotations

from typing import Any

from psjob_operator.api.template import SERVING, TRAINED, container_of
from psjob_operator.plan.facts import Facts, Seat
from psjob_operator.plan.words import short


def explain(facts: Facts, seat: Seat, failures: int) -> str:
    """`container worker, memory limit 2Gi: exit code 137 (OOMKilled): …; failures: 2, spec.runPolicy.backoffLimit: 6`."""
    container = _container(facts, seat)
    name = container.get("name") or (SERVING if seat.role == "shard" else TRAINED)
    memory = ((container.get("resources") or {}).get("limits") or {}).get("memory")
    limit = f", memory limit {memory}" if memory and seat.fate.cause == "OOMKilled" else ""
    backoff = facts.snapshot.spec.run_policy.backoff_limit
    why = short(seat.fate.message or seat.fate.cause, 130)
    return f"container {name}{limit}: {why}; failures: {failures}, spec.runPolicy.backoffLimit: {backoff}"


def _container(facts: Facts, seat: Seat) -> dict[str, Any]:
    spec = facts.snapshot.spec
    if seat.role == "worker":
        return container_of(spec.workers.template, TRAINED) or {}
    return (container_of(spec.ps.template, SERVING) if spec.ps.template else None) or {}
