"""One event is one failure: what processes suffer together counts once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from psjob_operator.api.status import Incident
from psjob_operator.plan.observed_state import ObservedState, Process
from psjob_operator.plan.plan import plan
from psjob_operator.plan.restarts import Failing, tally_failures
from tests.unit.plan_given import NOW, ended, job, names, pod, running, said


def failing(role: str, index: int, at: float = 0.0, cause: str = "Error", code: int = 1, node: str = "", **more: Any) -> Failing:
    assert role in ("shard", "worker")
    return Failing("shard" if role == "shard" else "worker", index, more.pop("number", 1), cause, code, node, NOW + at, **more)


W, S = "worker", "shard"
GROUPS: list[tuple[str, list[Failing], tuple[int, int, int]]] = [
    ("all workers with exit code 1 at once", [failing(W, i, i / 10, node=f"n{i}") for i in range(8)], (1, 0, 1)),
    (
        "all on one node, each in its way",
        [failing(W, 0, node="n"), failing(W, 1, 1, "OOMKilled", 137, "n"), failing(S, 0, 2, node="n")],
        (1, 1, 1),
    ),
    ("a bad init container everywhere", [failing(W, i, 3, "InitFailed", 127, f"n{i}") for i in range(3)], (1, 0, 1)),
    ("a spot notice that nobody told", [failing(W, i, i, "Error", 143, "spot") for i in range(3)], (1, 0, 1)),
    ("other codes on other nodes", [failing(W, 0, node="a"), failing(W, 1, code=2, node="b")], (2, 0, 2)),
    ("other causes on other nodes", [failing(W, 0, node="a"), failing(W, 1, cause="OOMKilled", node="b")], (2, 0, 2)),
    ("a shard and a worker on two nodes", [failing(W, 0, node="a"), failing(S, 0, node="b")], (2, 1, 1)),
    ("alike, and half a minute apart", [failing(W, 0), failing(W, 1, 30)], (2, 0, 2)),
    ("within ten seconds of the first, not of the last", [failing(W, 0), failing(W, 1, 8), failing(W, 2, 16)], (2, 0, 2)),
    ("no node is no common node", [failing(W, 0), failing(S, 0)], (2, 1, 1)),
    ("each by itself, as a rule says", [failing(W, i, node="n", each=True) for i in range(3)], (3, 0, 3)),
    ("nobody", [], (0, 0, 0)),
]


@pytest.mark.parametrize(("failures", "counts"), [row[1:] for row in GROUPS], ids=[row[0] for row in GROUPS])
def test_what_ends_together_is_one_failure(failures: list[Failing], counts: tuple[int, int, int]) -> None:
    found = tally_failures(failures, None, start=1)
    assert (len(found.new), found.of_shards, found.of_workers) == counts


KNOWN: list[tuple[str, Failing, tuple[int, int, int]]] = [
    ("seen later", failing(W, 1, 2), (0, 0, 0)),
    ("seen later on its node", failing(W, 1, 2, "OOMKilled", 137, "n1"), (0, 0, 0)),
    ("a shard on its node is new to the shards' budget", failing(S, 0, 2, node="n1"), (0, 1, 0)),
    ("started again since, it fails anew", failing(W, 0, 2, number=2), (1, 0, 1)),
    ("too late", failing(W, 1, 11), (1, 0, 1)),
    ("in another way elsewhere", failing(W, 1, 2, code=3, node="n2"), (1, 0, 1)),
]


@pytest.mark.parametrize(("failure", "counts"), [row[1:] for row in KNOWN], ids=[row[0] for row in KNOWN])
def test_who_is_seen_later_belongs_to_what_was_counted(failure: Failing, counts: tuple[int, int, int]) -> None:
    first = tally_failures([failing(W, 0, node="n1")], None, start=1).last
    found = tally_failures([failure], first, start=2)
    assert (len(found.new), found.of_shards, found.of_workers) == counts


def test_a_shard_is_in_an_incident_once() -> None:
    first = tally_failures([failing(S, 3, node="n1")], None, start=1).last
    assert first is not None and first.shards == "3"
    assert len(tally_failures([failing(S, 3, 1, node="n1", number=2)], first, start=1).new) == 1
    joined = tally_failures([failing(S, 0, 1, node="n1")], first, start=1)
    assert not joined.new and joined.last is not None and joined.last.shards == "0,3"


def test_a_status_written_by_hand_names_no_incident() -> None:
    assert len(tally_failures([failing(W, 0)], Incident(time="yesterday", role="worker", cause="Error", exit_code=1, start=9), 1).new) == 1


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
    [
        (ended(255, "Unknown"), 0),
        (ended(137, "ContainerStatusUnknown"), 0),
        (ended(255), 1),
        (ended(1, "Unknown"), 1),
    ],
    ids=["containerd lost it", "the kubelet lost it", "the script's own 255", "another code"],
)
def test_an_end_that_nobody_saw_is_no_failure_of_the_process(end: dict[str, Any], counted: int) -> None:
    decided = plan(running(worker_1=pod("worker", 1, node="n1", **end)), NOW)
    assert (decided.status.restarts.total, decided.status.restarts.counted) == (1, counted)
