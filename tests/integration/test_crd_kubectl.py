"""The CRD as people meet it through kubectl.

- What the API server refuses and takes: the same manifests as for `psjob run`, the same words, the same places.
- Every manifest that README and docs show, and every part of one, as the API server judges it.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from psjob_operator.api.crd import STATUS_DEFAULT
from psjob_operator.api.status import JobStatus, StageStatus
from psjob_operator.api.validate import validate_job
from tests.docs.finding import ALL, Block, around
from tests.integration.api_client import Api
from tests.support.soaking import rotating
from tests.unit.api_cases import PASSED, REFUSED
from tests.unit.api_manifest import GOOD, Case, changed

pytestmark = pytest.mark.cluster


Kubectl = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def namespace(bare_namespace: str) -> str:
    return bare_namespace


def test_the_crd_is_established_and_structural(job_api: Api) -> None:
    _, crd = job_api.call("GET", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/pstrainingjobs.psjob.dev")
    conditions = {condition["type"]: condition["status"] for condition in crd["status"]["conditions"]}
    assert conditions["Established"] == "True"
    assert conditions.get("NonStructuralSchema", "False") == "False"


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("psj", "A training run of a PyTorch model with a parameter server."),
        ("psj.metadata.labels", "Map of string keys and values"),
        ("psj.spec.shards.replicas", "Number of shards; 1..256."),
        ("psj.spec.checkpoint.periodSeconds", "Seconds between checkpoints"),
        ("psj.spec.workers.template", "Pod template of the workers."),
        ("psj.status.shards.attempt", "Number of its present start"),
    ],
)
def test_explain(job_kubectl: Kubectl, field: str, text: str) -> None:
    # kubectl breaks lines at 80 columns, so words are compared, not the line.
    assert text in " ".join(job_kubectl("explain", field).stdout.split())


def test_explain_has_a_text_for_every_field(job_kubectl: Kubectl) -> None:
    out = job_kubectl("explain", "psj.spec").stdout + job_kubectl("explain", "psj.status").stdout
    assert "<no description>" not in out


def test_defaults_that_the_api_server_stores(job_api: Api, namespace: str) -> None:
    job_api.create(namespace, GOOD)
    job = job_api.get(namespace, "digits")
    assert job["spec"] == {
        **GOOD["spec"],
        "training": {
            "mode": "sync",
            "delay": 0,
            "seed": 0,
            "lrScaling": "none",
            "warmupSteps": 0,
            "encryption": "auto",
            "transport": "auto",
            "nonFinite": "pass",
            "compression": {"push": "none", "pull": "none", "ratio": 0.01},
        },
        "shards": {"replicas": 2, "progressDeadlineSeconds": 10},
        "workers": {**GOOD["spec"]["workers"], "localSum": "auto"},
        "checkpoint": {"periodSeconds": 30, "keep": 3},
        "runPolicy": {"backoffLimit": 6, "cleanPodPolicy": "Running", "successPolicy": "AllWorkers"},
        "injection": "Auto",
    }
    assert job["status"] == STATUS_DEFAULT
    assert job["metadata"]["generation"] == 1
    assert all("f:status" not in entry.get("fieldsV1", {}) for entry in job["metadata"]["managedFields"])


def test_columns_tell_the_story(job_kubectl: Kubectl, job_api: Api, namespace: str) -> None:
    job_api.create(namespace, GOOD)
    fresh = job_kubectl("get", "psj", "-n", namespace).stdout.splitlines()
    assert fresh[0].split() == ["NAME", "PHASE", "SHARDS", "WORKERS", "STEP", "CHECKPOINT", "RESTARTS", "AGE", "MESSAGE"]
    assert "no psjob operator has seen this job yet" in fresh[1]
    status: dict[str, Any] = {
        "phase": "Running",
        "shardsReady": "2/2",
        "workersReady": "3/4",
        "progress": {"step": 120, "loss": 0.25},
        "checkpoint": {"step": 100, "time": "2026-01-01T00:00:00Z"},
        "restarts": {"total": 1, "causes": {"OOMKilled": 1}},
        "internal": {"term": 2},
        "conditions": [
            {
                "type": "Ready",
                "status": "False",
                "reason": "X",
                "message": "0/3 nodes are available",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
        ],
    }
    assert job_api.merge(namespace, "digits", {"status": status}, status=True)[0] == 200
    row = job_kubectl("get", "psj", "-n", namespace, "--no-headers").stdout.split()
    assert row[:5] == ["digits", "Running", "2/2", "3/4", "120"]
    assert row[6] == "1"
    wide = job_kubectl("get", "psj", "-n", namespace, "-o", "wide").stdout.splitlines()
    assert wide[0].split()[-5:] == ["STAGES", "MODE", "LOSS", "TERM", "COUNTED"]
    assert "0/3 nodes are available" in wide[1]
    assert "sync" in wide[1].split()


def test_stages_stand_in_the_wide_table_and_in_describe(job_kubectl: Kubectl, job_api: Api, namespace: str) -> None:
    """With every field that the operator writes: the API server drops those that it does not know."""
    job_api.create(namespace, GOOD)
    waits = "activations of micro-batch 1 of step 8 from worker 1 (stage 0), for 12 s"
    stages = [
        {
            "name": "front", "workersReady": "2/2", "step": 9, "staleness": 0.0, "idleFraction": 0.25, "memoryBytes": 5 << 30,
            "peakMemoryBytes": 6 << 30, "peakDeviceBytes": 7 << 30,
        },
        {"name": "back", "workersReady": "0/1", "waiting": waits},
    ]  # fmt: skip
    status = JobStatus(stages=tuple(map(StageStatus.model_validate, stages)), stages_ready="1/2").to_manifest()
    assert status["stages"] == stages
    assert job_api.merge(namespace, "digits", {"status": status}, status=True)[0] == 200
    assert job_api.get(namespace, "digits")["status"]["stages"] == stages
    wide = job_kubectl("get", "psj", "-n", namespace, "-o", "wide").stdout.splitlines()
    at = wide[0].index("STAGES")
    assert wide[1][at:].split()[0] == "1/2"
    told = job_kubectl("describe", "psj", "digits", "-n", namespace).stdout
    for words in ("Stages Ready:", "Peak Memory Bytes:", waits, "Workers Ready:"):
        assert words in told
    over = {"status": {"stages": [{"name": f"s{number}"} for number in range(65)]}}
    code, said = job_api.merge(namespace, "digits", over, status=True)
    assert code == 422 and "64" in str(said)


@pytest.mark.parametrize("word", ["all", "psjob", "psj", "pstrainingjob", "pstrainingjobs.psjob.dev"])
def test_found_by_category_and_names(job_kubectl: Kubectl, job_api: Api, namespace: str, word: str) -> None:
    job_api.create(namespace, GOOD)
    assert "digits" in job_kubectl("get", word, "-n", namespace).stdout


@pytest.mark.parametrize("way", [(), ("--server-side",)], ids=["client", "server"])
def test_apply_again_and_diff_find_nothing(
    job_kubectl: Kubectl, job_api: Api, namespace: str, tmp_path: Path, way: tuple[str, ...]
) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text(json.dumps(GOOD))
    seen = []
    for _ in range(3):
        job_kubectl("apply", "-n", namespace, "-f", str(manifest), *way)
        seen.append(job_api.get(namespace, "digits"))
    assert job_kubectl("diff", "-n", namespace, "-f", str(manifest), *way).stdout == ""
    # The first server-side apply after the create stores the status default, which until then was made up at each read.
    assert seen[1]["metadata"]["resourceVersion"] == seen[2]["metadata"]["resourceVersion"]
    assert changed(seen[0], {"metadata.resourceVersion": ""}) == changed(seen[1], {"metadata.resourceVersion": ""})
    assert seen[2]["metadata"]["generation"] == 1


def test_the_crd_itself_is_applied_by_the_client(job_kubectl: Kubectl) -> None:
    """Client-side apply keeps a copy in an annotation of at most 256 KiB."""
    root = Path(__file__).resolve().parents[2]
    assert "pstrainingjobs.psjob.dev" in job_kubectl("apply", "--dry-run=server", "-f", str(root / "crds")).stdout


def test_kubectl_names_a_typo(job_kubectl: Kubectl, namespace: str, tmp_path: Path) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text(json.dumps(changed(GOOD, {"spec.chekpoint": {}})))
    done = job_kubectl("apply", "-n", namespace, "-f", str(manifest), fails=True)
    assert 'unknown field "spec.chekpoint"' in done.stderr


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
    code, answer = job_api.merge(namespace, "digits", {"spec": {"injection": "None"}})
    assert code == 422


def test_a_generated_name_is_judged_too(job_api: Api) -> None:
    job = changed(GOOD, {"metadata": {"generateName": "digits-"}})
    assert job_api.create("default", job, dry=True)[0] == 201
    job["metadata"]["generateName"] = "a" * 39 + "-"
    code, answer = job_api.create("default", job, dry=True)
    assert code == 422
    assert "must be 1 to 40 lower-case letters" in answer["message"]


SHOWN = [
    pytest.param(block, document, id=f"{block.place}-{number}")
    for block in ALL
    if block.kind == "yaml"
    for number, document in enumerate(yaml.safe_load_all(block.text))
    if document.get("kind") == "PSTrainingJob" or set(document) == {"spec"}
]


@pytest.mark.parametrize(("block", "document"), SHOWN)
def test_the_api_server_takes_what_a_page_shows(job_api: Api, namespace: str, block: Block, document: dict[str, object]) -> None:
    """Unknown fields are refused too. A page may show a mistake, which it calls so."""
    spec = document["spec"]
    assert isinstance(spec, dict)
    job = document if "kind" in document else around(spec)
    code, answer = job_api.create(namespace, job, dry=True)
    assert code == (422 if block.text.startswith("# wrong.yaml\n") else 201), answer.get("message")


def test_there_are_such_pages() -> None:
    assert len(SHOWN) >= 20
