"""runPolicy.podFailurePolicy.rules, budgets of a role, and who fails again and again.

- One event is one failure: what processes suffer together counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from psjob_operator.api.status import Incident, JobStatus
from psjob_operator.contract import EXIT_DEVICE_LOST, EXIT_FENCED, EXIT_HUNG, EXIT_REFUSED, EXIT_RETRY
from psjob_operator.plan.observed_state import ObservedState, Process
from psjob_operator.plan.plan import plan
from psjob_operator.plan.restarts import Failing, tally_failures
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
    ("the runtime's 80", codes("NotIn", 1), ended(EXIT_DEVICE_LOST, message='{"error": "lost"}'), False),
    ("the runtime's 80, by its reason", {"onReasons": ["DeviceLost"]}, ended(EXIT_DEVICE_LOST, message='{"error": "lost"}'), True),
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


def fails(role: str, index: int, at: float = 0.0, cause: str = "Error", code: int = 1, node: str = "", **more: Any) -> Failing:
    assert role in ("shard", "worker")
    return Failing("shard" if role == "shard" else "worker", index, more.pop("number", 1), cause, code, node, NOW + at, **more)


W, S = "worker", "shard"
GROUPS: list[tuple[str, list[Failing], tuple[int, int, int]]] = [
    ("all workers with exit code 1 at once", [fails(W, i, i / 10, node=f"n{i}") for i in range(8)], (1, 0, 1)),
    ("all on one node, each in its way", [fails(W, 0, node="n"), fails(W, 1, 1, "OOMKilled", 137, "n"), fails(S, 0, 2, node="n")],
        (1, 1, 1)),
    ("a bad init container everywhere", [fails(W, i, 3, "InitFailed", 127, f"n{i}") for i in range(3)], (1, 0, 1)),
    ("a spot notice that nobody told", [fails(W, i, i, "Error", 143, "spot") for i in range(3)], (1, 0, 1)),
    ("other codes on other nodes", [fails(W, 0, node="a"), fails(W, 1, code=2, node="b")], (2, 0, 2)),
    ("other causes on other nodes", [fails(W, 0, node="a"), fails(W, 1, cause="OOMKilled", node="b")], (2, 0, 2)),
    ("a shard and a worker on two nodes", [fails(W, 0, node="a"), fails(S, 0, node="b")], (2, 1, 1)),
    ("alike, and half a minute apart", [fails(W, 0), fails(W, 1, 30)], (2, 0, 2)),
    ("within ten seconds of the first, not of the last", [fails(W, 0), fails(W, 1, 8), fails(W, 2, 16)], (2, 0, 2)),
    ("no node is no common node", [fails(W, 0), fails(S, 0)], (2, 1, 1)),
    ("each by itself, as a rule says", [fails(W, i, node="n", each=True) for i in range(3)], (3, 0, 3)),
    ("nobody", [], (0, 0, 0)),
]  # fmt: skip


@pytest.mark.parametrize(("failures", "counts"), [row[1:] for row in GROUPS], ids=[row[0] for row in GROUPS])
def test_what_ends_together_is_one_failure(failures: list[Failing], counts: tuple[int, int, int]) -> None:
    found = tally_failures(failures, None, start=1)
    assert (len(found.new), found.of_shards, found.of_workers) == counts


KNOWN: list[tuple[str, Failing, tuple[int, int, int]]] = [
    ("seen later", fails(W, 1, 2), (0, 0, 0)),
    ("seen later on its node", fails(W, 1, 2, "OOMKilled", 137, "n1"), (0, 0, 0)),
    ("a shard on its node is new to the shards' budget", fails(S, 0, 2, node="n1"), (0, 1, 0)),
    ("started again since, it fails anew", fails(W, 0, 2, number=2), (1, 0, 1)),
    ("too late", fails(W, 1, 11), (1, 0, 1)),
    ("in another way elsewhere", fails(W, 1, 2, code=3, node="n2"), (1, 0, 1)),
]


@pytest.mark.parametrize(("failure", "counts"), [row[1:] for row in KNOWN], ids=[row[0] for row in KNOWN])
def test_who_is_seen_later_belongs_to_what_was_counted(failure: Failing, counts: tuple[int, int, int]) -> None:
    first = tally_failures([fails(W, 0, node="n1")], None, start=1).last
    found = tally_failures([failure], first, start=2)
    assert (len(found.new), found.of_shards, found.of_workers) == counts


def test_a_shard_is_in_an_incident_once() -> None:
    first = tally_failures([fails(S, 3, node="n1")], None, start=1).last
    assert first is not None and first.shards == "3"
    assert len(tally_failures([fails(S, 3, 1, node="n1", number=2)], first, start=1).new) == 1
    joined = tally_failures([fails(S, 0, 1, node="n1")], first, start=1)
    assert not joined.new and joined.last is not None and joined.last.shards == "0,3"


def test_a_status_written_by_hand_names_no_incident() -> None:
    assert len(tally_failures([fails(W, 0)], Incident(time="yesterday", role="worker", cause="Error", exit_code=1, start=9), 1).new) == 1


# ---- through the planner ---------------------------------------------------------------------------------------------------------------


def fleet(limit: int = 3, **policy: Any) -> ObservedState:
    return running(job(workers={"replicas": 8}, runPolicy={"backoffLimit": limit, **policy}))


def struck(snapshot: ObservedState, numbers: dict[int, int], at: float, **end: Any) -> ObservedState:
    """The job when all its workers on node n1, started a minute ago with these numbers, have ended so."""
    dead = [pod("worker", i, number, created=at - 60, node="n1", **end) for i, number in numbers.items()]
    shards = tuple(it for it in snapshot.processes if it.role == "shard")
    return replace(snapshot, processes=(*shards, *dead))


def test_a_node_with_eight_workers_is_reset_five_times_and_the_job_goes_on() -> None:
    snapshot, numbers, now = fleet(), dict.fromkeys(range(8), 1), NOW
    for _ in range(5):
        found = struck(snapshot, numbers, now, **ended(255, "Unknown", at=now))
        decided = plan(found, now + 1)
        assert decided.status.phase == "Recovering", decided.status
        snapshot, now = replace(snapshot, status=decided.status), now + 120
        numbers = dict.fromkeys(range(8), decided.status.internal.worker_start)
    assert (decided.status.restarts.total, decided.status.restarts.counted) == (40, 0)
    assert decided.status.restarts.causes == {"ContainerStatusUnknown": 40}


@pytest.mark.parametrize(
    "end",
    [ended(1), ended(143), ended(137, "OOMKilled"), {"phase": "Failed", "started": None, "init_exit": ended(1)["exit"]}],
    ids=["exit code 1", "SIGTERM from nobody", "out of memory", "init container"],
)
def test_eight_workers_that_end_at_once_are_one_failure_whatever_the_watch_shows_first(end: dict[str, Any]) -> None:
    snapshot, at = fleet(limit=1), NOW
    if "exit" in end:
        end = {**end, "exit": replace(end["exit"], at=at)}
    else:
        end = {**end, "init_exit": replace(end["init_exit"], at=at)}
    workers: dict[int, Process] = {i: pod("worker", i, created=at - 60) for i in range(8)}
    shards = tuple(it for it in snapshot.processes if it.role == "shard")
    for seen in (range(1), range(3), range(8)):
        for index in seen:
            if workers[index].number == 1:
                workers[index] = pod("worker", index, created=at - 60, **end)
        decided = plan(replace(snapshot, status=snapshot.status, processes=(*shards, *workers.values())), at + 1)
        assert decided.status.phase == "Recovering", decided.status
        for name in names(decided):
            index, start = int(name.split("-")[2]), decided.status.internal.worker_start
            workers[index] = pod("worker", index, start, created=at + 1)
        snapshot = replace(snapshot, status=decided.status)
    assert (decided.status.restarts.counted, decided.status.restarts.total) == (1, 8)
    assert decided.status.restarts.counted_by_role.worker == 1
    incident = decided.status.restarts.last_incident
    assert incident is not None and incident.workers == 8


def test_a_crash_loop_of_all_workers_still_ends_the_job() -> None:
    snapshot, numbers, now = fleet(limit=2), dict.fromkeys(range(8), 1), NOW
    counts = []
    for _ in range(3):
        found = struck(snapshot, numbers, now, **ended(1, at=now))
        decided = plan(found, now + 1)
        counts.append(decided.status.restarts.counted)
        snapshot, now = replace(snapshot, status=decided.status), now + 500
        numbers = dict.fromkeys(range(8), decided.status.internal.worker_start)
    assert counts[:2] == [1, 2]
    failed = said(decided.status)["Failed"]
    assert failed.reason == "BackoffLimitExceeded" and "failures: 3, spec.runPolicy.backoffLimit: 2" in failed.message


def test_a_rule_counts_each_process() -> None:
    rules = [{"action": "Count", "per": "Process", "onReasons": ["Error"]}]
    snapshot = fleet(limit=7, podFailurePolicy={"rules": rules})
    decided = plan(struck(snapshot, dict.fromkeys(range(8), 1), NOW, **ended(1, at=NOW)), NOW + 1)
    assert said(decided.status)["Failed"].reason == "BackoffLimitExceeded"


@pytest.mark.parametrize(
    ("end", "counted"),
    [(ended(255, "Unknown"), 0), (ended(137, "ContainerStatusUnknown"), 0), (ended(255), 1), (ended(1, "Unknown"), 1)],
    ids=["containerd lost it", "the kubelet lost it", "the script's own 255", "another code"],
)
def test_an_end_that_nobody_saw_is_no_failure_of_the_process(end: dict[str, Any], counted: int) -> None:
    decided = plan(running(worker_1=pod("worker", 1, node="n1", **end)), NOW)
    assert (decided.status.restarts.total, decided.status.restarts.counted) == (1, counted)
