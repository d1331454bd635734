"""What may change once a job is made, and what of its status never goes back."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from tests.integration.api_client import Api
from tests.unit.api_manifest import GOOD, REMOVED, changed

pytestmark = pytest.mark.cluster
FIXED = "is fixed; make a new job"
FIXED_UNTIL_SUSPENDED = "is fixed while the job is not suspended; suspend the job to place its pods anew, or make a new job"
PLACED = ("spec.workers.template", "spec.shards.template", "spec.stages")
FULL = changed(
    GOOD,
    {
        "spec.training.updateAt": "shard",
        "spec.training.compression": {"push": "topk", "ratio": 0.05},
        "spec.shards.template": {"spec": {"nodeSelector": {"a": "b"}}},
        "spec.checkpoint": {"everySteps": 10, "volume": {"persistentVolumeClaim": {"claimName": "x"}}, "resumeFrom": {"run": "r"}},
        "spec.managedBy": "psjob.dev/operator",
    },
)


@pytest.fixture
def namespace(bare_namespace: str) -> str:
    return bare_namespace


def shards(*attempts: int) -> list[dict[str, Any]]:
    return [{"index": index, "replica": 0, "attempt": attempt, "state": "Serving"} for index, attempt in enumerate(attempts)]


STATUS = {
    "phase": "Running",
    "run": "u1",
    "internal": {"term": 3, "workerStart": 2},
    "shards": shards(1, 2),
    "workers": {"desired": 4},
    "observedGeneration": 1,
}


@pytest.fixture
def job(job_api: Api, namespace: str) -> str:
    """A running job; the namespace it is in."""
    assert job_api.create(namespace, FULL)[0] == 201
    assert job_api.change(namespace, {"status": STATUS}, status=True) == ""
    return namespace


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.training.seed", 7),
        ("spec.training.delay", 1),
        ("spec.training.updateAt", "worker"),
        ("spec.training.transport", "tcp"),
        ("spec.training.updateAt", None),
        ("spec.training.compression.push", "int8"),
        ("spec.training.compression.ratio", 0.1),
        ("spec.shards.replicas", 3),
        ("spec.shards.replicas", 1),
        ("spec.shards.progressDeadlineSeconds", 20),
        ("spec.shards.template", None),
        ("spec.shards.template", {"spec": {"nodeSelector": {"a": "c"}}}),
        ("spec.workers.replicas", 5),
        ("spec.workers.replicas", None),
        ("spec.stages", [{"name": "a", "replicas": 2}, {"name": "b", "replicas": 2}]),
        ("spec.workers.template", {"spec": {"tolerations": [{"operator": "Exists"}]}}),
        ("spec.workers.template", {"metadata": {"annotations": {"a": "b"}}}),
        ("spec.checkpoint.periodSeconds", 60),
        ("spec.checkpoint.everySteps", 20),
        ("spec.checkpoint.everySteps", None),
        ("spec.checkpoint.keep", 4),
        ("spec.checkpoint.volume", None),
        ("spec.checkpoint.volume", {"persistentVolumeClaim": {"claimName": "y"}}),
        ("spec.checkpoint.volume", {"persistentVolumeClaim": {"readOnly": False}}),
        ("spec.checkpoint.volumeClaimTemplate", {"spec": {"accessModes": ["ReadWriteMany"]}}),
        ("spec.checkpoint.persistentVolumeClaimRetentionPolicy", {"whenDeleted": "Retain"}),
        ("spec.checkpoint.resumeFrom", {"run": "other"}),
        ("spec.checkpoint.disabled", False),
        ("spec.runPolicy.successPolicy", "FirstWorker"),
        ("spec.managedBy", "example.com/other"),
        ("spec.managedBy", None),
        ("spec.injection", "None"),
    ],
)
def test_the_spec_is_fixed(job_api: Api, job: str, path: str, value: Any) -> None:
    told = job_api.change(job, changed({}, {path: value}))
    assert f"{path}: Invalid value: " in told
    assert (FIXED_UNTIL_SUSPENDED if path in PLACED else FIXED) in told


def test_a_claims_template_is_fixed_in_fields_that_the_crd_does_not_know_too(job_api: Api, namespace: str) -> None:
    claim = {"spec": {"accessModes": ["ReadWriteOnce"], "volumeName": "a"}, "metadata": {"labels": {"a": "b"}}}
    kept = {"volumeClaimTemplate": claim, "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete"}}
    assert job_api.create(namespace, changed(GOOD, {"spec.checkpoint": kept}))[0] == 201
    for path, value in (
        ("volumeClaimTemplate", {"spec": {"volumeName": "b"}}),
        ("volumeClaimTemplate", {"spec": {"storageClassName": "fast"}}),
        ("volumeClaimTemplate", {"spec": {"accessModes": ["ReadWriteMany"]}}),
        ("volumeClaimTemplate", {"metadata": {"labels": {"a": "c"}}}),
        ("volumeClaimTemplate", None),
        ("persistentVolumeClaimRetentionPolicy", {"whenDeleted": "Retain"}),
        ("persistentVolumeClaimRetentionPolicy", None),
    ):
        told = job_api.change(namespace, {"spec": {"checkpoint": {path: value}}})
        assert f"spec.checkpoint.{path}: Invalid value: {FIXED}" in told, (path, value, told)


def test_stages_are_fixed(job_api: Api, namespace: str) -> None:
    stages = [{"name": "a"}, {"name": "b", "cut": "1", "replicas": 2}]
    first = {"spec.workers.replicas": REMOVED, "spec.stages": stages, "spec.training.pipeline": {"microbatches": 4}}
    assert job_api.create(namespace, changed(GOOD, first))[0] == 201
    for path, value in (
        ("spec.stages", [{"name": "a", "replicas": 2}, {"name": "b", "cut": "1"}]),
        ("spec.stages", [stages[0], {**stages[1], "cut": "2"}]),
        ("spec.stages", None),
        ("spec.training.pipeline", {"microbatches": 8}),
        ("spec.training.pipeline", None),
        ("spec.workers.replicas", 3),
    ):
        told = job_api.change(namespace, changed({}, {path: value}))
        assert f"{path}: Invalid value: " in told, (path, told)
        assert FIXED in told or (path in PLACED and FIXED_UNTIL_SUSPENDED in told), (path, told)
    told = job_api.change(namespace, {"spec": {"training": {"mode": "async"}}})
    assert "spec.training.mode: Invalid value: " in told and "must be sync with spec.stages" in told


PLACING: list[dict[str, Any]] = [
    {"metadata": {"labels": {"a": "b"}, "annotations": {"c": "d"}}},
    {"spec": {"nodeSelector": {"pool": "a"}, "tolerations": [{"operator": "Exists"}], "schedulingGates": [{"name": "example.com/gate"}]}},
    {"spec": {"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}}},
]


def test_a_suspended_job_may_be_placed_anew_and_resumed_in_one_write(job_api: Api, job: str) -> None:
    for part in ("workers", "shards"):
        for template in PLACING:
            assert f"spec.{part}.template: Invalid value: " in job_api.change(job, {"spec": {part: {"template": template}}})
            told = job_api.change(job, {"spec": {"suspend": True, part: {"template": template}}})
            assert told, "the write that suspends places nothing: its pods still run"
    assert job_api.merge(job, "digits", {"spec": {"suspend": True}})[0] == 200
    for part in ("workers", "shards"):
        for template in PLACING:
            assert job_api.change(job, {"spec": {part: {"template": template}}}) == ""
    told = job_api.change(job, {"spec": {"workers": {"replicas": 5}}})
    assert FIXED in told
    assert job_api.change(job, {"spec": {"suspend": False, "workers": {"template": PLACING[0]}}}) == ""
    assert FIXED_UNTIL_SUSPENDED in job_api.change(job, {"spec": {"workers": {"template": {"metadata": {"labels": {"a": "z"}}}}}})


def test_stages_of_a_suspended_job_may_be_placed_anew_and_nothing_else_of_them(job_api: Api, namespace: str) -> None:
    worker = GOOD["spec"]["workers"]["template"]
    stages = [{"name": "a"}, {"name": "b", "cut": "1", "replicas": 2, "template": worker}]
    first = {"spec.workers.replicas": REMOVED, "spec.stages": stages, "spec.training.pipeline": {"microbatches": 4}, "spec.suspend": True}
    assert job_api.create(namespace, changed(GOOD, first))[0] == 201
    placed = {**worker, "spec": {**worker["spec"], "nodeSelector": {"pool": "a"}}}
    assert job_api.change(namespace, {"spec": {"stages": [stages[0], {**stages[1], "template": placed}]}}) == ""
    for other in (
        [stages[0], {**stages[1], "replicas": 3}],
        [stages[0], {**stages[1], "cut": "2"}],
        [stages[0], {"name": "b", "cut": "1", "replicas": 2}],
        [{**stages[0], "name": "c"}, stages[1]],
        stages[:1],
    ):
        told = job_api.change(namespace, {"spec": {"stages": other}})
        assert "spec.stages" in told, (other, told)


def test_what_may_change(job_api: Api, job: str) -> None:
    policy = {"backoffLimit": 3, "activeDeadlineSeconds": 60, "ttlSecondsAfterFinished": 5, "cleanPodPolicy": "All"}
    for spec in (
        {"suspend": True},
        {"suspend": False},
        {"suspend": None},
        {"checkpoint": {"request": 1}},
        {"checkpoint": {"request": 2}},
        {"checkpoint": {"request": None}},
        {"runPolicy": policy},
        {"runPolicy": {"activeDeadlineSeconds": None}},
        {"runPolicy": {"backoffLimitPerRole": {"shard": 1}}},
        {"runPolicy": {"podFailurePolicy": {"rules": [{"action": "FailJob", "onReasons": ["Error"]}]}}},
        {"runPolicy": {"backoffLimitPerRole": {"worker": 1}, "podFailurePolicy": {"rules": []}}},
        {"runPolicy": {"backoffLimitPerRole": None, "podFailurePolicy": None}},
    ):
        assert job_api.change(job, {"spec": spec}) == ""


def test_the_mode_changes_among_three(job_api: Api, namespace: str) -> None:
    assert job_api.create(namespace, GOOD)[0] == 201
    for training in (
        {"mode": "async"},
        {"mode": "bounded", "bounded": {"staleness": 5}},
        {"bounded": {"staleness": 2}},
        {"mode": "sync", "bounded": None},
    ):
        assert job_api.change(namespace, {"spec": {"training": training}}) == ""
    told = job_api.change(namespace, {"spec": {"training": {"mode": "threshold"}}})
    assert "changes among sync, bounded, async only; make a new job" in told


def test_a_number_of_another_mode_is_fixed(job_api: Api, namespace: str) -> None:
    assert job_api.create(namespace, changed(GOOD, {"spec.training": {"mode": "threshold", "threshold": {"staleness": 5}}}))[0] == 201
    for training in ({"threshold": {"staleness": 2}}, {"threshold": None}, {"mode": "async"}):
        assert job_api.change(namespace, {"spec": {"training": training}}) != ""


BACK = [
    ("term", {"internal": {"term": 2}}, "status.internal.term", "must not go back; a lower term"),
    ("term gone", {"internal": {"term": None}}, "status.internal.term", "must not go back; a lower term"),
    ("run gone", {"run": None}, "status.run", "must not be taken away, nor change after Complete or Failed"),
    ("start", {"internal": {"workerStart": 1}}, "status.internal.workerStart", "must not go back; names of worker pods"),
    ("start gone", {"internal": {"workerStart": None}}, "status.internal.workerStart", "must not go back; names of worker pods"),
    ("internal gone", {"internal": None}, "status.internal.workerStart", "must not go back; names of worker pods"),
    ("attempt", {"shards": shards(1, 1)}, "status.shards[1].attempt", "must not go back; a lower attempt"),
    ("fewer shards", {"shards": shards(1)}, "status.shards", "must not shrink; each entry"),
    ("no shards", {"shards": []}, "status.shards", "must not shrink; each entry"),
    ("shards gone", {"shards": None}, "status.shards", "must not shrink; each entry"),
    (
        "other shards",
        {"shards": [{"index": 1, "replica": 0, "attempt": 5}, {"index": 2, "replica": 0, "attempt": 5}]},
        "status.shards",
        "must hold each index",
    ),
    ("two of a shard", {"shards": [*shards(1, 2), {"index": 1, "replica": 1, "attempt": 1}]}, "status.shards", "must hold each index"),
    ("all gone", None, "status.internal.term", "must not go back; a lower term"),
]


@pytest.mark.parametrize(("patch", "field", "sentence"), [row[1:] for row in BACK], ids=[row[0] for row in BACK])
def test_status_never_goes_back(job_api: Api, job: str, patch: Any, field: str, sentence: str) -> None:
    before = job_api.get(job, "digits")
    told = job_api.change(job, {"status": patch}, status=True)
    assert f"{field}: Invalid value: " in told
    assert sentence in told
    assert job_api.get(job, "digits") == before


@pytest.mark.parametrize("status", [REMOVED, None, {}], ids=["without", "null", "empty"])
def test_status_never_goes_back_by_replacing_it(job_api: Api, job: str, status: Any) -> None:
    before = job_api.get(job, "digits")
    code, answer = job_api.replace(job, changed(before, {"status": status}), status=True)
    assert code == 422, answer
    # An older API server quotes the value.
    assert re.search(r'status\.internal\.term: Invalid value: ("object": )?must not go back', answer["message"])
    assert job_api.get(job, "digits") == before


def test_a_write_of_the_object_leaves_status_alone(job_api: Api, job: str) -> None:
    before = job_api.get(job, "digits")
    code, answer = job_api.replace(job, changed(before, {"status": REMOVED}))
    assert code == 200, answer
    assert job_api.change(job, {"status": {"phase": "Failed"}}) == ""
    assert job_api.get(job, "digits")["status"] == before["status"]


def test_numbers_rise_and_shards_may_be_added(job_api: Api, job: str) -> None:
    higher = {"internal": {"term": 4}, "shards": shards(1, 3)}
    for patch in (higher, {"internal": {"workerStart": 3}}, {"shards": shards(1, 3, 1)}, {"phase": "Recovering"}):
        assert job_api.change(job, {"status": patch}, status=True) == ""


def standing(kind: str, status: str = "True") -> dict[str, Any]:
    at = "2026-01-01T00:00:00Z"
    return {"conditions": [{"type": kind, "status": status, "reason": "Told", "message": "", "lastTransitionTime": at}]}


@pytest.mark.parametrize("phase", ["Complete", "Failed"])
def test_a_finished_job_stays_finished(job_api: Api, job: str, phase: str) -> None:
    ended, other = {"phase": phase, **standing(phase)}, "Failed" if phase == "Complete" else "Complete"
    assert job_api.merge(job, "digits", {"status": {"phase": phase}}, status=True)[0] == 200, "a word alone ends nothing"
    assert job_api.merge(job, "digits", {"status": {"phase": "Running"}}, status=True)[0] == 200
    assert job_api.merge(job, "digits", {"status": ended}, status=True)[0] == 200
    assert job_api.merge(job, "digits", {"status": {**ended, "completionTime": "2026-01-01T00:00:00Z"}}, status=True)[0] == 200
    for patch in (
        standing(phase, "False"),
        standing(other),
        standing("Ready"),
        {"conditions": []},
        {"conditions": None},
        {"phase": "Running"},
        {"phase": None},
        {"phase": "Failed" if phase == "Complete" else "Complete"},
        {"phase": "Pending", "internal": {"term": 9}},
        {"phase": "Pending", "run": "u2"},
        {"run": "u2"},
        None,
    ):
        told = job_api.change(job, {"status": patch}, status=True)
        left = "must not leave Complete or Failed; a finished job stays finished" in told
        assert left or "nor change after Complete or Failed but with a higher" in told, (patch, told)


def test_a_status_from_a_backup_is_taken_over_with_higher_numbers_alone(job_api: Api, namespace: str) -> None:
    """A tool made the job again and wrote the old run's status back: its numbers bind, its facts do not."""
    assert job_api.create(namespace, FULL)[0] == 201
    old = {**STATUS, "run": "old", "phase": "Complete", **standing("Complete")}
    assert job_api.merge(namespace, "digits", {"status": old}, status=True)[0] == 200
    new = {"run": "new", "phase": "Pending", "conditions": [], "shards": shards(2, 3), "internal": {"workerStart": 3}}
    assert job_api.merge(namespace, "digits", {"status": new}, status=True)[0] == 422
    new["internal"] = {"term": 4, "workerStart": 3}
    assert job_api.merge(namespace, "digits", {"status": {**new, "shards": shards(1, 1)}}, status=True)[0] == 422
    assert job_api.change(namespace, {"status": new}, status=True) == ""
    assert job_api.change(namespace, {"status": old}, status=True), "a second write of the old status came through"


