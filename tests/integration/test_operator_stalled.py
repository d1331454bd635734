"""An edit that an older CRD takes and the operator refuses: nothing is created, and what ends, suspends or deletes a job goes on."""

from __future__ import annotations

import time

import pytest

from tests.integration import oldercrd
from tests.integration.operator_harness import World, manifest

pytestmark = pytest.mark.cluster


def test_stalled_means_no_creates_and_nothing_else(place: World, node: str, name: str) -> None:
    """lrScaling: linear goes with mode sync alone, and the mode of a running job may change."""
    paused, done, timed, mended = jobs = [f"{name}{what}" for what in ("paused", "done", "timed", "mended")]
    for job in jobs:
        place.create(manifest(job, training={"mode": "sync", "lrScaling": "linear"}, runPolicy={"ttlSecondsAfterFinished": 1}))
        place.run(f"{job}-ps-0-a1", f"{job}-worker-0-r1", f"{job}-worker-1-r1", node=node)
        place.until_phase("Running", job)
    with oldercrd.without_the_rule(place):
        for job in jobs:
            place.edit(job, training={"mode": "async"})
    for job in jobs:
        place.until(f"{job} to be Stalled", lambda job=job: place.conditions(job).get("Stalled", {}).get("reason") == "SpecInvalid")
        assert "lrScaling" in place.conditions(job)["Ready"]["message"] and place.status(job)["phase"] == "Running"
    # Nothing is created.
    for job in (paused, mended):
        place.remove(f"{job}-worker-1-r1")
    time.sleep(4)
    assert not [pod for pod in place.pods(name) if pod.endswith("-r2")]
    # Suspension, success with its TTL, and the deadline come all the same.
    place.edit(paused, suspend=True)
    place.until("the pods to be told to end", lambda: all(pod["metadata"].get("deletionTimestamp") for pod in place.pods(paused).values()))
    for pod in place.pods(paused):
        place.remove(pod)
    place.until_phase("Suspended", paused)
    for pod in ("worker-0-r1", "worker-1-r1", "ps-0-a1"):
        place.end(f"{done}-{pod}")
    place.edit(timed, runPolicy={"activeDeadlineSeconds": 1})
    for job in (done, timed):
        place.until(
            f"{job} to be deleted in its time", lambda job=job: job not in [it["metadata"]["name"] for it in place.items("pstrainingjobs")]
        )
    told = {
        event["involvedObject"]["name"]: event["reason"] for event in place.events() if event["reason"] in ("Completed", "DeadlineExceeded")
    }
    assert told == {done: "Completed", timed: "DeadlineExceeded"}
    # What the edit was taken back for goes on.
    place.edit(mended, training={"mode": "sync"})
    place.until("the lost worker", lambda: f"{mended}-worker-1-r2" in place.pods())
    assert "Stalled" not in place.conditions(mended)
