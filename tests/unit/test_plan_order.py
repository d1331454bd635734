"""The order of the policies: where several of them have something to say of a job, the one that is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from psjob_operator.plan.job_state import JobState
from psjob_operator.plan.observed_state import Objects, ObservedState
from psjob_operator.plan.plan import POLICIES, Hold, plan
from psjob_operator.plan.restarts import RestartDecision
from psjob_operator.plan.terminal import TerminalPhase
from tests.unit.plan_given import NOW, deleted, ended, job, names, pod, running

SPEC: dict[str, Any] = {"runPolicy": {"activeDeadlineSeconds": 80, "backoffLimit": 0}}
DONE: dict[str, Any] = {
    f"{role}_{index}": pod(role, index, **ended(0)) for role, count in (("worker", 3), ("shard", 2)) for index in range(count)
}
FAILED: dict[str, Any] = {"worker_1": pod("worker", 1, **ended(1))}
REFUSED: dict[str, Any] = {"shard_1": pod("shard", 1, **ended(77))}
UNREADABLE = ("spec.training.lrScaling: linear is for mode sync",)
TAKEN = Objects(strangers=("Service/job-shards",))


def world(
    suspend: bool = False, readable: bool = True, taken: bool = False, spec: dict[str, Any] | None = None, **pods: Any
) -> ObservedState:
    found = running(job(**(SPEC if spec is None else spec), suspend=suspend), **pods)
    found = found if readable else replace(found, spec_problems=UNREADABLE)
    return replace(found, objects=TAKEN) if taken else found


@pytest.mark.parametrize(
    ("snapshot", "first"),
    [
        (replace(world(suspend=True, **FAILED), deleting=True), "not_ours"),
        (world(suspend=True, readable=False, taken=True, **DONE), "complete"),
        (replace(job(spec_problems=UNREADABLE, suspend=True), objects=TAKEN), "invalid"),
        (world(suspend=True, readable=False, taken=True, **FAILED), "suspension"),
        (world(readable=False, taken=True, **FAILED, **REFUSED), "fatal"),
        (world(readable=False, taken=True, **FAILED), "too_often"),
        (world(readable=False, taken=True), "deadline_passed"),
        (world(readable=False, taken=True, spec={}, **FAILED), "unreadable"),
        (world(taken=True, spec={}, **FAILED), "name_taken"),
        (job(), "afresh"),
        (world(spec={}, **FAILED), "lost"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_first_policy_that_answers_decides(snapshot: ObservedState, first: str) -> None:
    answers = [(policy.__name__, answer) for policy in POLICIES if (answer := policy(JobState.of(snapshot, NOW))) is not None]
    assert answers[0][0] == first, answers
    decided = plan(snapshot, NOW)
    match answers[0][1]:
        case TerminalPhase() as ending:
            assert (decided.status.phase, decided.events[0].reason) == (ending.condition, ending.reason) and not names(decided)
        case Hold() as hold:
            assert decided == hold.plan and not names(decided)
        case RestartDecision() as raising:
            assert names(decided) == [raising.name("job", seat) for seat in raising.raised]


def test_what_ended_is_over_though_everything_speaks_against_it() -> None:
    over = plan(world(readable=False, taken=True), NOW).status
    assert over.phase == "Failed"
    after = replace(world(suspend=True, readable=False, taken=True), status=over, generation=2)
    decided = plan(after, NOW)
    assert decided.status.phase == "Failed" and len(deleted(decided)) == 5, "only what is left of it is cleaned up"
