"""Shard i stands beside worker i: whose pod names whom, and no pod ever requires the node of one that is gone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from psjob_operator import render
from psjob_operator.cluster.pods import parse_pod
from psjob_operator.contract import EXIT_RETRY
from psjob_operator.plan.actions import Beside, CreateProcess, DeleteProcess, EnsurePairClaim, Plan
from psjob_operator.plan.objects import pair_claim_name
from psjob_operator.plan.observed_state import ObservedState, Process, Refusal
from psjob_operator.plan.plan import plan
from tests.unit.api_manifest import MANY_NODES, MY_CLAIM
from tests.unit.plan_given import NOW, deleted, ended, job, names, pod, said
from tests.unit.plan_given import running as up

NODES = {"checkpoint": MANY_NODES}
PAIRS = job(shards={"replicas": 2, "placement": "Colocated"}, **NODES)
"""Two shards beside the first two of three workers."""
DRAINED: dict[str, Any] = {"pod_reason": "EvictionByEvictionAPI"}
WORDS = "0/2 nodes are available: 1 Insufficient cpu, 1 node(s) didn't match pod affinity rules."
PENDING: dict[str, Any] = {"phase": "Pending", "started": None, "ready": False, "scheduled": None, "node": ""}
STUCK = {**PENDING, "unschedulable": WORDS}


def on(role: str, index: int, number: int = 1, node: str = "", **seen: Any) -> Process:
    return pod(role, index, number, **{"node": node or f"n{index}", **seen})


def running(**changes: Process | None) -> ObservedState:
    """Worker i and shard i on node i."""
    there = {f"{role}_{index}": on(role, index) for role, count in (("shard", 2), ("worker", 3)) for index in range(count)}
    return up(PAIRS, **{**there, **changes})


def beside(decided: Plan) -> dict[str, str]:
    """By name of each pod that is created, that of the one whose node it requires."""

    def named(other: Beside | None) -> str:
        return "" if other is None else f"{other.role}-{other.index}-{other.number}"

    return {it.name: named(it.beside) for it in decided.actions if isinstance(it, CreateProcess)}


def test_of_pairs_that_start_together_the_workers_go_anywhere() -> None:
    assert beside(plan(PAIRS, NOW)) == {
        "job-shard-0-a1": "worker-0-1",
        "job-shard-1-a1": "worker-1-1",
        "job-worker-0-r1": "",
        "job-worker-1-r1": "",
        "job-worker-2-r1": "",
    }
    assert not any(beside(plan(job(**NODES), NOW)).values()), "no placement, no pairs"


def test_who_fails_alone_comes_back_to_the_other() -> None:
    shard = plan(running(shard_1=on("shard", 1, **ended(1))), NOW)
    assert beside(shard) == {"job-shard-1-a2": "worker-1-1"}
    worker = plan(running(worker_1=on("worker", 1, **ended(1))), NOW)
    assert beside(worker) == {"job-worker-1-r2": "shard-1-1"} and worker.status.internal.term == 1, "its shard continues"
    assert beside(plan(running(worker_2=on("worker", 2, **ended(1))), NOW)) == {"job-worker-2-r2": ""}, "it has no shard"


@pytest.mark.parametrize(
    "loss",
    [
        {"shard_1": {"node_lost": True}, "worker_1": {"node_lost": True}},
        {"shard_1": {"node_lost": True}},
        {"worker_1": {"node_lost": True}},
        {"worker_1": {**ended(143), "deleting": NOW, "pod_reason": "NodeShutdown"}},
    ],
)
def test_a_machine_takes_both_and_neither_waits_for_a_pod_that_is_gone(loss: dict[str, dict[str, Any]]) -> None:
    """Whichever of the two is seen to be lost first."""
    decided = plan(running(**{seat: on(seat[:-2], 1, **seen) for seat, seen in loss.items()}), NOW)
    assert beside(decided) == {"job-shard-1-a2": "worker-1-2", "job-worker-1-r2": ""}
    here = {"job-shard-1-a1"} | ({"job-worker-1-r1"} if "exit" not in loss.get("worker_1", {}) else set())
    assert set(deleted(decided)) == here, "the log of one that has ended is kept"
    assert decided.status.restarts.total == 2 and decided.status.restarts.counted == 0
    assert {(it.role, it.index): it.count for it in decided.status.restarts.by_process} == {("shard", 1): 1, ("worker", 1): 1}
    assert set(decided.status.restarts.causes) <= {"NodeLost", "NodeShutdown"}, "one machine, one cause"


def test_a_machine_that_dies_costs_one_restart_each() -> None:
    both = {"shard_1": on("shard", 1, node_lost=True), "worker_1": on("worker", 1, node_lost=True)}
    decided = plan(running(**both), NOW)
    assert {(it.role, it.index): it.count for it in decided.status.restarts.by_process} == {("shard", 1): 1, ("worker", 1): 1}
    forced = {it.name: it.grace_seconds for it in decided.actions if isinstance(it, DeleteProcess)}
    assert forced == {"job-shard-1-a1": 0, "job-worker-1-r1": 0}
    begun = tuple(it for it in running(**both).processes if it.index != 1)
    new = (pod("shard", 1, 2, **{**PENDING, "created": NOW, "unschedulable": WORDS}), pod("worker", 1, 2, **{**PENDING, "created": NOW}))
    later = replace(running(), status=decided.status, processes=(*begun, *new))
    for seconds in (1, 60, 1000):
        assert not names(plan(later, NOW + seconds)), "a shard waits for a worker that has no place yet: nothing else could help"


def test_a_shard_that_takes_its_last_checkpoint_is_waited_for_by_both() -> None:
    drained = running(
        shard_1=on("shard", 1, deleting=NOW + 40, **DRAINED), worker_1=on("worker", 1, **ended(EXIT_RETRY), deleting=NOW, **DRAINED)
    )
    held = plan(drained, NOW)
    assert not names(held) and held.wake_at is not None and held.wake_at <= NOW + 40
    assert beside(plan(drained, NOW + 41)) == {"job-shard-1-a2": "worker-1-2", "job-worker-1-r2": ""}


def test_a_pod_that_has_no_place_beside_the_other_moves_both_and_waits_longer_each_time() -> None:
    for role, other in (("shard", "worker"), ("worker", "shard")):
        stuck = running(**{f"{role}_1": pod(role, 1, **{**STUCK, "created": NOW - 4})})
        waiting = plan(stuck, NOW)
        assert not names(waiting) and waiting.wake_at == NOW + 6, role
        moved = plan(replace(stuck, status=waiting.status), NOW + 6)
        assert beside(moved) == {"job-shard-1-a2": "worker-1-2", "job-worker-1-r2": ""}, role
        assert deleted(moved) == ["job-shard-1-a1", "job-worker-1-r1"]
        assert {it.waited for it in moved.actions if isinstance(it, CreateProcess)} == {10}
        assert moved.status.restarts.by_process == () and moved.status.restarts.causes == {"Moved": 2}
        others = tuple(it for it in stuck.processes if it.index != 1)
        again = pod(role, 1, 2, **{**STUCK, "created": NOW + 6, "waited": 10}), on(other, 1, 2, waited=10)
        second = replace(stuck, status=moved.status, processes=(*others, *again))
        assert not names(plan(second, NOW + 25)) and plan(second, NOW + 25).wake_at == NOW + 26
        assert {it.waited for it in plan(second, NOW + 26).actions if isinstance(it, CreateProcess)} == {20}


@pytest.mark.parametrize("words", [
    "1 node(s) didn't match PersistentVolume's node affinity", "1 node(s) had volume node affinity conflict",
    "1 node(s) didn't satisfy plugin(s) [VolumeBinding]",
])  # fmt: skip
def test_a_pod_that_its_volume_binds_to_a_full_node_moves_too(words: str) -> None:
    stuck = running(shard_1=pod("shard", 1, **{**STUCK, "unschedulable": f"0/2 nodes are available: 1 Insufficient cpu, {words}."}))
    assert beside(plan(stuck, NOW + 100)) == {"job-shard-1-a2": "worker-1-2", "job-worker-1-r2": ""}


MEETING = job(shards={"replicas": 2, "placement": "Colocated", "pairStorageClassName": "local"}, **NODES)
"""As PAIRS, with a volume for each pair."""


def volumes(decided: Plan) -> dict[str, int | None]:
    """By name of each pod that is created, the number of the volume that it mounts with its partner."""
    return {it.name: it.pair for it in decided.actions if isinstance(it, CreateProcess)}


def claims(decided: Plan) -> list[tuple[int, int]]:
    return [(it.index, it.number) for it in decided.actions if isinstance(it, EnsurePairClaim)]


def meeting(there: tuple[int, ...] = (1, 1), **changes: Process | None) -> ObservedState:
    """The two pairs run, each on its first volume, whose claims are there; `there`: the numbers of these."""
    pods = {f"{role}_{index}": on(role, index, pair=1) for role in ("shard", "worker") for index in range(2)}
    made = up(MEETING, **{**pods, "worker_2": on("worker", 2), **changes})
    names = tuple(pair_claim_name(made.name, made.uid, index, number) for index, number in enumerate(there))
    return replace(made, objects=replace(made.objects, pair_claims=names))


def test_pairs_that_begin_together_mount_a_volume_of_their_own_and_its_claim_comes_first() -> None:
    decided = plan(MEETING, NOW)
    assert volumes(decided) == {
        "job-shard-0-a1": 1, "job-shard-1-a1": 1, "job-worker-0-r1": 1, "job-worker-1-r1": 1, "job-worker-2-r1": None,
    }  # fmt: skip
    assert claims(decided) == [(0, 1), (1, 1)]
    kinds = [type(action) for action in decided.actions]
    assert kinds.index(EnsurePairClaim) < kinds.index(CreateProcess)
    assert not any(volumes(plan(PAIRS, NOW)).values()) and not claims(plan(PAIRS, NOW)), "only where the job asks for it"


def test_who_comes_back_alone_mounts_what_the_other_has_and_no_claim_is_made() -> None:
    shard = plan(meeting(shard_1=on("shard", 1, pair=1, **ended(1))), NOW)
    assert volumes(shard) == {"job-shard-1-a2": 1} and claims(shard) == []
    worker = plan(meeting(worker_1=on("worker", 1, pair=1, **ended(1))), NOW)
    assert volumes(worker) == {"job-worker-1-r2": 1} and claims(worker) == []
    assert beside(worker) == {"job-worker-1-r2": "shard-1-1"}


def test_a_pair_that_moves_has_another_volume() -> None:
    """The first one may be of a node that is gone."""
    lost = plan(meeting(shard_1=on("shard", 1, pair=1, node_lost=True), worker_1=on("worker", 1, pair=1, node_lost=True)), NOW)
    assert volumes(lost) == {"job-shard-1-a2": 2, "job-worker-1-r2": 2} and claims(lost) == [(1, 2)]


def test_a_claim_that_goes_is_mounted_by_nobody_new() -> None:
    """A pod that names it would never start; over TCP the pair trains on."""
    decided = plan(meeting((1,), shard_1=on("shard", 1, pair=1, **ended(1))), NOW)
    assert volumes(decided) == {"job-shard-1-a2": None} and claims(decided) == []
    older = plan(meeting(worker_1=on("worker", 1), shard_1=on("shard", 1, pair=1, **ended(1))), NOW)
    assert volumes(older) == {"job-shard-1-a2": None}, "nor one that its worker was started without"


def test_a_shard_whose_worker_is_through_meets_nobody() -> None:
    through = meeting(worker_1=on("worker", 1, pair=1, **ended(0)), shard_1=on("shard", 1, pair=1, **ended(1)))
    assert volumes(plan(through, NOW)) == {"job-shard-1-a2": None}


def test_a_refused_claim_is_told() -> None:
    name = pair_claim_name(MEETING.name, MEETING.uid, 0, 1)
    refused = Refusal(name, 403, "exceeded quota: claims", NOW, 1)
    begun = plan(MEETING, NOW)
    decided = plan(replace(MEETING, status=begun.status, granted=begun.grants, refusals=(refused,)), NOW + 1)
    assert claims(decided) == [(0, 1), (1, 1)], "it is tried again"
    assert "exceeded quota: claims" in said(decided.status)["Ready"].message


def test_both_pods_of_a_pair_mount_its_claim() -> None:
    name = pair_claim_name("job", MEETING.uid, 1, 3)
    claim = render.pair_claim(MEETING, 1, 3)
    assert claim["metadata"]["name"] == name and claim["metadata"]["ownerReferences"][0]["uid"] == MEETING.uid
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}, "storageClassName": "local",
    }  # fmt: skip
    made = render.Pods(MEETING)
    for role in ("shard", "worker"):
        one = made.pod(CreateProcess(role, 1, 4, 5, f"job-{role}-1-4", pair=3))  # type: ignore[arg-type]
        assert {"name": "psjob-pair", "persistentVolumeClaim": {"claimName": name}} in one["spec"]["volumes"]
        (container,) = one["spec"]["containers"]
        assert {"name": "psjob-pair", "mountPath": "/psjob-pair"} in container["volumeMounts"]
        assert {"name": "PSJOB_PAIR", "value": "/psjob-pair"} in container["env"]
        assert not any(mount["name"] == "psjob-pair" for it in one["spec"]["initContainers"] for mount in it["volumeMounts"])
        seen = parse_pod({**one, "metadata": {**one["metadata"], "uid": "u"}})
        assert seen is not None and seen.process.pair == 3
        assert "psjob-pair" not in str(made.pod(CreateProcess(role, 1, 4, 5, f"job-{role}-1-4")))  # type: ignore[arg-type]


@pytest.mark.parametrize("words", ["0/2 nodes are available: 2 Insufficient cpu.", ""])
def test_a_cluster_without_room_moves_no_pair(words: str) -> None:
    full = running(shard_1=pod("shard", 1, **{**STUCK, "unschedulable": words}))
    assert not names(plan(full, NOW + 1000))


@pytest.mark.parametrize(("lost", "waits"), [("shard", "worker"), ("worker", "shard")])
def test_who_may_require_the_node_of_the_lost_one_starts_again_with_it(lost: str, waits: str) -> None:
    both = {f"{lost}_1": on(lost, 1, **ended(1)), f"{waits}_1": pod(waits, 1, **PENDING)}
    assert beside(plan(running(**both), NOW)) == {"job-shard-1-a2": "worker-1-2", "job-worker-1-r2": ""}


def test_a_worker_does_not_wait_for_a_shard_that_could_not_be_created() -> None:
    refused = Refusal("job-shard-1-a1", 403, "quota", NOW, 1)
    here = running(shard_1=None, worker_1=on("worker", 1, **ended(1)))
    decided = plan(replace(here, granted=frozenset({refused.name}), refusals=(refused,)), NOW)
    assert beside(decided) == {"job-worker-1-r2": ""}
    later = replace(here, status=decided.status, granted=frozenset({refused.name}))
    later = replace(later, processes=(*(it for it in here.processes if it.index != 1), on("worker", 1, 2)))
    assert beside(plan(later, NOW + 5)) == {"job-shard-1-a1": "worker-1-2"}


def test_a_pair_of_which_both_failed_waits_for_the_later_turn() -> None:
    """The shard would require the node of a worker that has ended, else."""
    first = plan(running(worker_1=on("worker", 1, **ended(1))), NOW)
    gone = {"shard_1": on("shard", 1, **ended(1), created=NOW - 1), "worker_1": on("worker", 1, 2, **ended(1), created=NOW + 1)}
    again = replace(running(**gone), status=first.status)
    at = NOW + 4
    held = plan(again, at)
    assert not names(held) and said(held.status)["Ready"].reason == "BackOff"
    assert held.wake_at is not None and set(beside(plan(again, held.wake_at + 1))) == {"job-shard-1-a2", "job-worker-1-r3"}


def test_a_shard_whose_worker_is_through_goes_anywhere() -> None:
    through = on("worker", 1, **ended(0))
    assert beside(plan(running(worker_1=through, shard_1=on("shard", 1, **ended(1))), NOW)) == {"job-shard-1-a2": ""}
    stuck = running(worker_1=through, shard_1=pod("shard", 1, **{**STUCK, "created": NOW - 10}))
    assert beside(plan(stuck, NOW)) == {"job-shard-1-a2": ""}, "a pod that has ended holds no place to stand beside"
    lost = running(worker_1=through, shard_1=on("shard", 1, node_lost=True))
    assert beside(plan(lost, NOW)) == {"job-shard-1-a2": ""}


def test_the_affinity_names_one_process_and_keeps_the_users_own() -> None:
    mine = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}]}, "nodeAffinity": {"x": 1}}
    container = {"name": "worker", "image": "i", "command": ["python", "t.py"]}
    laid = {"replicas": 3, "template": {"spec": {"containers": [container], "affinity": mine}}}
    snapshot = job(shards={"replicas": 2, "placement": "Colocated"}, workers=laid, **NODES)
    made = render.Pods(snapshot)
    back = made.pod(CreateProcess("worker", 1, 2, 3, "job-worker-1-r2", beside=Beside("shard", 1, 4)))
    first, second = back["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    labels = made.pod(CreateProcess("shard", 1, 4, 3, "job-shard-1-a4"))["metadata"]["labels"]
    assert first["topologyKey"] == "kubernetes.io/hostname" and first["labelSelector"]["matchLabels"].items() <= labels.items()
    older = made.pod(CreateProcess("shard", 1, 3, 2, "job-shard-1-a3"))["metadata"]["labels"]
    other = made.pod(CreateProcess("shard", 0, 4, 3, "job-shard-0-a4"))["metadata"]["labels"]
    assert not any(first["labelSelector"]["matchLabels"].items() <= it.items() for it in (older, other))
    assert second == {"topologyKey": "zone"} and back["spec"]["affinity"]["nodeAffinity"] == {"x": 1}
    free = made.pod(CreateProcess("worker", 0, 2, 3, "job-worker-0-r2"))
    assert free["spec"]["affinity"] == mine, "the documents that pods have in common are not changed"


@pytest.mark.parametrize(("placement", "modes", "refused"), [
    ("Colocated", ("ReadWriteOnce",), True), ("Spread", ("ReadWriteOncePod",), True), ("Packed", ("ReadWriteOnce",), False),
    ("Colocated", ("ReadWriteOnce", "ReadWriteMany"), False), ("Colocated", None, False), (None, ("ReadWriteOnce",), False),
])  # fmt: skip
def test_a_claim_for_one_node_is_refused_where_shards_are_on_several(placement: str, modes: tuple[str, ...] | None, refused: bool) -> None:
    snapshot = job(shards={"replicas": 2, **({"placement": placement} if placement else {})}, checkpoint=MY_CLAIM)
    decided = plan(replace(snapshot, objects=replace(snapshot.objects, modes=modes)), NOW)
    assert (decided.status.phase == "Failed") == refused
    assert not refused or f"claim mine has the modes {', '.join(modes or ())}; name a claim" in said(decided.status)["Failed"].message


@pytest.mark.parametrize("placement", ["Colocated", "Packed"])
def test_a_shard_beside_a_worker_tolerates_what_that_tolerates(placement: str) -> None:
    """It could not follow to a node with the taint of GPUs otherwise, and both would start again forever."""
    gpu = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    container = {"name": "worker", "image": "i", "command": ["python", "t.py"]}
    laid = {"replicas": 3, "template": {"spec": {"containers": [container], "tolerations": [gpu]}}}
    snapshot = job(shards={"replicas": 2, "placement": placement}, workers=laid, **NODES)
    made = render.pod(snapshot, CreateProcess("shard", 1, 4, 3, "job-shard-1-a4"))
    assert (gpu in made["spec"]["tolerations"]) == (placement == "Colocated") and len(made["spec"]["tolerations"]) >= 2


def test_spread_and_packed_say_so_to_the_scheduler_and_bind_nothing() -> None:
    def spec(placement: str | None, **given: Any) -> dict[str, Any]:
        snapshot = job(shards={"replicas": 2, **({"placement": placement} if placement else {}), **given}, **NODES)
        made: dict[str, Any] = render.pod(snapshot, CreateProcess("shard", 0, 1, 1, "job-shard-0-a1"))
        for where in _selectors(made["spec"]):
            assert where.items() <= made["metadata"]["labels"].items()
        return dict(made["spec"])

    spread, packed, usual = spec("Spread"), spec("Packed"), spec(None)
    (constraint,) = spread["topologySpreadConstraints"]
    assert (constraint["whenUnsatisfiable"], constraint["maxSkew"]) == ("ScheduleAnyway", 1) and "affinity" not in spread
    assert list(packed["affinity"]["podAffinity"]) == ["preferredDuringSchedulingIgnoredDuringExecution"]
    assert not {"affinity", "topologySpreadConstraints"} & usual.keys() and "topologySpreadConstraints" not in packed
    own = spec("Spread", template={"spec": {"topologySpreadConstraints": [{"topologyKey": "zone", "maxSkew": 2}]}})
    assert [it["topologyKey"] for it in own["topologySpreadConstraints"]] == ["kubernetes.io/hostname", "zone"]


def _selectors(spec: dict[str, Any]) -> list[dict[str, str]]:
    preferred = (spec.get("affinity") or {}).get("podAffinity", {}).get("preferredDuringSchedulingIgnoredDuringExecution", [])
    terms = [*(it["podAffinityTerm"] for it in preferred), *(spec.get("topologySpreadConstraints") or [])]
    return [term["labelSelector"]["matchLabels"] for term in terms if "labelSelector" in term]
