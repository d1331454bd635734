"""A suspended job may be placed anew: what counts as placement, and what becomes of it at the resumption."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from psjob_operator import render
from psjob_operator.plan.actions import CreateProcess
from psjob_operator.plan.observed_state import ObservedState
from psjob_operator.plan.plan import plan
from psjob_operator.plan.pods import templates_digest
from tests.unit.plan_given import NOW, job, names, running, said

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
    part = spec.workers if role == "workers" else spec.ps
    made = part.model_copy(update={"template": laid(part.template or {}, over)})
    return replace(snapshot, spec=spec.model_copy(update={role: made, "suspend": suspend}), generation=snapshot.generation + 1)


@pytest.mark.parametrize("role", ["workers", "ps"])
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


@pytest.mark.parametrize("role", ["workers", "ps"])
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
    assert snapshot.status is not None and snapshot.status.pinned is not None
    old = snapshot.status.model_copy(update={"pinned": snapshot.status.pinned.model_copy(update={"templates": None})})
    decided = plan(replace(snapshot, status=old), NOW)
    assert decided.status.pinned is not None and decided.status.pinned.templates == templates_digest(snapshot.spec)
