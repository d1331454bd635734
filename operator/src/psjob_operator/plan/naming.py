"""Names of everything that belongs to a job. Deterministic: a name is the lock that keeps a thing from being made twice."""

from __future__ import annotations

import re

from psjob_operator.plan.snapshot import Role


def process(job: str, role: Role, index: int, number: int) -> str:
    """Name of a pod: `<job>-ps-<i>-a<attempt>` or `<job>-worker-<i>-r<start>`."""
    return f"{job}-ps-{index}-a{number}" if role == "shard" else f"{job}-worker-{index}-r{number}"


def parse(job: str, name: str) -> tuple[Role, int, int] | None:
    """(role, index, number) of a name that `process` made for this job; None for any other."""
    found = re.fullmatch(r"-(?:ps-([0-9]+)-a|worker-([0-9]+)-r)([0-9]+)", name.removeprefix(job)) if name.startswith(job) else None
    if found is None:
        return None
    shard, worker, number = found.groups()
    return ("shard", int(shard), int(number)) if worker is None else ("worker", int(worker), int(number))


def host(job: str, role: Role, index: int) -> str:
    """Hostname of a pod; the same for every start, so that peers find the present one under it."""
    return f"{job}-ps-{index}" if role == "shard" else f"{job}-worker-{index}"


def service(job: str) -> str:
    """The headless Service under which shards are found."""
    return f"{job}-ps"


def address(job: str, index: int) -> str:
    """DNS name of a shard, as seen from a pod of the same namespace (the first entry of its search list completes it)."""
    return f"{host(job, 'shard', index)}.{service(job)}"


def key(job: str, run: str, number: int) -> str:
    """The Secret that holds the run's keys; `number`: of the key, from 1. It names the run, so that no later job takes it for its own."""
    return f"{job}-key-{run[:8]}-{number}"


def policy(job: str, role: Role) -> str:
    """The NetworkPolicy of the job's shards, or of its workers."""
    return f"{job}-{role}s"


def config(job: str) -> str:
    """The ConfigMap that holds the config file."""
    return f"{job}-config"


def claim(job: str) -> str:
    """The checkpoint claim that is made where the spec names no volume."""
    return f"{job}-checkpoints"
