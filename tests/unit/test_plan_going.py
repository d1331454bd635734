"""Pods that are going: an ended one that somebody keeps holds up neither a suspension nor a resume, and who keeps it is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from psjob_operator.plan.observed_state import ObservedState, Process
from psjob_operator.plan.plan import plan
from tests.unit.plan_given import NOW, ended, job, names, pod, running, said

KEPT = ("example.com/keep",)


def suspended(*left: Process, wanted: bool | None = True) -> ObservedState:
    """A job that is to be suspended, of which these pods are left."""
    up = running()
    asked = plan(replace(up, spec=job(suspend=True).spec), NOW - 60)
    return replace(up, spec=job(suspend=wanted).spec, status=asked.status, processes=left)


STUCK = pod("shard", 0, **ended(1), deleting=NOW - 50, finalizers=KEPT)
GOING = pod("shard", 0, **ended(0), deleting=NOW - 1)
ALIVE = pod("worker", 1, deleting=NOW - 50, node="n1")
HELD = pod("worker", 1, deleting=NOW - 50, node="n1", finalizers=KEPT)
SIDECAR = pod("worker", 1, **ended(0), deleting=NOW - 50, lingering=True, node="n1")


@pytest.mark.parametrize(
    ("left", "phase", "words"),
    [
        ((), "Suspended", "last checkpoint"),
        ((STUCK,), "Suspended", "pod job-ps-0-a1 has ended and is kept by its finalizer example.com/keep"),
        ((GOING,), "Suspended", "last checkpoint"),
        ((STUCK, ALIVE), "Running", "pod job-worker-1-r1 was to end by "),
        ((ALIVE,), "Running", "node n1 has not said that it ended"),
        ((HELD,), "Running", "kept by its finalizer example.com/keep"),
        ((SIDECAR,), "Running", "node n1 has not said that it ended"),
        ((replace(ALIVE, deleting=NOW + 20),), "Running", "make a last checkpoint and end"),
    ],
)
def test_what_still_runs_is_waited_for_and_named(left: tuple[Process, ...], phase: str, words: str) -> None:
    decided = plan(suspended(*left), NOW)
    assert decided.status.phase == phase and words in said(decided.status)["Ready"].message


def test_a_pod_that_was_not_told_to_go_is_told_though_it_has_ended() -> None:
    decided = plan(suspended(replace(STUCK, deleting=None)), NOW)
    assert decided.status.phase == "Running" and [action.name for action in decided.actions if hasattr(action, "uid")] == ["job-ps-0-a1"]


def test_who_is_late_is_named_at_its_time() -> None:
    decided = plan(suspended(replace(ALIVE, deleting=NOW + 20)), NOW)
    assert decided.wake_at is not None and NOW + 20 < decided.wake_at <= NOW + 60
    told = plan(replace(suspended(replace(ALIVE, deleting=NOW + 20)), status=decided.status), decided.wake_at)
    assert "was to end by" in said(told.status)["Ready"].message


@pytest.mark.parametrize("left", [(STUCK,), (STUCK, GOING), (pod("worker", 1, **ended(143), deleting=NOW - 9, finalizers=KEPT),)])
def test_a_job_is_resumed_beside_ended_pods_that_somebody_keeps(left: tuple[Process, ...]) -> None:
    down = plan(suspended(*left), NOW)
    assert down.status.phase == "Suspended"
    resumed = plan(replace(suspended(*left, wanted=None), status=down.status), NOW + 1)
    assert {"job-ps-0-a2", "job-worker-1-r2"} <= set(names(resumed))
    at_once = plan(suspended(*left, wanted=None), NOW)
    assert {"job-ps-0-a2", "job-worker-1-r2"} <= set(names(at_once)), "before it was seen to be Suspended too"