@pytest.mark.parametrize(
    ("patch", "field"),
    [
        ({"phase": "Done"}, "status.phase"),
        ({"shards": [{"index": 0, "replica": 0, "attempt": 5, "state": "Fine"}, *shards(1, 5)[1:]]}, "status.shards[0].state"),
        ({"shards": shards(5, 5) + shards(5)}, "status.shards[2]"),
        ({"shards": [{"index": 0, "attempt": 5}, *shards(1, 5)[1:]]}, "status.shards[0].replica"),
        (
            {"conditions": [{"type": "Ready", "status": "Maybe", "reason": "X", "lastTransitionTime": "2026-01-01T00:00:00Z"}]},
            "status.conditions[0].status",
        ),
        ({"startTime": "yesterday"}, "status.startTime"),
        ({"internal": {"term": "4"}}, "status.internal.term"),
        ({"workers": {"problems": [{"index": i, "reason": "X"} for i in range(9)]}}, "status.workers.problems"),
        ({"shards": shards(*[5] * 257)}, "status.shards"),
        ({"colour": "red"}, "status.colour"),
    ],
)
def test_a_status_that_is_none_is_refused(job_api: Api, job: str, patch: dict[str, Any], field: str) -> None:
    code, answer = job_api.merge(job, "digits", {"status": patch}, status=True)
    assert code in (400, 422), answer
    assert field in answer["message"]


def test_the_rules_cost_little_at_256_shards(job_api: Api, namespace: str) -> None:
    assert job_api.create(namespace, changed(GOOD, {"spec.shards.replicas": 256, "spec.workers.replicas": 4000}))[0] == 201
    took = []
    for number in (1, 2, 3):
        full = [{"index": i, "replica": 0, "attempt": number, "state": "Serving", "pod": f"digits-shard-{i}-a{number}"} for i in range(256)]
        internal, workers = {"term": number, "workerStart": number}, {"succeededIndexes": ",".join(str(i) for i in range(0, 4000, 2))}
        began = time.monotonic()
        code, answer = job_api.merge(
            namespace, "digits", {"status": {"run": "u", "internal": internal, "shards": full, "workers": workers}}, status=True
        )
        took.append(time.monotonic() - began)
        assert code == 200, answer
    print(f"status write at 256 shards: {min(took):.3f} s")


def test_a_status_from_a_backup_of_an_unfinished_job_is_taken_over(job_api: Api, job: str) -> None:
    """An operator that finds the old run's status on a suspended job has nothing to raise yet."""
    assert job_api.change(job, {"status": {"run": "new", "phase": "Suspended"}}, status=True) == ""
