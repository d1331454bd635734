"""Whose fault a refused pod is: the spec's own ends the job, what a LimitRange or a webhook put there is waited for, by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from psjob_operator import render
from psjob_operator.api.status import CheckpointStatus, Pinned
from psjob_operator.cluster.client import Cause, causes, limit_words, limited, of_the_pod, ranges
from psjob_operator.plan.actions import CreateProcess
from psjob_operator.plan.observed_state import Refusal
from psjob_operator.plan.plan import plan
from tests.unit.plan_given import NOW, job, running

SHARD = {"name": "shard", "image": "a", "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}}, "env": [{"name": "A", "value": "1"}]}
BODY = {
    "metadata": {"labels": {"team": "a b"}},
    "spec": {"containers": [SHARD], "initContainers": [{"name": "psjob-inject", "image": "r"}]},
}
BOTH = {"spec": {"containers": [{"name": "a", "resources": {"requests": {"cpu": "2"}, "limits": {"cpu": 1, "nvidia.com/gpu": 1}}}]}}
ASKED = "spec.containers[0].resources.requests"
CPU = 'Invalid value: "500m": must be less than or equal to cpu limit of 250m'


@pytest.mark.parametrize(
    ("field", "message", "body", "own"),
    [
        (ASKED, CPU, BODY, False),
        (ASKED, 'Invalid value: "2": must be less than or equal to cpu limit of 1', BOTH, True),
        (ASKED, 'Invalid value: "2": must be equal to nvidia.com/gpu limit of 1', BOTH, True),
        ("spec.containers[0].resources.requests[cpu]", 'Invalid value: "500m": must be an integer', BODY, True),
        ("spec.containers[0].image", "Required value", BODY, False),
        ("spec.containers[0].command", "Required value", BODY, True),
        ("spec.containers[1].image", "Required value", BODY, False),
        ("spec.initContainers[0].image", 'Invalid value: " x": must not have leading or trailing whitespace', BODY, False),
        ("spec.containers[0].env[0].name", 'Invalid value: "A": must not be so', BODY, True),
        ("spec.containers[0].env[3].name", 'Invalid value: "=": must not be so', BODY, False),
        ("metadata.labels", 'Invalid value: "a b": a valid label must be an empty string or …', BODY, True),
        ("metadata.labels", 'Invalid value: "c d": a valid label must be an empty string or …', BODY, False),
        ("spec.containers[0]", "Forbidden: may not be so", BODY, True),
        ("spec.volumes[0].name", 'Not found: "data"', BODY, False),
    ],
)  # fmt: skip
def test_a_fault_of_what_was_sent_is_the_specs_and_no_other_is(field: str, message: str, body: dict[str, Any], own: bool) -> None:
    assert of_the_pod((Cause(field, message),), body) is own
    assert of_the_pod((Cause("spec.nowhere", "Forbidden: not there"), Cause(field, message)), body) is own


@pytest.mark.parametrize(
    ("told", "message", "resources"),
    [
        ((Cause(ASKED, CPU), Cause(ASKED, CPU.replace("cpu", "memory"))), "", ("cpu", "memory")),
        ((), 'pods "p" is forbidden: maximum memory usage per Container is 256Mi, but limit is 1Gi', ("memory",)),
        ((), 'pods "p" is forbidden: [minimum cpu usage per Pod is 1, minimum memory usage per Pod is 1Gi]', ("cpu", "memory")),
        ((), "cpu max limit to request ratio per Container is 2, but no limit is specified or limit is 0", ("cpu",)),
        ((), "exceeded quota: gpus, requested: pods=1, used: pods=1, limited: pods=1", ()),
        ((Cause("spec.containers[0].image", "Required value"),), "", ()),
    ],
)  # fmt: skip
def test_a_limit_range_is_known_by_what_it_refuses(told: tuple[Cause, ...], message: str, resources: tuple[str, ...]) -> None:
    assert limited(told, message, BODY) == resources


def test_the_limit_range_is_named_with_what_to_do() -> None:
    found = [
        {"metadata": {"name": name}, "spec": {"limits": limits}}
        for name, limits in (
            ("defaults", [{"type": "Container", "default": {"cpu": "250m"}}]),
            ("disks", [{"type": "PersistentVolumeClaim", "max": {"cpu": "1"}}]),
            ("memory", [{"type": "Pod", "max": {"memory": "1Gi"}}]),
        )
    ]
    assert ranges(found, ("cpu",)) == ("defaults",)
    words = limit_words((Cause(ASKED, CPU),), "a long one", ("cpu",), ("defaults",), "team")
    minded = 'limits cpu: "500m": must be less than or equal to cpu limit of 250m; change it, or the template\'s resources'
    assert words == f"LimitRange defaults of namespace team {minded}"
    words = limit_words((), 'pods "p" is forbidden: minimum cpu usage per Pod is 1', ("cpu",), (), "team")
    assert words.startswith("a LimitRange of namespace team limits cpu: minimum cpu usage per Pod is 1; ")


@pytest.mark.parametrize("details", [None, [], {"causes": None}, {"causes": [None, {"field": ""}, {"message": "x"}]}])
def test_details_that_name_no_field_are_no_causes(details: Any) -> None:
    assert causes(details) == ()


def _resources(asks_nothing: bool = False, **spec: Any) -> list[dict[str, Any]]:
    process = CreateProcess("shard", 0, 1, 1, "job-ps-0-a1", pinned=Pinned(runtime_image="r:1", container="worker", key=1))
    made = render.Pods(job(**spec), asks_nothing=asks_nothing).pod(process)["spec"]
    return [made["containers"][0].get("resources", {}), made["initContainers"][0]["resources"]]


@pytest.mark.parametrize(
    ("given", "requests"),
    [
        ({}, {"cpu": "500m", "memory": "1Gi"}),
        ({"limits": {"cpu": "250m", "memory": "512Mi"}}, {"cpu": "250m", "memory": "512Mi"}),
        ({"limits": {"cpu": 0.25}}, {"cpu": 0.25, "memory": "1Gi"}),
        ({"limits": {"cpu": 4, "memory": "64Gi"}}, {"cpu": "500m", "memory": "1Gi"}),
        ({"limits": {"memory": "512Mi"}, "requests": {"memory": "256Mi"}}, {"cpu": "500m", "memory": "256Mi"}),
    ],
)
def test_a_shard_never_asks_for_more_than_its_limits(given: dict[str, Any], requests: dict[str, Any]) -> None:
    asked = _resources(ps={"template": {"spec": {"containers": [{"name": "shard", "resources": given}]}}})
    assert [it["requests"] for it in asked] == [requests, requests]


def test_a_template_that_speaks_of_the_whole_pod_has_no_requests_of_psjobs_beside_it() -> None:
    container, _ = _resources(ps={"template": {"spec": {"resources": {"limits": {"memory": "512Mi"}}}}})
    assert container == {}


def test_what_psjob_asks_for_by_itself_gives_way_and_what_a_template_says_does_not() -> None:
    assert _resources(asks_nothing=True) == [{}, {}]
    given = {"requests": {"cpu": "500m"}}
    assert _resources(True, ps={"template": {"spec": {"containers": [{"name": "shard", "resources": given}]}}}) == [given, given]
    process = CreateProcess("worker", 0, 1, 1, "job-worker-0-r1", pinned=Pinned(runtime_image="r:1", container="worker", key=1))
    inits = [render.Pods(job(), asks_nothing=asks).pod(process)["spec"]["initContainers"][0]["resources"] for asks in (False, True)]
    assert inits == [{"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"cpu": "100m", "memory": "64Mi"}}, {}]


def test_a_template_of_which_a_checkpoint_was_made_ends_no_job_when_it_is_resumed() -> None:
    begun = running()
    assert begun.status is not None
    for step, phase in ((0, "Failed"), (7, "Pending")):
        kept = CheckpointStatus(step=step, time="2026-01-01T00:00:00Z") if step else None
        status = begun.status.model_copy(update={"phase": "Suspended", "conditions": (), "checkpoint": kept})
        resumed = plan(replace(begun, processes=(), status=status), NOW)
        name = next(iter(sorted(resumed.grants)))
        refusal = Refusal(name, 422, "spec.containers[0].image: Required value", NOW, 1, invalid=True)
        again = replace(begun, processes=(), status=resumed.status, granted=resumed.grants, refusals=(refusal,))
        assert plan(again, NOW + 1).status.phase == phase
