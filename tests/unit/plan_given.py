"""Snapshots for the planner's tables, in few words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from psjob_operator.api.status import Condition, JobStatus, Pinned
from psjob_operator.plan import objects as naming
from psjob_operator.plan.actions import CreateProcess, DeleteProcess, Plan
from psjob_operator.plan.objects import cluster_config, config_digest
from psjob_operator.plan.observed_state import Claim, Exit, Objects, ObservedState, Process
from psjob_operator.plan.plan import plan
from tests.simulation.world import make_spec

NOW = 1_000_000.0
UID = "run-1"


def job(**overrides: Any) -> ObservedState:
    """A job that nobody has seen; keys that a spec has are laid over the spec, the others over the snapshot."""
    fields = {"shards", "workers", "stages", "training", "checkpoint", "runPolicy", "suspend", "managedBy", "injection"}
    spec = make_spec(**{key: value for key, value in overrides.items() if key in fields})
    rest = {key: value for key, value in overrides.items() if key not in fields}
    base = ObservedState("job", "ns", UID, 1, "1", NOW - 100, spec, None, live=True)
    objects = Objects(
        service=True, config_digest=config_digest(cluster_config(base)), claim=Claim("job-checkpoints", ours=True, bound=True)
    )
    return replace(base, **{"objects": objects, **rest})


def pod(role: str, index: int, number: int = 1, **overrides: Any) -> Process:
    """A running pod; a shard serves."""
    assert role in ("shard", "worker")
    kind = "shard" if role == "shard" else "worker"
    name = naming.process_name("job", "shard" if role == "shard" else "worker", index, number)
    made = Process(
        name,
        f"uid-{name}",
        kind,
        index,
        number,
        UID,
        "Running",
        created=NOW - 90,
        ready=True,
        started=NOW - 80,
        scheduled=NOW - 85,  # type: ignore[arg-type]
    )
    return replace(made, **overrides)


def ended(code: int, reason: str = "Error", **words: Any) -> dict[str, Any]:
    """Overrides for `pod`: its container ended so."""
    exit = Exit(code, reason="Completed" if code == 0 else reason, **words)
    return {"phase": "Succeeded" if code == 0 else "Failed", "ready": False, "exit": exit}


def running(snapshot: ObservedState | None = None, **changes: Process | None) -> ObservedState:
    """The job in full swing: everything up and stored so. `shard_1=…`, `worker_0=None` put another pod, or none, into a seat."""
    snapshot = snapshot or job()
    first = replace(snapshot, spec=snapshot.spec.model_copy(update={"suspend": None}))
    begun = plan(first, NOW - 100)
    seats = {f"{it.role}_{it.index}": pod(it.role, it.index) for it in begun.actions if isinstance(it, CreateProcess)}
    up = replace(first, status=begun.status, processes=tuple(seats.values()))
    stored = plan(up, NOW - 50).status
    assert stored.phase == "Running", stored
    left = [it for it in {**seats, **changes}.values() if it is not None]
    return replace(snapshot, status=stored, processes=tuple(left))


def names(decided: Plan) -> list[str]:
    """Names of the processes to create."""
    return [action.name for action in decided.actions if isinstance(action, CreateProcess)]


def deleted(decided: Plan) -> list[str]:
    """Names of the processes to delete."""
    return [action.name for action in decided.actions if isinstance(action, DeleteProcess)]


def pinned_of(status: JobStatus | None) -> Pinned:
    """What the run of this status is pinned to."""
    return (status.internal.pinned if status is not None else None) or Pinned()


def with_internal(status: JobStatus, **changes: Any) -> JobStatus:
    """The status with these fields of `internal` changed."""
    return status.model_copy(update={"internal": status.internal.model_copy(update=changes)})


def said(status: JobStatus) -> dict[str, Condition]:
    """Conditions by type."""
    return {condition.type: condition for condition in status.conditions}


def stands(status: JobStatus) -> dict[str, str]:
    """Conditions as the table of the design writes them, CheckpointReady apart."""
    return {it.type: it.status for it in status.conditions if it.type != "CheckpointReady"}


def after(snapshot: ObservedState, decided: Plan, now: float | None = None) -> Plan:
    """What is decided once the status is stored and nothing else has happened."""
    return plan(replace(snapshot, status=decided.status, granted=snapshot.granted | decided.grants), NOW if now is None else now)
