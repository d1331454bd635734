"""Exit code 0 of a process that was told to end: it has stopped, and its script may not be through."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from psjob_operator.plan.observed_state import ObservedState
from psjob_operator.plan.plan import plan
from tests.unit.plan_given import NOW, UID, ended, job, names, pod, running

TOLD: list[tuple[str, dict[str, Any], str]] = [
    ("deleted by hand", {"deleting": NOW + 30}, "Deleted"),
    ("deleted, and its pod is gone", {"deleting": NOW - 1, "gone": True}, "Deleted"),
    ("drained", {"deleting": NOW + 30, "pod_reason": "EvictionByEvictionAPI"}, "Drained"),
    ("preempted", {"deleting": NOW + 30, "pod_reason": "PreemptionByScheduler"}, "Preempted"),
    ("its node shuts down", {"pod_reason": "Terminated"}, "NodeShutdown"),
]


@pytest.mark.parametrize(("seen", "cause"), [row[1:] for row in TOLD], ids=[row[0] for row in TOLD])
def test_exit_0_after_it_was_told_to_end_is_no_success(seen: dict[str, Any], cause: str) -> None:
    decided = plan(running(worker_1=pod("worker", 1, **ended(0, at=NOW), **seen)), NOW + 60)
    assert decided.status.workers.succeeded_indexes == ""
    assert names(decided) == ["job-worker-1-r2"]
    assert decided.status.restarts.causes == {cause: 1} and decided.status.restarts.counted == 0


def told(state: str, rank: int = 1, run: str = UID) -> dict[str, Any]:
    return {"run": run, "coordinator": {"step": 9, "workers": [{"rank": rank, "clock": 9, "state": state, "start": 1}]}}


@pytest.mark.parametrize(
    ("progress", "through"),
    [
        (told("left"), True),
        (told("joined"), False),
        (told("lost"), False),
        (told("left", rank=0), False),
        (told("left", run="other"), False),
    ],
)
def test_shard_0_knows_who_was_through(progress: dict[str, Any], through: bool) -> None:
    leaving = pod("worker", 1, **ended(0), deleting=NOW + 30)
    decided = plan(replace(running(worker_1=leaving), progress=progress, progress_at=NOW), NOW)
    assert (decided.status.workers.succeeded_indexes == "1") == through
    assert bool(names(decided)) != through


def test_a_success_that_was_stored_before_stays_one() -> None:
    snapshot = running(worker_1=pod("worker", 1, **ended(0)))
    stored = plan(snapshot, NOW).status
    assert stored.workers.succeeded_indexes == "1"
    gone = pod("worker", 1, **ended(0), deleting=NOW, gone=True)
    later = plan(
        replace(snapshot, status=stored, processes=tuple(gone if it.name == gone.name else it for it in snapshot.processes)), NOW + 9
    )
    assert later.status.workers.succeeded_indexes == "1" and not names(later)


def test_shards_that_are_through_say_so_of_their_workers() -> None:
    over = {f"shard_{index}": pod("shard", index, **ended(0)) for index in (0, 1)}
    done = {f"worker_{index}": pod("worker", index, **ended(0), deleting=NOW + 30) for index in (0, 1, 2)}
    assert plan(running(**over, **done), NOW).status.phase == "Complete"
    assert plan(running(job(checkpoint={"disabled": True}), **over, **done), NOW).status.phase == "Complete"


def suspended(snapshot: ObservedState, wanted: bool | None) -> ObservedState:
    return replace(snapshot, spec=snapshot.spec.model_copy(update={"suspend": wanted}), generation=snapshot.generation + 1)


@pytest.mark.parametrize("which", [(0,), (0, 2), (0, 1, 2)])
def test_a_worker_that_a_suspension_ended_with_0_is_made_at_the_resumption(which: tuple[int, ...]) -> None:
    snapshot = suspended(running(), True)
    begun = plan(snapshot, NOW)
    leaving = tuple(
        replace(it, deleting=NOW + 30, **(ended(0, at=NOW + 1) if it.role == "worker" and it.index in which else ended(75)))
        for it in snapshot.processes
    )
    ending = plan(replace(snapshot, status=begun.status, processes=leaving), NOW + 2)
    assert ending.status.workers.succeeded_indexes == ""
    asleep = plan(replace(snapshot, status=ending.status, processes=()), NOW + 9)
    assert asleep.status.phase == "Suspended"
    resumed = plan(suspended(replace(snapshot, status=asleep.status, processes=()), None), NOW + 100)
    assert [name for name in names(resumed) if "worker" in name] == [f"job-worker-{index}-r2" for index in (0, 1, 2)]
