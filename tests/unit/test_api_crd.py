"""The CRD: small, described, structural; the same file each time; and the models beside it.

- The lint of the CRD finds nothing in ours, and each fault that is planted.
- The nodes of a CRD's schema.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.crdlint import EXCEPTIONS, findings
from psjob_operator import contract
from psjob_operator.api.crd import STATUS_DEFAULT, crd, crd_yaml, node, schema
from psjob_operator.api.status import JobStatus
from psjob_operator.api.template import definition

ROOT = Path(__file__).resolve().parents[2]
CRD = ROOT / "crds/psjob.dev_pstrainingjobs.yaml"


def test_generating_twice_gives_the_same_bytes() -> None:
    assert crd_yaml() == crd_yaml()


def test_one_document_that_a_client_side_apply_takes_with_room() -> None:
    assert len(json.dumps(crd(), separators=(",", ":"))) < 128 << 10, "an annotation of all of it has at most 256 KiB"
    assert CRD.stat().st_size <= 120 << 10, "people fetch and read the file"
    documents = list(yaml.safe_load_all(CRD.read_text()))
    assert documents == [crd()]


def test_every_property_is_described_and_every_node_has_a_type() -> None:
    for at, part in nodes(schema()):
        if at and at != "metadata" and not at.endswith("[]"):
            assert part.get("description", "").strip(), at
        assert "type" in part or part.get("x-kubernetes-int-or-string"), at
        assert not {"$ref", "anyOf", "title", "allOf", "oneOf", "const"} & part.keys(), at


def test_no_default_on_what_others_own_nor_in_status() -> None:
    spec = schema()["properties"]["spec"]
    assert "default" not in spec["properties"]["suspend"]
    assert "default" not in spec["properties"]["managedBy"]
    assert "default" not in spec["properties"]["workers"]["properties"]["replicas"]
    status = schema()["properties"]["status"]
    assert [at for at, part in nodes(status) if "default" in part] == [""]


def test_numbers_that_name_processes_and_keys_have_the_limit_that_processes_have() -> None:
    status = schema()["properties"]["status"]
    numbers = ["internal.pinned.key", "internal.term", "internal.placedTerm", "shards[].attempt", "internal.workerStart"]
    for at in (*numbers, "interruption.attempt", "restarts.lastIncident.start"):
        assert (at, node(status, at)["maximum"]) == (at, contract.MOST_NUMBER)


def test_every_number_has_a_format_and_every_whole_one_bounds_within_it() -> None:
    for at, part in nodes(schema()):
        if part.get("type") == "number":
            assert part["format"] == "double", at
        elif part.get("type") == "integer":
            most = {"int32": 2**31 - 1, "int64": 2**53 - 1}[part["format"]]
            assert 0 <= part["minimum"] <= part["maximum"] <= most, (at, part)


def test_every_list_says_who_owns_it_and_its_keys_are_required() -> None:
    lists = {at: part for at, part in nodes(schema()) if part.get("type") == "array"}
    for at, part in lists.items():
        assert part["x-kubernetes-list-type"] in ("atomic", "map"), at
        assert part["maxItems"] > 0, at
        assert set(part.get("x-kubernetes-list-map-keys", ())) <= set(part["items"].get("required", ())), at


def test_lists_of_a_template_have_the_keys_of_the_pod_api() -> None:
    pod, places = definition("PodTemplateSpec"), ("spec.workers.template", "spec.shards.template", "spec.stages[].template")
    for place in places:
        template = node(schema(), place)
        for at, part in nodes(template):
            if part.get("type") == "array" and at != "spec.ephemeralContainers":  # it must be empty
                theirs = node(pod, at)
                assert part["x-kubernetes-list-type"] == theirs["x-kubernetes-list-type"], at
                assert part.get("x-kubernetes-list-map-keys", []) == theirs.get("x-kubernetes-list-map-keys", []), at


def test_the_status_default_is_a_status_without_a_run() -> None:
    status = JobStatus.model_validate(STATUS_DEFAULT)
    assert status.run is None
    assert {condition.type: condition.status for condition in status.conditions} == {"Ready": "Unknown", "Reconciling": "True"}
    assert all(condition.message == "no psjob operator has seen this job yet" for condition in status.conditions)


def test_a_status_survives_the_way_through_json() -> None:
    status = JobStatus(
        observed_generation=1,
        phase="Running",
        run="u",
        internal={"term": 3},  # type: ignore[arg-type]
        shards=({"index": 0, "attempt": 2, "state": "Serving", "pod": "a-shard-0-a2"},),  # type: ignore[arg-type]
        restarts={"total": 1, "causes": {"OOMKilled": 1}, "counted": 1},  # type: ignore[arg-type]
        progress={"step": 5, "loss": 1},  # type: ignore[arg-type]
    )
    assert JobStatus.model_validate(status.to_manifest()) == status
    assert status.to_manifest()["shards"][0] == {"index": 0, "replica": 0, "attempt": 2, "state": "Serving", "pod": "a-shard-0-a2"}


def test_a_status_of_a_newer_operator_is_read() -> None:
    assert JobStatus.model_validate({"run": "a", "fieldOfTomorrow": {"x": 1}, "shards": [{"index": 0, "attempt": 1, "more": 2}]}).run == "a"


def test_the_contract_is_the_same_on_both_sides() -> None:
    ours = Path(contract.__file__).read_text().split("\n", 1)[1]
    assert ours == (ROOT / "runtime/src/psjob/contract/__init__.py").read_text()


CONDITIONS = "status.conditions"


def test_the_crd_is_clean() -> None:
    assert findings(crd()) == []


@pytest.mark.parametrize(
    ("rule", "at", "gone", "put"),
    [
        ("integers", "spec.shards.replicas", ("format",), {}),
        ("integers", "status.internal.term", ("maximum",), {}),
        ("integers", "spec.workers.replicas", (), {"maximum": 2**40}),
        ("nofloats", "spec.runPolicy.backoffLimit", (), {"type": "number"}),
        ("nobools", "spec.checkpoint.keep", (), {"type": "boolean"}),
        ("maxlength", "spec.training.sync.reduction", ("maxLength",), {}),
        ("maxlength", "status.shards", ("maxItems",), {}),
        ("maxlength", "status.restarts.causes", ("maxProperties",), {}),
        ("ssatags", "spec.stages", ("x-kubernetes-list-type",), {}),
        ("ssatags", CONDITIONS, ("x-kubernetes-list-map-keys",), {}),
        ("ssatags", "spec.workers.template.spec.containers[].env", (), {"x-kubernetes-list-map-keys": ["key"]}),
        ("nonullable", "spec.suspend", (), {"nullable": True}),
        ("commentstart", "status.phase", ("description",), {}),
        ("optionalorrequired", "spec.shards", (), {"required": ["shards", "machines"]}),
        ("optionalorrequired", "spec.shards", (), {"required": ["progressDeadlineSeconds"]}),
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


def nodes(part: dict[str, Any], at: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield at, part
    for name, child in part.get("properties", {}).items():
        yield from nodes(child, f"{at}.{name}" if at else name)
    for inner in ("items", "additionalProperties"):
        if isinstance(part.get(inner), dict):
            yield from nodes(part[inner], f"{at}[]")
