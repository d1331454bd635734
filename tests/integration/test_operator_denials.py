"""Admission that says no for a while: a job waits, says whose words these are, goes on when they are taken back, and counts nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.integration import denying
from tests.integration.operator_harness import World, manifest

pytestmark = [pytest.mark.integration, pytest.mark.cluster]
AGAIN_SECONDS = 15.0
"""From the end of the denial to the pod that was denied."""
Denial = Callable[[World, list[str], Path], AbstractContextManager[None]]
DENIALS: dict[str, tuple[Denial, str]] = {
    "policy": (lambda place, jobs, folder: denying.policy(place, jobs), "nothing new today"),
    "webhook without a code": (lambda place, jobs, folder: denying.webhook(place, jobs, folder, 0), "not from our registry"),
    "webhook 403": (lambda place, jobs, folder: denying.webhook(place, jobs, folder, 403), "not from our registry"),
    "webhook 500": (lambda place, jobs, folder: denying.webhook(place, jobs, folder, 500), "not from our registry"),
    "webhook away": (lambda place, jobs, folder: denying.webhook(place, jobs, folder, None), "failed calling webhook"),
    "quota": (lambda place, jobs, folder: denying.quota(place, jobs), "exceeded quota"),
}


@pytest.mark.parametrize("how", DENIALS)
def test_a_denial_that_passes_costs_nothing_but_its_time(place: World, node: str, name: str, tmp_path: Path, how: str) -> None:
    """At the first creation, at a worker's restart and at a shard's."""
    new, worker, shard = (f"{name}-{what}" for what in ("new", "worker", "shard"))
    for job in (worker, shard):
        place.create(manifest(job))
        place.run(f"{job}-ps-0-a1", f"{job}-worker-0-r1", f"{job}-worker-1-r1", node=node)
        place.until_phase("Running", job)
    deny, words = DENIALS[how]
    wanted = {new: f"{new}-ps-0-a1", worker: f"{worker}-worker-1-r2", shard: f"{shard}-ps-0-a2"}
    with deny(place, [new, worker, shard], tmp_path):
        place.create(manifest(new))
        place.remove(f"{worker}-worker-1-r1")
        place.remove(f"{shard}-ps-0-a1")
        for job in wanted:
            place.until(f"{job} to tell why it waits", lambda job=job: words in str(place.conditions(job).get("Ready", {}).get("message")))
        phases = {job: place.status(job)["phase"] for job in wanted}
        assert phases == {new: "Pending", worker: "Recovering", shard: "Recovering"}
        assert not set(wanted.values()) & set(place.pods())
        time.sleep(4)
        assert {job: place.status(job)["phase"] for job in wanted} == phases
    for job, pod in wanted.items():
        place.until(f"{pod} to be made", lambda pod=pod: pod in place.pods(), AGAIN_SECONDS)
        restarts = place.status(job).get("restarts", {})
        assert restarts.get("counted", 0) == 0 and restarts.get("total", 0) == (0 if job == new else 1), restarts
