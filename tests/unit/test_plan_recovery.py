"""How long a recovery took and what it undid: from the loss to the first step after it, as status and an Event say it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from psjob_operator.api.status import LARGEST, JobStatus, stamp_exact
from psjob_operator.plan.observed_state import ObservedState
from psjob_operator.plan.plan import plan
from tests.unit.plan_given import NOW, ended, pod, running


def told(step: int, resumed: Any = None, mode: str = "sync", run: str = "run-1", **counts: int) -> dict[str, Any]:
    said = {"step": step, "mode": mode, "stepsLost": 0, "updatesLost": 0, "resumed": resumed, **counts}
    return {"run": run, "coordinator": said}


def first(view: int = 2, start: int = 1, age: float = 2.0, **other: Any) -> dict[str, Any]:
    return {"view": view, "start": start, "from": 100, "step": 101, "age": age, **other}


def instead(snapshot: ObservedState, name: str, role: str, index: int, **end: Any) -> ObservedState:
    """That process has ended."""
    return replace(snapshot, processes=tuple(pod(role, index, **end) if it.name == name else it for it in snapshot.processes))


def lost(mode: str = "sync") -> tuple[ObservedState, JobStatus]:
    """Shard 1 is killed while training is at step 125; the snapshot with its next process, and the status that raised its number."""
    up = replace(running(), progress=told(125, mode=mode), progress_at=NOW - 1)
    killed = instead(up, "job-shard-1-a1", "shard", 1, **ended(137, "OOMKilled"))
    raised = plan(killed, NOW + 0.25)
    again = replace(killed, status=raised.status, processes=(*killed.processes, pod("shard", 1, 2, created=NOW)))
    return again, raised.status


def test_an_interruption_is_stored_with_the_raise_and_asks_until_the_first_step() -> None:
    again, raised = lost()
    assert raised.interruption is not None
    assert raised.interruption.since == stamp_exact(NOW + 0.25) and raised.interruption.cause == "OOMKilled"
    assert (raised.interruption.step, raised.interruption.attempt) == (125, 1)
    decided = plan(replace(again, progress=told(100), progress_at=NOW + 5), NOW + 5)
    assert decided.status.phase == "Running" and decided.status.interruption == raised.interruption
    assert decided.want_progress, "a running job is asked at once, not in a minute"
    assert [event.reason for event in decided.events] == [], "Restarted has told of the loss, and Recovered will tell of the first step"


def test_the_first_step_after_the_loss_ends_it_with_an_event() -> None:
    again, _ = lost()
    up = plan(again, NOW + 5).status
    decided = plan(replace(again, status=up, progress=told(103, first(age=2.0), stepsLost=25), progress_at=NOW + 14.55), NOW + 14.6)
    last = decided.status.last_recovery
    assert decided.status.interruption is None and last is not None
    assert (last.cause, last.duration_seconds, last.steps_lost, last.updates_lost) == ("OOMKilled", 12.3, 25, None)
    assert decided.status.restarts.steps_lost == 25 and decided.status.restarts.total == 1
    (event,) = decided.events
    assert (event.type, event.reason) == ("Normal", "Recovered")
    assert event.message == "training continues 12.3 s after the loss was seen (OOMKilled), 25 steps done again"
    much = told(900, first(age=400.0), stepsLost=25)
    later = plan(replace(again, status=decided.status, progress=much, progress_at=NOW + 400), NOW + 400)
    assert later.status.last_recovery == last and "Recovered" not in [event.reason for event in later.events]


@pytest.mark.parametrize(
    ("what", "resumed"),
    [
        ("no step yet", None),
        ("so new that other shards may not have told yet", first(age=0.4)),
        ("of the view before", first(view=1)),
        ("of an interruption before the loss", first(age=900.0)),
        ("not all workers", first(start=0)),
        ("nothing", "x"),
        ("no number", first(age="x")),
        ("below zero", first(age=-1.0)),
    ],
)
def test_what_is_no_first_step_of_this_recovery_ends_nothing(what: str, resumed: Any) -> None:
    again, raised = lost()
    decided = plan(replace(again, progress=told(103, resumed, stepsLost=25), progress_at=NOW + 14), NOW + 14)
    assert decided.status.interruption == raised.interruption, what
    assert decided.status.last_recovery is None


def test_in_async_the_cost_is_updates() -> None:
    again, _ = lost("async")
    decided = plan(replace(again, progress=told(130, first(), "async", updatesLost=7, stepsLost=3), progress_at=NOW + 9), NOW + 9)
    last = decided.status.last_recovery
    assert last is not None and (last.steps_lost, last.updates_lost) == (None, 7)
    assert decided.status.restarts.updates_lost == 7 and decided.status.restarts.steps_lost == 0
    assert decided.events[-1].message.endswith("7 updates lost")


def test_a_sum_stays_within_what_the_status_may_hold() -> None:
    """Each number is shard 0's word: two of the largest make a sum that the API server would refuse, and no status would be written."""
    again, _ = lost("async")
    assert again.status is not None
    before = again.status.model_copy(update={"restarts": again.status.restarts.model_copy(update={"updates_lost": LARGEST})})
    told_of = replace(again, status=before, progress=told(130, first(), "async", updatesLost=LARGEST), progress_at=NOW + 9)
    after = plan(told_of, NOW + 9).status
    assert after.restarts.updates_lost == LARGEST and JobStatus.read(after.to_manifest()) == after


