"""A job that goes on from another one by its name: what it waits for, what it is pinned to, and that nothing moves it after that.

- A suspended job may be placed anew: what counts as placement, and what becomes of it at the resumption.
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from psjob_operator import render
from psjob_operator.api.status import JobStatus
from psjob_operator.plan.actions import CreateProcess, EnsureConfig, Plan
from psjob_operator.plan.observed_state import ObservedState, ResumeSource
from psjob_operator.plan.plan import plan
from psjob_operator.plan.pods import LOOK_SECONDS, templates_digest
from tests.unit.plan_given import NOW, job, names, pinned_of, running, said, with_internal

THERE: dict[str, Any] = {"persistentVolumeClaim": {"claimName": "first-checkpoints"}}
FOUND = ResumeSource("run-1", True, THERE)
ASKS: dict[str, Any] = {"resumeFrom": {"job": "first"}, "volume": THERE}


def asking(source: ResumeSource | None, **checkpoint: Any) -> ObservedState:
    return replace(job(checkpoint={**ASKS, **checkpoint}), resume_source=source)


def later(snapshot: ObservedState, decided: Plan, source: ResumeSource | None) -> ObservedState:
    """The snapshot after the plan's status was stored."""
    return replace(snapshot, status=decided.status, resume_source=source, written_at=NOW)


def ready(status: JobStatus) -> tuple[str, str]:
    found = status.condition("Ready")
    assert found is not None and found.status == "False"
    assert status.condition("Failed") is None
    return found.reason, found.message


@pytest.mark.parametrize(
    ("source", "checkpoint", "reason", "words"),
    [
        (None, {}, "WaitingForJob", "job first is not there; this job begins when it is and has a checkpoint"),
        (ResumeSource("", False, THERE), {}, "WaitingForJob", "job first has no checkpoint yet; this job begins when it has one"),
        (ResumeSource("run-1", False, THERE), {}, "WaitingForJob", "job first has no checkpoint yet"),
        (ResumeSource("run-1", True, None), {}, "CheckpointElsewhere", "job first keeps no checkpoints (spec.checkpoint.disabled)"),
        (
            FOUND,
            {"volume": None},
            "CheckpointElsewhere",
            "job first keeps its checkpoints on claim first-checkpoints, this job on claim job-checkpoints; "
            "make this job anew with volume: {persistentVolumeClaim: {claimName: first-checkpoints}}",
        ),
        (
            ResumeSource("", False, {"persistentVolumeClaim": {"claimName": "other"}}),
            {},
            "CheckpointElsewhere",
            "on claim other, this job on claim first-checkpoints",
        ),
        (
            ResumeSource("run-1", True, {"nfs": {"server": "a", "path": "/b"}}),
            {"volume": {"nfs": {"server": "a", "path": "/c"}}},
            "CheckpointElsewhere",
            "on a volume of kind nfs, this job on a volume of kind nfs; make this job anew with volume: {nfs: as there}",
        ),
    ],
)
def test_what_is_in_the_way_is_named_and_waited_for(
    source: ResumeSource | None, checkpoint: dict[str, Any], reason: str, words: str
) -> None:
    snapshot = asking(source, **checkpoint)
    decided = plan(snapshot, NOW)
    said, message = ready(decided.status)
    assert said == reason and words in message and len(message) <= 256
    assert decided.actions == () and decided.wake_at is not None and decided.wake_at <= NOW + LOOK_SECONDS
    assert decided.status.phase == "Pending" and pinned_of(decided.status).resumed_from is None
    again = plan(replace(later(snapshot, decided, source)), NOW + 3600)
    assert ready(again.status)[0] == reason and again.actions == (), "it never ends by itself"


@pytest.mark.parametrize(
    ("volume", "there"),
    [
        (THERE, THERE),
        ({"persistentVolumeClaim": {"claimName": "first-checkpoints", "readOnly": False}}, THERE),
        ({"nfs": {"server": "a", "path": "/b"}}, {"nfs": {"server": "a", "path": "/b"}}),
    ],
)
def test_it_begins_from_the_run_that_is_found_and_is_pinned_to_it(volume: dict[str, Any], there: dict[str, Any]) -> None:
    snapshot = asking(ResumeSource("run-1", True, there), volume=volume)
    decided = plan(snapshot, NOW)
    assert pinned_of(decided.status).resumed_from == "run-1" and decided.intent
    (action,) = [action for action in decided.actions if isinstance(action, EnsureConfig)]
    assert action.resumed_from == "run-1" and any(isinstance(it, CreateProcess) for it in decided.actions)
    config = json.loads(render.config(snapshot, action.format, action.encryption, action.resumed_from)["data"]["config.json"])
    assert config["checkpoint"]["resumeFrom"] == {"path": "/psjob-checkpoints/run-1"}


@pytest.mark.parametrize("source", [None, ResumeSource("run-2", True, THERE), ResumeSource("", False, None)], ids=["gone", "anew", "other"])
def test_what_becomes_of_the_other_job_later_changes_nothing(source: ResumeSource | None) -> None:
    snapshot = asking(FOUND)
    decided = plan(snapshot, NOW)
    after = plan(later(snapshot, decided, source), NOW + 1)
    assert pinned_of(after.status) == pinned_of(decided.status)
    assert {it.resumed_from for it in after.actions if isinstance(it, EnsureConfig)} <= {"run-1"}


def test_it_begins_when_the_wait_is_over_and_counts_no_restart() -> None:
    snapshot = asking(None)
    waiting = plan(snapshot, NOW)
    begun = plan(replace(later(snapshot, waiting, FOUND), live=True), NOW + 60)
    assert pinned_of(begun.status).resumed_from == "run-1" and begun.intent
    assert any(isinstance(it, CreateProcess) for it in begun.actions) and begun.status.restarts.total == 0


