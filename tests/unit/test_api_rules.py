"""Every row of the table, from both sides of its limit; and the table itself."""

from __future__ import annotations

import copy
from typing import Any, get_args

import pytest

from psjob_operator.api.claim_template import claim_spec, retained
from psjob_operator.api.crd import node, schema
from psjob_operator.api.immutability import MUTABLE, SWITCHABLE, immutability_rules
from psjob_operator.api.rules import rules
from psjob_operator.api.spec import UpdateRule
from psjob_operator.api.template import template_rules
from psjob_operator.api.validate import MOST_PROBLEMS, validate_job
from psjob_operator.contract import UPDATE_RULES
from tests.unit.api_cases import PASSED, REFUSED
from tests.unit.api_manifest import GOOD, Case, changed


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_refused_with_field_and_sentence(case: Case) -> None:
    job, problems = validate_job(case.manifest())
    assert job is None
    lines = [str(problem) for problem in problems]
    assert any(line.startswith(case.field) and case.sentence in line for line in lines), lines
    assert all("\n" not in line and "Traceback" not in line for line in lines)


@pytest.mark.parametrize("case", PASSED, ids=lambda case: case.name)
def test_passed(case: Case) -> None:
    job, problems = validate_job(case.manifest())
    assert [str(problem) for problem in problems] == []
    assert job is not None


def test_the_smallest_manifest_gets_the_defaults() -> None:
    job, _ = validate_job(GOOD)
    assert job is not None
    assert job.spec.training.mode == "sync"
    assert job.spec.training.seed == 0
    assert job.spec.training.update_at is None
    assert job.spec.checkpoint.period_seconds == 30
    assert (job.spec.checkpoint.keep, retained(job.spec.checkpoint)) == (3, True)
    assert claim_spec(job.spec.checkpoint.volume_claim_template) == {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "10Gi"}},
    }
    assert (job.spec.run_policy.backoff_limit, job.spec.run_policy.clean_pod_policy) == (6, "Running")
    assert (job.spec.suspend, job.spec.managed_by, job.spec.injection) == (None, None, "Auto")


def test_judging_changes_nothing() -> None:
    raw = copy.deepcopy(GOOD)
    validate_job(raw)
    assert raw == GOOD


def test_a_null_stands_for_the_default_as_on_the_api_server() -> None:
    job, problems = validate_job(changed(GOOD, {"spec.checkpoint": {"keep": None}, "spec.training": None, "spec.suspend": None}))
    assert problems == []
    assert job is not None
    assert job.spec.checkpoint.keep == 3


def test_every_row_has_a_place_in_the_schema_and_words() -> None:
    whole = schema()
    for rule in (*rules(), *template_rules(), *immutability_rules(whole)):
        if rule.cel:
            assert node(whole, rule.at)
        assert rule.limit
        assert rule.remedy
        assert "\n" not in rule.message
        if rule.about:
            assert node(whole, ".".join(part for part in (rule.at, rule.about) if part)) is not None


def test_every_row_with_a_check_is_broken_by_a_case() -> None:
    """A row that no case breaks is a row that nobody has seen work."""
    broken = set()
    for case in REFUSED:
        broken |= {problem.limit for problem in validate_job(case.manifest())[1]}
    missing = [rule.limit for rule in (*rules(), *template_rules()) if rule.limit not in broken]
    assert missing == []


def test_every_field_of_the_spec_is_fixed_or_named_as_changeable() -> None:
    whole = schema()
    fixed = {".".join(part for part in (rule.at, rule.about) if part) for rule in immutability_rules(whole)}
    changeable = {*MUTABLE, *SWITCHABLE}
    assert not fixed & set(MUTABLE)

    def leaves(at: str, part: dict[str, Any]) -> list[str]:
        inner = part.get("properties", {})
        if not inner or at in fixed or at in changeable:
            return [at]
        return [leaf for name, child in inner.items() for leaf in leaves(f"{at}.{name}", child)]

    assert set(leaves("spec", whole["properties"]["spec"])) <= fixed | changeable


def test_a_manifest_names_the_rules_that_the_runtime_serves() -> None:
    assert get_args(UpdateRule) == tuple(UPDATE_RULES)


def test_a_rule_that_the_api_server_does_not_say_names_the_obstacle() -> None:
    for rule in (*rules(), *template_rules()):
        assert bool(rule.obstacle) != rule.at_admission, (rule.at, rule.limit)
    outside = {rule.about or rule.at for rule in rules() if not rule.at_admission}
    assert outside == {"workers.processes"}, "all others the API server says"


@pytest.mark.parametrize(
    "path_and_value",
    [
        ("spec", {f"x{number}": 1 for number in range(9000)}),
        ("spec.runPolicy", {"podFailurePolicy": {"rules": [{"action": 1}] * 7000}}),
        ("spec.workers.template.spec.containers", [{}] * 30_000),
    ],
    ids=["unknown fields", "rules", "containers"],
)
def test_of_many_problems_the_first_are_told(path_and_value: tuple[str, Any]) -> None:
    """Each takes time."""
    path, value = path_and_value
    job, problems = validate_job(changed(GOOD, {path: value}))
    assert job is None and MOST_PROBLEMS < len(problems) <= 2 * MOST_PROBLEMS + 10
    assert any("more problems" in str(problem) for problem in problems)
