"""What the API server refuses and takes: the same manifests as for `psjob run`, the same words, the same places."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from psjob_operator.api.validate import validate_job
from tests.integration.api_client import Api
from tests.soaking import rotating
from tests.unit.api_cases import PASSED, REFUSED
from tests.unit.api_manifest import GOOD, Case, changed

pytestmark = pytest.mark.cluster


@pytest.fixture
def namespace(bare_namespace: str) -> str:
    return bare_namespace


def one_of_each(cases: Iterable[Case], rule: Callable[[Case], object]) -> list[Any]:
    """One body a rule; further ones rotate: tests/unit holds all of them against the rules that the CRD is made of."""
    seen: set[object] = set()
    found = []
    for case in cases:
        found.append(rotating(case, id=case.name) if rule(case) in seen else pytest.param(case, id=case.name))
        seen.add(rule(case))
    return found


def of_field(case: Case) -> tuple[str, str]:
    """The sentence of a rule and the field that it is about, without places in lists."""
    return re.sub(r"\[\d+\]", "", case.field), case.server_sentence or case.sentence


@pytest.mark.parametrize("case", one_of_each((case for case in REFUSED if case.server), of_field))
def test_refused_in_the_same_words(job_api: Api, case: Case) -> None:
    code, answer = job_api.create("default", case.manifest(), dry=True)
    message = answer.get("message", "").replace("map[string]interface {}{", "{")  # as an older API server writes an object
    assert code in (400, 422), answer
    assert case.field in message
    assert (case.server_sentence or case.sentence) in message
    if case.server_sentence is None:
        _, problems = validate_job(case.manifest())
        told = [cause["message"] for cause in answer["details"]["causes"] if cause["field"] == case.field]
        ours = [f"{problem.limit}; {problem.remedy}" for problem in problems if problem.field == case.field]
        assert ours
        assert [any(text.endswith(sentence) for text in told) for sentence in ours] == [True] * len(ours), (told, ours)


@pytest.mark.parametrize(
    "case", one_of_each((case for case in REFUSED if not case.server and case.field != "metadata.name"), lambda case: case.sentence)
)
def test_what_cel_cannot_see_is_left_to_the_operator(job_api: Api, case: Case) -> None:
    """A row that CEL comes to see belongs to the API server: then this fails and the row moves."""
    code, answer = job_api.create("default", case.manifest(), dry=True)
    assert code == 201, answer


@pytest.mark.parametrize(
    "case", one_of_each((case for case in REFUSED if not case.server and case.field == "metadata.name"), lambda case: case.sentence)
)
def test_names_that_no_object_may_have(job_api: Api, case: Case) -> None:
    code, answer = job_api.create("default", case.manifest(), dry=True)
    assert code == 422
    assert "metadata.name" in answer["message"]


@pytest.mark.parametrize("case", one_of_each(PASSED, lambda case: tuple(case.change)))
def test_taken_and_judged_the_same_when_it_comes_back(job_api: Api, case: Case) -> None:
    code, answer = job_api.create("default", case.manifest(), dry=True)
    assert code == 201, answer
    job, problems = validate_job(answer)
    assert [str(problem) for problem in problems] == []
    mine, _ = validate_job(case.manifest())
    assert job is not None
    assert mine is not None
    assert job.spec == mine.spec, "what the API server fills in and what `psjob run` fills in differ"


def test_templates_come_back_untouched(job_api: Api) -> None:
    case = next(case for case in PASSED if case.name == "everything-of-a-pod")
    sent = case.manifest()["spec"]["workers"]["template"]
    _, answer = job_api.create("default", case.manifest(), dry=True)
    back = answer["spec"]["workers"]["template"]
    assert back == sent


def test_a_large_manifest_is_within_the_cost_of_the_rules(job_api: Api, namespace: str) -> None:
    containers: list[dict[str, Any]] = [
        {"name": f"c{i}", "image": "i", "env": [{"name": f"VARIABLE_{i}_{k}", "value": "x"} for k in range(140)]} for i in range(15)
    ]
    containers.append({"name": "worker", "image": "i", "command": ["python", "-c", "x" * 8000]})
    job = changed(GOOD, {"spec.workers.template.spec.containers": containers})
    assert 90_000 < len(json.dumps(job["spec"])) < 102_400
    assert validate_job(job)[1] == []
    code, answer = job_api.create(namespace, job)
    assert code == 201, answer
    code, answer = job_api.merge(namespace, "digits", {"spec": {"suspend": True}})
    assert code == 200, answer
    code, answer = job_api.merge(namespace, "digits", {"spec": {"injection": "none"}})
    assert code == 422


def test_a_generated_name_is_judged_too(job_api: Api) -> None:
    job = changed(GOOD, {"metadata": {"generateName": "digits-"}})
    assert job_api.create("default", job, dry=True)[0] == 201
    job["metadata"]["generateName"] = "a" * 39 + "-"
    code, answer = job_api.create("default", job, dry=True)
    assert code == 422
    assert "must be 1 to 40 lower-case letters" in answer["message"]