def test_a_job_that_was_suspended_goes_on_from_its_own_run() -> None:
    """A resumed run is pinned anew, and its first checkpoint stays what it was."""
    snapshot = asking(FOUND)
    begun = plan(snapshot, NOW).status
    suspended = begun.model_copy(update={"phase": "Suspended", "start_time": None})
    decided = plan(replace(snapshot, status=suspended, resume_source=None, live=True), NOW + 60)
    assert pinned_of(decided.status).resumed_from == "run-1"
    assert pinned_of(decided.status).key == 2


def test_a_run_by_its_uid_waits_for_nothing() -> None:
    decided = plan(asking(None, resumeFrom={"run": "run-0"}, volume=None), NOW)
    assert pinned_of(decided.status).resumed_from == "run-0"
    assert [it.resumed_from for it in decided.actions if isinstance(it, EnsureConfig)] == ["run-0"]
    anew = plan(job(), NOW)
    assert pinned_of(anew.status).resumed_from is None
    assert not any(isinstance(it, EnsureConfig) for it in anew.actions), "the config that is there is right"


Template = dict[str, Any]


def laid(base: Template, over: Template) -> Template:
    made = deepcopy(base)
    for key, value in over.items():
        made[key] = laid(made[key], value) if isinstance(value, dict) and isinstance(made.get(key), dict) else value
    return made


PLACED: list[tuple[str, Template]] = [
    ("labels", {"metadata": {"labels": {"team": "a"}}}),
    ("annotations", {"metadata": {"annotations": {"a": "b"}}}),
    ("nodeSelector", {"spec": {"nodeSelector": {"pool": "spot"}}}),
    ("tolerations", {"spec": {"tolerations": [{"operator": "Exists"}]}}),
    ("affinity", {"spec": {"affinity": {"nodeAffinity": {}}}}),
    ("schedulingGates", {"spec": {"schedulingGates": [{"name": "example.com/gate"}]}}),
]
OTHER: list[tuple[str, Template]] = [
    ("image", {"spec": {"containers": [{"name": "worker", "image": "me/other:2", "command": ["python", "train.py"]}]}}),
    ("a volume", {"spec": {"volumes": [{"name": "data", "emptyDir": {}}]}}),
    ("priorityClassName", {"spec": {"priorityClassName": "high"}}),
    ("finalizers", {"metadata": {"finalizers": ["example.com/a"]}}),
]


def asleep() -> ObservedState:
    """A job that ran and was suspended."""
    snapshot = running()
    stops = replace(snapshot, spec=snapshot.spec.model_copy(update={"suspend": True}))
    told = plan(stops, NOW).status
    over = plan(replace(stops, status=told, processes=()), NOW + 9).status
    assert over.phase == "Suspended"
    return replace(stops, status=over, processes=())


def changed(snapshot: ObservedState, over: Template, role: str = "workers", suspend: bool | None = None) -> ObservedState:
    spec = snapshot.spec
    part = spec.workers if role == "workers" else spec.shards
    made = part.model_copy(update={"template": laid(part.template or {}, over)})
    return replace(snapshot, spec=spec.model_copy(update={role: made, "suspend": suspend}), generation=snapshot.generation + 1)


@pytest.mark.parametrize("role", ["workers", "shards"])
@pytest.mark.parametrize("over", [row[1] for row in PLACED], ids=[row[0] for row in PLACED])
def test_what_places_pods_takes_effect_at_the_resumption(over: Template, role: str) -> None:
    slept = asleep()
    resumed = changed(slept, over, role)
    assert templates_digest(resumed.spec) == templates_digest(slept.spec)
    decided = plan(resumed, NOW + 100)
    assert len(names(decided)) == 5
    wanted = "worker" if role == "workers" else "shard"
    action = next(it for it in decided.actions if isinstance(it, CreateProcess) and it.role == wanted)
    pod = render.Pods(resumed, 65532).pod(action)
    for part, fields in over.items():
        for name, value in fields.items():
            there = pod[part][name]
            if name == "tolerations":
                assert value[0] in there
            elif isinstance(value, dict):
                assert value.items() <= there.items()
            else:
                assert there == value


@pytest.mark.parametrize("role", ["workers", "shards"])
@pytest.mark.parametrize("over", [row[1] for row in OTHER], ids=[row[0] for row in OTHER])
def test_a_run_is_not_resumed_as_another_program(over: Template, role: str) -> None:
    held = changed(asleep(), over, role)
    decided = plan(held, NOW + 100)
    assert not decided.actions and decided.status.phase == "Suspended"
    stalled = said(decided.status)["Stalled"]
    assert stalled.reason == "TemplateChanged" and "Set spec.suspend to true, put it back" in stalled.message
    # Put back, it goes on.
    again = plan(replace(asleep(), status=decided.status, spec=running().spec), NOW + 200)
    assert len(names(again)) == 5 and "Stalled" not in said(again.status)


def test_a_job_that_never_ran_may_become_any_other_before_it_does() -> None:
    made = job(suspend=True)
    slept = replace(made, status=plan(made, NOW).status)
    decided = plan(changed(slept, OTHER[0][1]), NOW + 9)
    assert len(names(decided)) == 5


def test_a_status_of_an_older_operator_has_no_digest_and_gets_one() -> None:
    snapshot = running()
    assert snapshot.status is not None
    old = with_internal(snapshot.status, pinned=pinned_of(snapshot.status).model_copy(update={"templates": None}))
    decided = plan(replace(snapshot, status=old), NOW)
    assert pinned_of(decided.status).templates == templates_digest(snapshot.spec)
