"""`psjob validate`: the rules of the models with lines, and what is legal and likely wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from psjob_client.cli import main
from psjob_client.lint import judge_text
from psjob_client.local.manifest import read_job
from psjob_client.problems import BadInput
from tests.support.soaking import rotating
from tests.support.typed import CliRunner
from tests.unit.api_cases import PASSED, REFUSED
from tests.unit.api_manifest import GOOD, Case, changed

FILE = """# a job
apiVersion: psjob.dev/v1alpha1
kind: PSTrainingJob
metadata: {name: digits}
spec:
  shards:
    replicas: 0
  workers:
    replicas: 4
    template:
      spec:
        containers:
        - name: worker
          command: python train.py
          env:
          - name: EPOCHS
            value: 1
  chekpoint: {}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: data}
---
"""
ADVISED = {
    **GOOD,
    "spec": {"shards": {"replicas": 2}, "workers": {"replicas": 4,
        "template": {"spec": {"containers": [{"name": "worker", "image": "example.com/me/digits:1", "command": ["python", "train.py"],
        "env": [{"name": "A", "value": "1"}], "resources": {"requests": {"cpu": "1"}, "limits": {"nvidia.com/gpu": 1}}}]}}}},
}  # fmt: skip
WORKER = "spec.workers.template.spec.containers.0"
PLACE = "spec.workers.template.spec.containers[0]"


def lines(text: str, **options: Any) -> list[str]:
    return [str(finding) for finding in judge_text("job.yaml", text, **options).findings]


def test_each_finding_has_its_line() -> None:
    found = lines(FILE)
    heads = [line.split(": ")[:2] for line in found]
    assert ["job.yaml:14", f"{PLACE}.command"] in heads and ["job.yaml:17", f"{PLACE}.env[0].value"] in heads
    assert ["job.yaml:18", "spec.chekpoint"] in heads
    ranges = (
        FILE.replace("command: python train.py", "command: [python]").replace("value: 1", "value: '1'").replace("  chekpoint: {}\n", "")
    )
    (found_range,) = lines(ranges)
    assert found_range.startswith("job.yaml:7: spec.shards.replicas: Invalid value: 0: must be 1..256")


def test_a_file_may_hold_several_jobs_a_list_and_other_objects() -> None:
    other = changed(GOOD, {"metadata.name": "other"})
    bad = changed(GOOD, {"metadata.name": "bad", "spec.workers.replicas": 0})
    text = yaml.safe_dump_all([GOOD, {"apiVersion": "v1", "kind": "List", "items": [other, bad]}, {"apiVersion": "v1", "kind": "Secret"}])
    result = judge_text("many.yaml", text)
    assert (result.jobs, result.aside) == (("digits", "other"), 1)
    (finding,) = result.findings
    assert finding.job == "bad" and finding.problem.field == "spec.workers.replicas"
    assert finding.line is not None and text.splitlines()[finding.line - 1].strip() == "replicas: 0"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no PSTrainingJob"),
        ("a: [", "not YAML: line 1"),
        ("- 1", "must be an object"),
        ("kind: ConfigMap\napiVersion: v1", "holds no PSTrainingJob"),
        ("kind: PStrainingJob\napiVersion: v1", 'must be "PSTrainingJob"'),
        ("kind: PSTrainingJob", "apiVersion"),
        ("\x00", "not YAML"),
    ],
)
def test_what_is_no_manifest_is_an_error_with_a_sentence(text: str, words: str) -> None:
    assert any(words in line for line in lines(text)), lines(text)


def one_of_each(cases: Iterable[Case], rule: Callable[[Case], object]) -> list[Any]:
    """One body a rule; further ones rotate: test_api_rules holds all of them against the rules."""
    found: dict[object, Any] = {}
    return [
        found.setdefault(rule(case), pytest.param(case, id=case.name)) if rule(case) not in found else rotating(case, id=case.name)
        for case in cases
    ]


@pytest.mark.parametrize("case", one_of_each((case for case in REFUSED if case.name != "env-many"), lambda case: case.sentence))
def test_validate_render_and_run_give_the_same_answer(tmp_path: Path, case: Case) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(case.manifest()))
    problems = [str(finding.problem) for finding in judge_text(str(path), path.read_bytes()).findings]
    with pytest.raises(BadInput) as refused:  # what run, render and compare read with
        read_job(path)
    assert list(refused.value.lines) == [f"{path}: {problem}" for problem in problems] != []


@pytest.mark.parametrize("case", one_of_each(PASSED, lambda case: tuple(case.change)))
def test_what_passes_is_valid(case: Case) -> None:
    assert judge_text("job.yaml", json.dumps(case.manifest())).findings == ()


def test_a_good_job_has_no_warning() -> None:
    assert lines(json.dumps(ADVISED), strict=True) == []


@pytest.mark.parametrize(("change", "field", "words"), [
    ({"spec.shards.replicas": 40}, "spec.shards.replicas", "mixed up"),
    ({"spec.workers.replicas": 1, "spec.training": {"mode": "async"}}, "spec.training.mode", "no difference"),
    ({"spec.runPolicy": {"backoffLimit": 0}}, "spec.runPolicy.backoffLimit", "first failure"),
    ({"spec.runPolicy": {"activeDeadlineSeconds": 20}}, "spec.runPolicy.activeDeadlineSeconds", "periodSeconds: 30"),
    ({"spec.runPolicy": {"ttlSecondsAfterFinished": 5}, "metadata.labels": {"argocd.argoproj.io/instance": "x"}},
        "spec.runPolicy.ttlSecondsAfterFinished", "GitOps"),
    ({"spec.checkpoint": {"disabled": True}}, "spec.checkpoint.disabled", "shard is lost"),
    ({"spec.checkpoint": {"periodSeconds": 1}}, "spec.checkpoint.periodSeconds", "5"),
    ({"spec.checkpoint": {"everySteps": 1}}, "spec.checkpoint.everySteps", "10"),
    ({"spec.checkpoint": {"resumeFrom": {"job": "a"}}}, "spec.checkpoint.volume", "{persistentVolumeClaim: {claimName: a-checkpoints}}"),
    ({"spec.checkpoint": {"volume": {"hostPath": {"path": "/x"}}}}, "spec.checkpoint.volume.hostPath", "name a claim"),
    ({f"{WORKER}.image": "me/digits"}, f"{PLACE}.image", "tag"),
    ({f"{WORKER}.image": "localhost:5000/digits:latest"}, f"{PLACE}.image", "tag"),
    ({f"{WORKER}.image": ""}, f"{PLACE}.image", "torch"),
    ({f"{WORKER}.command": ["torchrun", "train.py"]}, f"{PLACE}.command", "psjob convert"),
    ({f"{WORKER}.command": ["sh", "-c", "accelerate launch x.py"]}, f"{PLACE}.command", "accelerate"),
    ({f"{WORKER}.env": [{"name": "RANK", "value": "1"}]}, f"{PLACE}.env[0].name", "ps.rank()"),
    ({f"{WORKER}.env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]}, f"{PLACE}.env[0].valueFrom", "psjob run"),
    ({f"{WORKER}.envFrom": [{"configMapRef": {"name": "x"}}]}, f"{PLACE}.envFrom", "psjob run"),
    ({f"{WORKER}.resources": {}}, f"{PLACE}.resources", "evicted"),
    ({f"{WORKER}.resources": {"limits": {"nvidia.com/gpu": 8}}}, f"{PLACE}.resources.limits.nvidia.com/gpu", "take 1"),
    ({f"{WORKER}.resources": {"limits": {"nvidia.com/gpu": 1}}, "spec.workers.template.spec.runtimeClassName": "kata"},
        "spec.workers.template.spec.runtimeClassName", "is not the shards' too"),
])  # fmt: skip
def test_what_is_likely_wrong_is_told(change: dict[str, Any], field: str, words: str) -> None:
    text = json.dumps(changed(ADVISED, change))
    assert lines(text) == []
    found = [line for line in lines(text, strict=True) if f": warning: {field}: " in line]
    assert len(found) == 1 and words in found[0] and "Invalid" not in found[0], lines(text, strict=True)


def test_the_command_its_exit_codes_and_its_json(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(yaml.safe_dump(changed(ADVISED, {f"{WORKER}.image": "x"})))
    bad.write_text(FILE)
    run = CliRunner()
    done = run.invoke(main.cli, ["validate", str(good)])
    assert (done.exit_code, done.stdout) == (0, f"{good}: digits: valid\n")
    assert run.invoke(main.cli, ["validate", "--strict", str(good)]).exit_code == 1
    done = run.invoke(main.cli, ["validate", str(good), str(bad)])
    assert done.exit_code == 1 and f"{bad}:14: " in done.stdout and "1 object of other kinds" in done.stdout
    done = run.invoke(main.cli, ["validate", "-o", "json", str(bad), "-"], input=json.dumps(GOOD))
    told = json.loads(done.stdout)
    assert done.exit_code == 1 and told["valid"] is False
    (row,) = [row for row in told["files"][0]["findings"] if row["field"] == "spec.chekpoint"]
    assert (row["level"], row["line"], row["job"], row["remedy"]) == ("error", 18, "digits", "did you mean spec.checkpoint?")
    assert told["files"][1] == {"file": "<stdin>", "jobs": ["digits"], "others": 0, "findings": []}
    with pytest.raises(BadInput, match="cannot be read"):
        main.cli(["validate", str(tmp_path / "none.yaml")], standalone_mode=False)
