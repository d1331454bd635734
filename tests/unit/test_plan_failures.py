"""runPolicy.podFailurePolicy.rules, budgets of a role, and who fails again and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from psjob_operator.api.status import JobStatus
from psjob_operator.contract import EXIT_FENCED, EXIT_HUNG, EXIT_REFUSED, EXIT_RETRY
from psjob_operator.plan.observed_state import ObservedState, Process
from psjob_operator.plan.plan import plan
from tests.unit.plan_given import NOW, after, ended, job, names, pod, running, said

Rule = dict[str, Any]
SAID = '{"ending": ""}'
GONE: dict[str, Any] = {"phase": "Failed", "started": None, "ready": False}


def ruled(rules: Sequence[Rule], role: str = "worker", policy: Rule | None = None, **end: Any) -> ObservedState:
    """The job in full swing with these rules, when its process 1 of `role` has ended so."""
    seat: dict[str, Process | None] = {f"{role}_1": pod(role, 1, **end)}
    return running(job(runPolicy={"podFailurePolicy": {"rules": list(rules)}, **(policy or {})}), **seat)


def codes(operator: str, *values: int) -> Rule:
    return {"onExitCodes": {"operator": operator, "values": list(values)}}


def on(name: str, status: str = "True", *others: str) -> Rule:
    return {"onPodConditions": [{"type": name, "status": status}, *({"type": other} for other in others)]}


def preempted(name: str, status: str) -> dict[str, Any]:
    return {"conditions": ((name, status),)}


MATCHES: list[tuple[str, Rule, dict[str, Any], bool]] = [
    ("code in", codes("In", 3, 42), ended(42), True),
    ("code not in the list", codes("In", 3), ended(42), False),
    ("NotIn", codes("NotIn", 3), ended(42), True),
    ("NotIn, listed", codes("NotIn", 42), ended(42), False),
    ("signal by its exit code", {"onSignals": [11]}, ended(139), True),
    ("signal by its number", {"onSignals": [11]}, ended(0, signal=11) | {"phase": "Failed"}, True),
    ("another signal", {"onSignals": [9]}, ended(139), False),
    ("a signal is exit code 128 + n", codes("In", 139), ended(139), True),
    ("reason", {"onReasons": ["Evicted", "OOMKilled"]}, ended(137, "OOMKilled"), True),
    ("another reason", {"onReasons": ["Evicted"]}, ended(137, "OOMKilled"), False),
    ("all of them", {**codes("In", 137), "onReasons": ["Error"]}, ended(137, "OOMKilled"), False),
    ("of another role", {"role": "shard", **codes("In", 42)}, ended(42), False),
    ("of its role", {"role": "worker", **codes("In", 42)}, ended(42), True),
    ("of any role", {"role": "any", **codes("In", 42)}, ended(42), True),
    # What was done to a process, and what the runtime says of it, is told only by the reason.
    ("preempted, by its exit code", codes("In", 143), {**ended(143), "pod_reason": "PreemptionByScheduler"}, False),
    ("preempted, by NotIn", codes("NotIn", 1), {**ended(143), "pod_reason": "PreemptionByScheduler"}, False),
    ("preempted", {"onReasons": ["Preempted"]}, {**ended(143), "pod_reason": "PreemptionByScheduler"}, True),
    ("the runtime's 75, by its code", codes("In", EXIT_RETRY), ended(EXIT_RETRY, message=SAID), False),
    ("the runtime's 75", {"onReasons": ["Retry"]}, ended(EXIT_RETRY, message=SAID), True),
    ("the script's 75", codes("In", EXIT_RETRY), ended(EXIT_RETRY), True),
    ("the runtime's 79", codes("NotIn", 1), ended(EXIT_HUNG, message='{"error": "hangs"}'), False),
    ("the script's 79", codes("In", EXIT_HUNG), ended(EXIT_HUNG), True),
    ("no code at all", codes("NotIn", 1), {"node_lost": True}, False),
    ("a lost node", {"onReasons": ["NodeLost"]}, {"node_lost": True}, True),
    ("a pod condition", on("DisruptionTarget"), {**ended(143), **preempted("DisruptionTarget", "True")}, True),
    ("a condition that is False", on("DisruptionTarget"), {**ended(143), **preempted("DisruptionTarget", "False")}, False),
    ("a condition asked to be False", on("example.com/Fit", "False"), {**ended(1), **preempted("example.com/Fit", "False")}, True),
    ("one of two conditions", on("Other", "True", "DisruptionTarget"), {**ended(143), **preempted("DisruptionTarget", "True")}, True),
    ("another condition", on("DisruptionTarget"), ended(1), False),
    ("a condition and a code", {**on("Bad"), **codes("In", 1)}, {**ended(1), **preempted("Bad", "True")}, True),
    ("a condition, another code", {**on("Bad"), **codes("In", 2)}, {**ended(1), **preempted("Bad", "True")}, False),
    ("a condition and a lost node", on("DisruptionTarget"), {"node_lost": True, **preempted("DisruptionTarget", "True")}, True),
    ("a condition of a pod that is deleted", on("Drain"), {"deleting": NOW - 1, **preempted("Drain", "True")}, True),
    ("its init container", {"onReasons": ["InitFailed"]}, {**GONE, "init_exit": ended(1)["exit"]}, True),
]


@pytest.mark.parametrize(("rule", "end", "meets"), [row[1:] for row in MATCHES], ids=[row[0] for row in MATCHES])
def test_a_rule_is_met_when_all_that_it_names_is_so(rule: Rule, end: dict[str, Any], meets: bool) -> None:
    decided = plan(ruled([{**rule, "action": "FailJob"}], **end), NOW)
    assert (decided.status.phase == "Failed") == meets, decided.status
    if meets:
        failed = said(decided.status)["Failed"]
        assert failed.reason == "PodFailurePolicy"
        assert failed.message.startswith("worker 1: spec.runPolicy.podFailurePolicy.rules[0] says FailJob: ")


@pytest.mark.parametrize(
    ("action", "end", "counted"),
    [("Ignore", ended(42), 0), ("Count", ended(42), 1), ("Count", {"node_lost": True}, 1), ("Ignore", {"node_lost": True}, 0)],
)
def test_a_rule_says_whether_a_restart_counts(action: str, end: dict[str, Any], counted: int) -> None:
    rule: Rule = {"action": action, "onReasons": ["Error", "NodeLost"]}
    decided = plan(ruled([rule], **end), NOW)
    assert names(decided) == ["job-worker-1-r2"]
    assert (decided.status.restarts.total, decided.status.restarts.counted) == (1, counted)
    assert "podFailurePolicy.rules[0]" in said(decided.status)["Ready"].message


def test_the_first_rule_that_matches_holds() -> None:
    rules: list[Rule] = [
        {"action": "Ignore", "role": "shard", "onReasons": ["Error"]},
        {"action": "Ignore", **codes("In", 42)},
        {"action": "FailJob", "onReasons": ["Error"]},
    ]
    assert plan(ruled(rules, **ended(42)), NOW).status.restarts.counted == 0
    assert "podFailurePolicy.rules[2]" in said(plan(ruled(rules, **ended(1)), NOW).status)["Failed"].message
    assert plan(ruled(rules, "shard", **ended(1)), NOW).status.phase == "Recovering"


def test_what_is_ignored_never_ends_the_job_and_comes_back_ever_later() -> None:
    snapshot = ruled([{"action": "Ignore", **codes("In", 42)}], policy={"backoffLimit": 0}, **ended(42), created=NOW - 4, waited=40)
    assert not names(plan(snapshot, NOW + 75)), "twice the 40 s of the start before"
    assert names(plan(snapshot, NOW + 77)) == ["job-worker-1-r2"]


@pytest.mark.parametrize(("role", "message"), [("worker", '{"error": "no"}'), ("shard", '{"error": "no"}')])
def test_what_no_restart_can_help_fails_the_job_whatever_the_rules_say(role: str, message: str) -> None:
    decided = plan(ruled([{"action": "Ignore", **codes("NotIn", 1)}], role, **ended(EXIT_REFUSED, message=message)), NOW)
    assert said(decided.status)["Failed"].reason == "Refused"


def test_a_fenced_shard_stays_above_the_view_that_it_met_whatever_a_rule_says() -> None:
    end = ended(EXIT_FENCED, message='{"fenced": {"term": 9}}')
    decided = plan(ruled([{"action": "Count", "onReasons": ["Fenced"]}], "shard", **end), NOW)
    assert (decided.status.internal.term, decided.status.restarts.counted) == (10, 1)


def test_a_hung_worker_meets_a_rule() -> None:
    told = {"run": "run-1", "coordinator": {"step": 3, "hung": [{"rank": 1, "start": 1, "seconds": 60}]}}
    rules = [{"action": "FailJob", "onReasons": ["Hung"]}]
    base = job(runPolicy={"podFailurePolicy": {"rules": rules}}, workers={"progressDeadlineSeconds": 30})
    decided = plan(replace(running(base), progress=told, progress_at=NOW), NOW)
    assert said(decided.status)["Failed"].reason == "PodFailurePolicy"


def test_a_suspended_job_is_not_failed_by_a_rule() -> None:
    base = job(suspend=True, runPolicy={"podFailurePolicy": {"rules": [{"action": "FailJob", "onReasons": ["Error"]}]}})
    assert plan(running(base, worker_1=pod("worker", 1, **ended(1))), NOW).status.phase != "Failed"


# ---- budgets of a role -------------------------------------------------------------------------------------------------------------


def failing(snapshot: ObservedState, *ends: tuple[str, int]) -> JobStatus:
    """The status after these (role, index) have failed one after the other, each a minute after its start."""
    decided = plan(snapshot, NOW)
    now, numbers = NOW, {(it.role, it.index): it.number for it in snapshot.processes}
    for role, index in ends:
        there = replace(snapshot, status=decided.status, granted=frozenset())
        made = [pod(role_, at, number, created=now - 90) for (role_, at), number in numbers.items() if (role_, at) != (role, index)]
        dead = pod(role, index, numbers[role, index], created=now - 90, node="n1", **ended(1))
        decided = plan(replace(there, processes=(*made, dead)), now)
        if decided.status.phase == "Failed":
            return decided.status
        shards = {it.index: it.attempt for it in decided.status.shards}
        numbers[role, index] = shards[index] if role == "shard" else decided.status.internal.worker_start
        now += 1000
    return decided.status


PER_ROLE: Rule = {"backoffLimit": 10, "backoffLimitPerRole": {"shard": 1, "worker": 3}}


@pytest.mark.parametrize(
    ("ends", "field"),
    [
        ([("shard", 0)], ""),
        ([("shard", 0), ("shard", 1)], "spec.runPolicy.backoffLimitPerRole.shard: 1"),
        ([("worker", 0), ("shard", 0), ("worker", 1), ("worker", 0)], ""),
        ([("worker", 0), ("worker", 1), ("worker", 0), ("worker", 1)], "spec.runPolicy.backoffLimitPerRole.worker: 3"),
    ],
)
def test_each_role_has_a_budget_of_its_own(ends: list[tuple[str, int]], field: str) -> None:
    status = failing(running(job(runPolicy=PER_ROLE)), *ends)
    assert (status.phase == "Failed") == bool(field)
    if field:
        failed = said(status)["Failed"]
        assert failed.reason == "BackoffLimitExceeded" and failed.message.endswith(field)


def test_the_budget_of_the_whole_holds_beside_them() -> None:
    status = failing(running(job(runPolicy={**PER_ROLE, "backoffLimit": 1})), ("worker", 0), ("shard", 0))
    assert said(status)["Failed"].message.endswith("failures: 2, spec.runPolicy.backoffLimit: 1")


def test_a_status_from_before_has_counted_nothing_by_role() -> None:
    snapshot = running(job(runPolicy=PER_ROLE))
    assert snapshot.status is not None
    old = JobStatus.model_validate({**snapshot.status.to_manifest(), "restarts": {"total": 5, "counted": 5}})
    status = failing(replace(snapshot, status=old), ("shard", 0))
    assert status.phase == "Recovering"
    assert (status.restarts.counted, status.restarts.counted_by_role.shard) == (6, 1)


# ---- who fails again and again -----------------------------------------------------------------------------------------------------


def test_the_status_names_those_that_are_started_again_most_often() -> None:
    snapshot = running(job(workers={"replicas": 12}, runPolicy={"backoffLimit": 100}))
    ends = [("worker", 3), *(("worker", index) for index in range(4, 12)), ("worker", 3), ("shard", 1), ("worker", 3)]
    listed = failing(snapshot, *ends).restarts.by_process
    assert len(listed) == 8
    first = listed[0]
    assert (first.role, first.index, first.cause, first.node) == ("worker", 3, "Error", "n1")
    assert first.count >= 2 and [entry.count for entry in listed] == sorted((entry.count for entry in listed), reverse=True)
    assert ("shard", 1) in {(entry.role, entry.index) for entry in listed}, "who is new is seen"


def test_a_storm_hides_nobody_who_failed_before_it() -> None:
    snapshot = running(job(workers={"replicas": 40}, runPolicy={"backoffLimit": 100}))
    status = failing(snapshot, ("worker", 3), ("worker", 3))
    gone: dict[str, Any] = {**ended(1), "number": 1, "node": "n2"}
    seats = [replace(it, **gone) if it.role == "worker" and it.index > 20 else it for it in snapshot.processes if it.index != 3]
    storm = plan(replace(snapshot, status=status, processes=(*seats, pod("worker", 3, status.internal.worker_start))), NOW + 5000)
    listed = {(entry.role, entry.index): entry.count for entry in storm.status.restarts.by_process}
    assert len(listed) == 8 and listed["worker", 3] == 2


def test_shards_that_move_with_another_have_not_failed() -> None:
    decided = plan(running(shard_0=pod("shard", 0, node="n1", node_lost=True), shard_1=pod("shard", 1, node="n1")), NOW)
    assert decided.status.restarts.causes == {"Moved": 1, "NodeLost": 1}
    assert [(it.index, it.cause) for it in decided.status.restarts.by_process] == [(0, "NodeLost")]
    assert after(running(), decided).status.restarts.by_process == decided.status.restarts.by_process
