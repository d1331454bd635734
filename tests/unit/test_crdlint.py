"""The lint of the CRD finds nothing in ours, and each fault that is planted."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from hack.crdlint import EXCEPTIONS, findings
from psjob_operator.api.crd import crd, node, schema
from tests.unit.crd_schema import nodes

CONDITIONS = "status.conditions"


def test_the_crd_is_clean() -> None:
    assert findings(crd()) == []


@pytest.mark.parametrize(
    ("rule", "at", "gone", "put"),
    [
        ("integers", "spec.ps.shards", ("format",), {}),
        ("integers", "status.view", ("maximum",), {}),
        ("integers", "spec.workers.replicas", (), {"maximum": 2**40}),
        ("nofloats", "spec.runPolicy.backoffLimit", (), {"type": "number"}),
        ("nobools", "spec.checkpoint.keep", (), {"type": "boolean"}),
        ("maxlength", "spec.checkpoint.interval", ("maxLength",), {}),
        ("maxlength", "status.shards", ("maxItems",), {}),
        ("maxlength", "status.restarts.causes", ("maxProperties",), {}),
        ("ssatags", "spec.stages", ("x-kubernetes-list-type",), {}),
        ("ssatags", CONDITIONS, ("x-kubernetes-list-map-keys",), {}),
        ("ssatags", "spec.workers.template.spec.containers[].env", (), {"x-kubernetes-list-map-keys": ["key"]}),
        ("nonullable", "spec.suspend", (), {"nullable": True}),
        ("commentstart", "status.phase", ("description",), {}),
        ("optionalorrequired", "spec.ps", (), {"required": ["shards", "machines"]}),
        ("optionalorrequired", "spec.ps", (), {"required": ["shardTimeoutSeconds"]}),
        ("statusoptional", "status", (), {"required": ["phase"]}),
        ("conditions", CONDITIONS, (), {"x-kubernetes-list-map-keys": ["reason"]}),
    ],
)
def test_a_planted_fault_is_found(rule: str, at: str, gone: tuple[str, ...], put: dict[str, Any]) -> None:
    planted = copy.deepcopy(crd())
    part = node(planted["spec"]["versions"][0]["schema"]["openAPIV3Schema"], at)
    for word in gone:
        del part[word]
    part.update(put)
    assert any(found.startswith(f"{rule}: {at}: ") for found in findings(planted)), findings(planted)


@pytest.mark.parametrize(("name", "rule"), [("step_count", "jsontags"), ("startTimestamp", "notimestamp")])
def test_a_bad_name_is_found(name: str, rule: str) -> None:
    planted = copy.deepcopy(crd())
    status = planted["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    status["properties"][name] = {"type": "string", "maxLength": 1, "description": "x"}
    assert [found.partition(":")[0] for found in findings(planted)] == [rule]


def test_a_version_without_a_status_subresource_is_found() -> None:
    planted = copy.deepcopy(crd())
    del planted["spec"]["versions"][0]["subresources"]
    assert findings(planted)[0].startswith("statussubresource: ")


def test_every_exception_is_of_use() -> None:
    places = [at for at, _ in nodes(schema())]
    for rule, patterns in EXCEPTIONS.items():
        for pattern in patterns:
            assert any(re.fullmatch(pattern, at) for at in places), (rule, pattern)