def test_what_was_counted_before_the_loss_is_not_counted_again() -> None:
    up = replace(running(), progress=told(125, stepsLost=10), progress_at=NOW - 1)
    lost = instead(up, "job-shard-1-a1", "shard", 1, **ended(137))
    raised = plan(lost, NOW).status
    again = replace(lost, status=raised, processes=(*lost.processes, pod("shard", 1, 2, created=NOW)))
    decided = plan(replace(again, progress=told(103, first(), stepsLost=35), progress_at=NOW + 9), NOW + 9)
    assert decided.status.last_recovery is not None and decided.status.last_recovery.steps_lost == 25


def test_where_every_process_went_the_step_known_before_tells_the_cost() -> None:
    """A node takes all of them: the new coordinator was told of no step by anybody."""
    gone = {f"worker_{index}": pod("worker", index, **ended(137)) for index in range(3)}
    gone |= {f"shard_{index}": pod("shard", index, **ended(137)) for index in range(2)}
    all_lost = replace(running(**gone), progress=told(125), progress_at=NOW - 1)
    raised = plan(all_lost, NOW).status
    anew = [pod("shard", index, 2, created=NOW) for index in range(2)] + [pod("worker", index, 2, created=NOW) for index in range(3)]
    again = replace(all_lost, status=raised, processes=(*all_lost.processes, *anew))
    decided = plan(replace(again, progress=told(103, first(start=2)), progress_at=NOW + 9), NOW + 9)
    assert decided.status.last_recovery is not None and decided.status.last_recovery.steps_lost == 25


def test_a_second_loss_before_the_first_step_is_of_the_same_interruption() -> None:
    again, raised = lost()
    up = plan(again, NOW + 5).status
    shot = replace(again, status=up, progress=told(100), progress_at=NOW + 6)
    shot = instead(shot, "job-worker-0-r1", "worker", 0, **ended(1))
    second = plan(shot, NOW + 20)
    assert second.status.internal.worker_start == 2 and second.status.interruption == raised.interruption
    unheard = plan(replace(shot, progress=None, progress_at=NOW - 1), NOW + 20)
    assert unheard.status.interruption is not None and unheard.status.interruption.since == stamp_exact(NOW + 20)


def test_a_loss_that_waits_for_its_turn_counts_from_when_it_was_seen() -> None:
    up = running()
    assert up.status is not None
    failed = up.status.restarts.model_copy(update={"counted": 1, "last_counted": stamp_exact(NOW - 5)})
    loop = replace(up, status=up.status.model_copy(update={"restarts": failed}))
    loop = instead(loop, "job-worker-0-r1", "worker", 0, **ended(1))
    seen = plan(loop, NOW).status
    assert seen.phase == "Recovering" and seen.interruption is None, "nothing was started again yet"
    raised = plan(replace(loop, status=seen), NOW + 6).status
    assert raised.internal.worker_start == 2 and raised.interruption is not None
    assert raised.interruption.since == stamp_exact(NOW)


def test_a_runtime_that_does_not_tell_leaves_nothing_open() -> None:
    again, _ = lost()
    old = {"run": "run-1", "coordinator": {"step": 103, "mode": "sync"}}
    decided = plan(replace(again, progress=old, progress_at=NOW + 9), NOW + 9)
    assert decided.status.interruption is None and decided.status.last_recovery is None


def test_a_job_that_starts_or_resumes_has_not_recovered() -> None:
    up = running()
    assert up.status is not None and up.status.interruption is None
    again, raised = lost()
    assert raised.interruption is not None
    stopped = replace(again, status=raised.model_copy(update={"phase": "Suspended", "start_time": None}), processes=())
    resumed = plan(stopped, NOW + 60).status
    assert resumed.interruption is None and resumed.restarts == raised.restarts
