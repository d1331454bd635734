"""Every name that the manifest had before is refused, and the refusal names the present one."""

import re
from typing import Any

import pytest

from psjob_operator.api.crd import node
from psjob_operator.api.renamed import FIELDS, VALUES
from psjob_operator.api.validate import every_problem, schema, validate_job
from tests.unit.api_manifest import Case


def refusals(path: str, value: Any) -> list[str]:
    at, _, name = path.partition("[].")
    manifest = Case("renamed", {at: [{name: value}] if name else value}).manifest()
    made, problems = validate_job(manifest)
    assert made is None and every_problem(manifest)[1]
    return [re.sub(r"\[\d+\]", "[]", str(problem)) for problem in problems]


@pytest.mark.parametrize("path", FIELDS)
def test_an_old_field_is_refused_with_the_present_one(path: str) -> None:
    assert f'{path}: unknown field "{path}"; {FIELDS[path]}' in refusals(path, {})
    named = re.findall(r"spec(?:\.[A-Za-z]+(?:\[\])?)+", FIELDS[path])
    assert named and all(node(schema(), present) for present in named)
    with pytest.raises(KeyError):
        node(schema(), path)


@pytest.mark.parametrize(("path", "old"), sorted((path, old) for path, words in VALUES.items() for old in words))
def test_an_old_value_is_refused_with_the_present_one(path: str, old: str) -> None:
    (said,) = [each for each in refusals(path, old) if each.startswith(f"{path}: Unsupported value")]
    assert said.endswith(f"; write {VALUES[path][old]}") and VALUES[path][old] in node(schema(), path)["enum"]
