"""Shards that share a volume go to another node together, after their last checkpoint, and nothing new refers to pods that end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from psjob_operator import render
from psjob_operator.contract import EXIT_RETRY
from psjob_operator.plan import placement as volumegroup
from psjob_operator.plan.actions import CreateProcess, DeleteProcess, Plan
from psjob_operator.plan.job_state import JobState
from psjob_operator.plan.observed_state import ObservedState, Process
from psjob_operator.plan.plan import plan
from tests.unit.api_manifest import MANY_NODES, MY_CLAIM
from tests.unit.plan_given import NOW, after, deleted, ended, job, names, pod, running, said, with_internal

EVICTED: dict[str, Any] = {"pod_reason": "EvictionByEvictionAPI"}
WORDS = "0/2 nodes are available: 1 node(s) didn't match pod affinity rules, 1 node(s) were unschedulable."
STUCK: dict[str, Any] = {"phase": "Pending", "started": None, "ready": False, "scheduled": None, "unschedulable": WORDS}
SHARED = job()
APART = job(checkpoint=MANY_NODES)


def on(node: str, role: str, index: int, number: int = 1, **seen: Any) -> Process:
    return pod(role, index, number, node=node, **seen)


def creates(decided: Plan) -> list[CreateProcess]:
    return [action for action in decided.actions if isinstance(action, CreateProcess)]


def test_shards_begin_in_one_placement_and_a_crash_keeps_it() -> None:
    begun = plan(SHARED, NOW)
    assert begun.status.internal.placed_term == begun.status.internal.term == 1
    assert {action.volume_group for action in creates(begun) if action.role == "shard"} == {1}
    assert {action.volume_group for action in creates(begun) if action.role == "worker"} == {None}
    crashed = plan(running(shard_1=pod("shard", 1, **ended(1))), NOW)
    assert (crashed.status.internal.term, crashed.status.internal.placed_term) == (2, 1)
    assert [(action.name, action.volume_group) for action in creates(crashed)] == [("job-shard-1-a2", 1)]


def test_the_affinity_names_the_placement() -> None:
    def selector(snapshot: ObservedState, placement: int | None) -> dict[str, str]:
        made = render.pod(snapshot, CreateProcess("shard", 0, 2, 3, "job-shard-0-a2", volume_group=placement))
        (term,) = made["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        labels: dict[str, str] = term["labelSelector"]["matchLabels"]
        assert labels.items() <= made["metadata"]["labels"].items(), "the first of a placement may go anywhere only if it matches itself"
        return labels

    assert selector(SHARED, 3)["psjob.dev/placement"] == "3"
    assert "psjob.dev/placement" not in selector(SHARED, 0), "a run that began without numbers stays where its shards are"
    assert "affinity" not in render.pod(APART, CreateProcess("shard", 0, 2, 3, "job-shard-0-a2"))["spec"]


def test_a_drained_shard_is_waited_for_and_then_all_move() -> None:
    ending = running(shard_0=on("n1", "shard", 0), shard_1=on("n1", "shard", 1, deleting=NOW + 40, **EVICTED))
    held = plan(ending, NOW)
    assert not held.intent and not names(held) and held.status.internal.term == 1, "a successor would fence the last checkpoint"
    assert held.wake_at is not None and held.wake_at <= NOW + 40
    assert said(held.status)["Ready"].reason == "Ending" and "last checkpoint" in said(held.status)["Ready"].message
    left = {
        "shard_0": on("n1", "shard", 0, **ended(EXIT_RETRY)),
        "shard_1": on("n1", "shard", 1, **ended(EXIT_RETRY), deleting=NOW, **EVICTED),
    }
    moved = plan(running(**left), NOW)
    assert names(moved) == ["job-shard-0-a2", "job-shard-1-a2"]
    assert moved.status.internal.placed_term == moved.status.internal.term == 2
    assert {action.volume_group for action in creates(moved)} == {2}
    assert moved.status.restarts.causes == {"Drained": 1, "Retry": 1} and moved.status.restarts.counted == 0
    late = plan(ending, NOW + 41)
    assert names(late) == ["job-shard-0-a2", "job-shard-1-a2"], "who does not end in its time is not waited for longer"
    assert late.status.restarts.causes == {"Drained": 1, "Moved": 1}
    assert deleted(late) == ["job-shard-0-a1"]


def test_only_what_shares_a_volume_moves() -> None:
    shard = on("n1", "shard", 1, **ended(EXIT_RETRY), deleting=NOW, **EVICTED)
    assert names(plan(running(APART, shard_1=shard), NOW)) == ["job-shard-1-a2"]
    worker = on("n1", "worker", 1, **ended(143), deleting=NOW, **EVICTED)
    decided = plan(running(SHARED, worker_1=worker), NOW)
    assert names(decided) == ["job-worker-1-r2"] and decided.status.internal.placed_term == 1


def test_pods_of_a_lost_node_are_taken_off_by_force_once_they_are_fenced() -> None:
    gone = {"node_lost": True, "ready": False}
    lost = running(
        shard_0=on("n1", "shard", 0, **gone),
        shard_1=on("n1", "shard", 1, **gone, deleting=NOW + 60),
        worker_1=on("n1", "worker", 1, **gone),
        worker_2=on("n2", "worker", 2),
    )
    decided = plan(lost, NOW)
    assert decided.intent and decided.status.internal.placed_term == decided.status.internal.term == 2, "stored before anything is deleted"
    assert names(decided) == ["job-shard-0-a2", "job-shard-1-a2", "job-worker-1-r2"]
    forced = {action.name: action.grace_seconds for action in decided.actions if isinstance(action, DeleteProcess)}
    assert forced == {"job-shard-0-a1": 0, "job-shard-1-a1": 0, "job-worker-1-r1": 0}
    assert decided.status.restarts.causes == {"NodeLost": 3} and decided.status.restarts.counted == 0


def test_a_shard_without_a_place_moves_all_and_waits_longer_each_time() -> None:
    stuck = running(shard_0=on("n1", "shard", 0), shard_1=pod("shard", 1, **{**STUCK, "created": NOW - 4}))
    waiting = plan(stuck, NOW)
    assert not names(waiting) and waiting.wake_at == NOW + 6
    moved = plan(replace(stuck, status=waiting.status), NOW + 6)
    assert names(moved) == ["job-shard-0-a2", "job-shard-1-a2"] and deleted(moved) == ["job-shard-0-a1", "job-shard-1-a1"]
    assert {(action.volume_group, action.waited) for action in creates(moved)} == {(2, 10)}
    assert after(stuck, moved, NOW + 6).status == moved.status
    again = on("n2", "shard", 0, 2, waited=10), pod("shard", 1, 2, **{**STUCK, "created": NOW + 6, "waited": 10})
    others = tuple(process for process in stuck.processes if process.role == "worker")
    second = replace(stuck, status=moved.status, processes=(*again, *others))
    assert not names(plan(second, NOW + 25)) and plan(second, NOW + 25).wake_at == NOW + 26
    assert {action.waited for action in creates(plan(second, NOW + 26))} == {20}


@pytest.mark.parametrize("words", ["0/2 nodes are available: 2 Insufficient cpu.", ""])
def test_a_cluster_without_room_moves_nobody(words: str) -> None:
    full = running(shard_0=on("n1", "shard", 0), shard_1=pod("shard", 1, **{**STUCK, "unschedulable": words}))
    assert not names(plan(full, NOW)) and not deleted(plan(full, NOW + 1000))
    alone = running(shard_0=pod("shard", 0, **STUCK), shard_1=pod("shard", 1, **STUCK))
    assert not names(plan(alone, NOW)), "nobody holds a place that keeps them"


def test_a_pod_that_ended_and_was_removed_between_two_turns_is_known_by_its_end() -> None:
    here = running(shard_1=None)
    went = pod("shard", 1, **ended(EXIT_RETRY), gone=True, deleting=NOW, **EVICTED)
    decided = plan(replace(here, gone=(went,), live=False), NOW)
    assert not decided.needs_live and decided.status.restarts.causes == {"Drained": 1, "Moved": 1}
    forced = plan(replace(here, gone=(pod("shard", 1, gone=True),), live=False), NOW)
    assert not forced.needs_live and forced.status.restarts.causes == {"Deleted": 1}
    older = plan(replace(here, gone=(pod("shard", 1, 0, gone=True), replace(went, run="run-0")), live=False), NOW)
    assert older.needs_live, "neither another number nor another run says anything of this seat"
    worker = pod("worker", 2, **ended(3), gone=True)
    failed = plan(replace(running(worker_2=None), gone=(worker,), live=False), NOW)
    assert failed.status.restarts.causes == {"Error": 1} and failed.status.restarts.counted == 1
    assert not deleted(failed), "it is not there"
    done = replace(running(worker_2=None), gone=(pod("worker", 2, **ended(0), gone=True),), live=False)
    assert plan(done, NOW).status.workers.succeeded_indexes == "2"


def test_a_run_that_began_without_numbers_gets_one_when_it_moves() -> None:
    before = running(shard_0=on("n1", "shard", 0), shard_1=on("n1", "shard", 1, **ended(1)))
    assert before.status is not None
    old = replace(before, status=with_internal(before.status, placed_term=None))
    crash = plan(old, NOW)
    assert crash.status.internal.placed_term is None and {action.volume_group for action in creates(crash)} == {0}
    lost = replace(old, processes=tuple(replace(it, node_lost=it.role == "shard", exit=None, phase="Running") for it in old.processes))
    assert plan(lost, NOW).status.internal.placed_term == 2


OWN = MY_CLAIM


@pytest.mark.parametrize("volume", [OWN["volume"], {"persistentVolumeClaim": {"claimName": "mine"}}])
@pytest.mark.parametrize(
    ("modes", "together"),
    [
        (None, True),
        (("ReadWriteOnce",), True),
        (("ReadWriteOncePod",), True),
        (("ReadWriteMany",), False),
        (("ReadWriteOnce", "ReadWriteMany"), False),
    ],
)
def test_shards_of_a_users_claim_are_one_placement_unless_it_can_be_mounted_by_many(
    volume: dict[str, Any], modes: tuple[str, ...] | None, together: bool
) -> None:
    snapshot = job(checkpoint={"volume": volume})
    snapshot = replace(snapshot, objects=replace(snapshot.objects, modes=modes))
    first = [action for action in creates(plan(snapshot, NOW)) if action.role == "shard"]
    assert {action.volume_group for action in first} == ({1} if together else {None})
    made = render.pod(snapshot, first[1], "runtime")
    assert ("affinity" in made["spec"]) == together
    lost = plan(running(snapshot, shard_0=on("n1", "shard", 0, node_lost=True), shard_1=on("n1", "shard", 1)), NOW)
    assert names(lost) == (["job-shard-0-a2", "job-shard-1-a2"] if together else ["job-shard-0-a2"])


@pytest.mark.parametrize("checkpoint", [{"volume": {"nfs": {"server": "s", "path": "/p"}}}, {"disabled": True}])
def test_shards_of_other_volumes_are_not_bound_together(checkpoint: dict[str, Any]) -> None:
    assert {action.volume_group for action in creates(plan(job(checkpoint=checkpoint), NOW))} == {None}


@pytest.mark.parametrize(("before", "then"), [(0, 10), (10, 20), (40, 80), (80, 120), (120, 120)])
def test_each_move_gives_a_place_twice_as_long_up_to_two_minutes(before: int, then: int) -> None:
    lost = running(shard_0=pod("shard", 0, waited=before), shard_1=pod("shard", 1, waited=before))
    assert volumegroup.patience(JobState.of(lost, NOW).shards) == then
