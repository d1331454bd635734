"""Workers that shard 0 names as hung: ended, started again and counted, where the job has a limit and the very process is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from psjob_operator.contract import EXIT_HUNG
from psjob_operator.plan.actions import DeleteProcess
from psjob_operator.plan.observed_state import ObservedState
from psjob_operator.plan.plan import plan
from psjob_operator.plan.pods import HUNG_GRACE
from tests.unit.plan_given import NOW, UID, ended, job, names, pod, running


def limited(told: Any, limit: int | None = 5, **changes: Any) -> ObservedState:
    """The job in full swing, with a limit for steps; shard 0 tells `told` of who hangs."""
    snapshot = running(job(workers={} if limit is None else {"stepTimeoutSeconds": limit}), **changes)
    return replace(snapshot, progress={"run": UID, "coordinator": {"step": 3, "hung": told}}, progress_at=NOW)


def test_a_worker_that_is_named_is_ended_and_started_again_and_counted() -> None:
    decided = plan(limited([{"rank": 1, "start": 1, "seconds": 6.2}]), NOW)
    assert names(decided) == ["job-worker-1-r2"] and decided.intent
    assert decided.status.restarts.causes == {"Hung": 1} and decided.status.restarts.counted == 1
    (gone,) = [action for action in decided.actions if isinstance(action, DeleteProcess)]
    assert (gone.name, gone.grace_seconds) == ("job-worker-1-r1", HUNG_GRACE)
    assert "no step for 6 s" in decided.events[0].message


@pytest.mark.parametrize(
    "told",
    [
        [],
        None,
        "x",
        [{"rank": 1, "start": 2, "seconds": 6.0}],
        [{"rank": 9, "start": 1, "seconds": 6.0}],
        [{"rank": True, "start": 1, "seconds": 6.0}],
        [{"rank": 1, "start": 1, "seconds": "x"}, {}, 3],
    ],
)
def test_another_process_or_an_odd_word_changes_nothing(told: Any) -> None:
    decided = plan(limited(told), NOW)
    assert not decided.intent and names(decided) == [] and decided.status.restarts.total == 0


def test_without_a_limit_nobody_is_ended() -> None:
    assert not plan(limited([{"rank": 1, "start": 1, "seconds": 6.2}], limit=None), NOW).intent


def test_a_worker_that_ended_because_it_was_told_is_counted_as_hung() -> None:
    told = '{"error": "this worker has made no step"}'
    decided = plan(limited([], worker_1=pod("worker", 1, **ended(EXIT_HUNG, message=told))), NOW)
    assert decided.status.restarts.causes == {"Hung": 1} and decided.status.restarts.counted == 1
    assert names(decided) == ["job-worker-1-r2"]


def test_a_worker_that_goes_on_while_its_turn_is_waited_for_is_left_alone() -> None:
    """The second failure waits some seconds for its answer; a step made meanwhile is the better one."""
    first = limited([{"rank": 1, "start": 1, "seconds": 6.2}])
    decided = plan(first, NOW)
    later = replace(
        first,
        status=decided.status,
        processes=tuple(pod("worker", 1, 2) if seat.name == "job-worker-1-r1" else seat for seat in first.processes),
    )
    named = replace(later, progress={"run": UID, "coordinator": {"step": 4, "hung": [{"rank": 0, "start": 1, "seconds": 9.0}]}})
    assert not plan(named, NOW + 5).intent
    goes_on = replace(later, progress={"run": UID, "coordinator": {"step": 5, "hung": []}})
    assert not plan(goes_on, NOW + 60).intent
