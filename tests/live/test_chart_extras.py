"""The chart as others use it: inside a parent chart, from a registry of their own, in Artifact Hub, with objects of theirs.

- The chart's alerts, evaluated by Prometheus' engine over series: they fire when somebody should look, and else stay silent.
- Series of the operator's metrics, as Prometheus scrapes them, and whether an alert fires at some minute of them.

Values are those of promtool: `0+60x9` is 0, 60, … 540, one a minute; `_x5` are five minutes without a sample.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.cluster.paths import Unavailable
from hack.promtool import promtool
from psjob_operator.api.load import load_job
from tests.support.chart import ALL_SEEN, CHART, ROOT, application, deployment, helm, objects, of_kind, release, template


@dataclass(frozen=True)
class Case:
    """One recording, and what it comes to."""

    name: str
    alert: str
    series: dict[str, str]
    minute: int
    firing: int
    """How many alerts of that name fire then."""


def of(metric: str, instance: str = "old", **labels: str) -> str:
    """A series of a job, as one replica of the operator exposes it."""
    told = {"namespace": "a", "job": "one", **labels, "instance": instance, "pod": f"psjob-{instance}"}
    return _series(metric, told)


def failed(values: str, instance: str = "old") -> dict[str, str]:
    return {of("psjob_job_phase", instance, phase="Failed"): values}


def ended(values: str, instance: str = "old") -> dict[str, str]:
    return {of("psjob_job_completion_time_seconds", instance): values}


def age(values: str, interval: int = 30) -> dict[str, str]:
    count = 400
    return {of("psjob_job_checkpoint_age_seconds"): values, of("psjob_job_checkpoint_interval_seconds"): f"{interval}x{count}"}


def restarts(values: str, instance: str = "old", cause: str = "Error") -> dict[str, str]:
    return {of("psjob_job_restarts_total", instance, cause=cause): values}


def operator(metric: str, values: str, instance: str = "old", **labels: str) -> dict[str, str]:
    told = {**labels, "instance": instance}
    return {_series(metric, told): values}


def _series(metric: str, labels: dict[str, str]) -> str:
    return metric + "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


CASES: tuple[Case, ...] = (
    Case("a job fails", "PSJobFailed", failed("_x10 1x50") | ended("_x10 600x50"), 12, 1),
    Case("it is told for an hour", "PSJobFailed", failed("_x10 1x90") | ended("_x10 600x90"), 75, 0),
    Case(
        "the operator is rolled out later",
        "PSJobFailed",
        failed("1x100 _x30") | ended("60x100 _x30") | failed("_x101 1x29", "new") | ended("_x101 60x29", "new"),
        110,
        0,
    ),
    Case(
        "the operator is rolled out within the hour",
        "PSJobFailed",
        failed("1x20 _x40") | ended("60x20 _x40") | failed("_x19 1x40", "new") | ended("_x19 60x40", "new"),
        20,
        1,
    ),
    Case("the operator was away for a while", "PSJobFailed", failed("1x20 _x30 1x60") | ended("60x20 _x30 60x60"), 90, 0),
    Case("a job is complete", "PSJobFailed", {of("psjob_job_phase", phase="Complete"): "1x30"} | ended("60x30"), 10, 0),
    Case("no checkpoint for more than an hour", "PSJobCheckpointOld", age("0+60x100"), 70, 1),
    Case("checkpoints every two hours", "PSJobCheckpointOld", age("0+60x119 0+60x119", 7200), 110, 0),
    Case("two of them are missing", "PSJobCheckpointOld", age("0+60x300", 7200), 250, 1),
    Case("a job that is resumed after hours", "PSJobCheckpointOld", age("0+60x20 _x200 0+60x50"), 255, 0),
    Case("eleven restarts in an hour", "PSJobRestartStorm", restarts("0+1x20"), 20, 1),
    Case("five restarts in an hour", "PSJobRestartStorm", restarts("0+1x5 5x60"), 40, 0),
    Case("restarts by several causes", "PSJobRestartStorm", restarts("0+1x7 7x60") | restarts("0+1x7 7x60", cause="Hung"), 30, 1),
    Case("old restarts after a rollout", "PSJobRestartStorm", restarts("20x60 _x60") | restarts("_x61 20x59", "new"), 70, 0),
    Case("a storm that continues through a rollout", "PSJobRestartStorm", restarts("0+1x6 _x60") | restarts("_x7 6+1x10", "new"), 18, 1),
    Case("no step after a loss", "PSJobInterrupted", {of("psjob_job_interrupted_seconds"): "0+60x30"}, 18, 1),
    Case("a recovery in ten minutes", "PSJobInterrupted", {of("psjob_job_interrupted_seconds"): "0+60x10 _x20"}, 18, 0),
    Case("two releases", "PSJobContended", {of("psjob_job_contended"): "1x20", of("psjob_job_contended", "new"): "1x20"}, 10, 1),
    Case("a contest that ends", "PSJobContended", {of("psjob_job_contended"): "1x3 0x20"}, 10, 0),
    Case("no operator", "PSJobOperatorDown", operator("psjob_operator_leader", "0x30"), 10, 1),
    Case(
        "a rollout of the operator",
        "PSJobOperatorDown",
        operator("psjob_operator_leader", "1x10 _x20") | operator("psjob_operator_leader", "_x12 1x20", "new"),
        14,
        0,
    ),
    Case(
        "a namespace is refused",
        "PSJobOperatorNamespaceRefused",
        operator("psjob_operator_namespace_refused", "1x20", namespace="b")
        | operator("psjob_operator_namespace_refused", "1x20", namespace="c"),
        10,
        2,
    ),
    Case("an upgrade of the API server", "PSJobOperatorNamespaceRefused", operator("psjob_operator_namespace_refused", "1x2 _x20"), 12, 0),
    Case("a job waits for its turn", "PSJobOperatorQueueStuck", operator("psjob_operator_queue_oldest_seconds", "0+60x20"), 12, 1),
    Case("turns are taken", "PSJobOperatorQueueStuck", operator("psjob_operator_queue_oldest_seconds", "10x20"), 12, 0),
    Case(
        "requests fail",
        "PSJobOperatorApiErrors",
        operator("psjob_operator_api_errors_total", "0+10x30", code="500") | operator("psjob_operator_api_requests_total", "0+50x30"),
        20,
        1,
    ),
    Case(
        "conflicts are none",
        "PSJobOperatorApiErrors",
        operator("psjob_operator_api_errors_total", "0+10x30", code="409") | operator("psjob_operator_api_requests_total", "0+50x30"),
        20,
        0,
    ),
    Case("the first fault", "PSJobOperatorFault", operator("psjob_operator_turns_total", "0x5 1x10", result="error"), 8, 1),
    Case("a fault half an hour ago", "PSJobOperatorFault", operator("psjob_operator_turns_total", "0x5 1x60", result="error"), 40, 0),
)

CLUSTER_WIDE = {
    "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding",
}  # fmt: skip


def listed(annotation: str) -> list[dict[str, Any]]:
    """What an annotation of Chart.yaml for Artifact Hub lists."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    found = yaml.safe_load(chart["annotations"][f"artifacthub.io/{annotation}"])
    assert isinstance(found, list) and found
    return found


def test_every_image_comes_from_the_registry_that_is_named() -> None:
    made = template('image.registry="mirror.example/a"', 'runtimeImage.registry="mirror.example/a"', *ALL_SEEN)
    containers = [
        container
        for document in yaml.safe_load_all(made)
        if document and document["kind"] in ("Deployment", "Pod", "Job")
        for spec in [document["spec"].get("template", document)["spec"]]
        for container in [*spec["containers"], *spec.get("initContainers", [])]
    ]
    assert containers and all(container["image"].startswith("mirror.example/a/") for container in containers)
    words = [word for container in containers for word in container.get("args", ())]
    (runtime,) = (word for word in words if word.startswith("--runtime-image="))
    assert runtime.startswith("--runtime-image=mirror.example/a/")
    assert made.count("image: ") == len(containers), "another image is named somewhere"


def test_all_objects_are_in_the_namespace_that_is_named() -> None:
    found = objects('namespaceOverride="other"', *ALL_SEEN)
    assert {document["metadata"].get("namespace") for document in found if document["kind"] not in CLUSTER_WIDE} == {"other"}
    assert {subject["namespace"] for document in found for subject in document.get("subjects", ())} == {"other"}
    assert "home" not in template('namespaceOverride="other"', *ALL_SEEN).split()


def test_further_objects_are_templates() -> None:
    given = '[{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"{{ .Release.Name }}-more"}}, {"apiVersion":"v1","kind":"Secret"}]'
    usual, more = objects(), objects(f"extraObjects={given}")
    added = [document for document in more if document not in usual]
    assert len(more) == len(usual) + 2 and {document["kind"] for document in added} == {"ConfigMap", "Secret"}
    assert "x-more" in [document.get("metadata", {}).get("name") for document in added]


def test_the_operators_pods_may_be_closed_but_for_probes_and_metrics() -> None:
    assert not of_kind("NetworkPolicy", "networkPolicy.operator=false")
    peers = '[{"namespaceSelector":{"matchLabels":{"kubernetes.io/metadata.name":"monitoring"}}}]'
    (policy,) = of_kind("NetworkPolicy", f"networkPolicy.operatorFrom={peers}")
    pod = deployment()["spec"]["template"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (rule,) = policy["spec"]["ingress"]
    assert rule["from"] == yaml.safe_load(peers) and policy["spec"]["policyTypes"] == ["Ingress"]
    ports = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
    assert {port["port"] for port in rule["ports"]} == ports, "every port of the operator and no other"
    (open_to_all,) = of_kind("NetworkPolicy")
    assert "from" not in open_to_all["spec"]["ingress"][0]


def test_each_alert_links_to_the_page_that_is_named() -> None:
    def links(*settings: str) -> list[str | None]:
        (found,) = of_kind("PrometheusRule", "metrics.prometheusRule.enabled=true", *settings)
        rules = [rule for group in found["spec"]["groups"] for rule in group["rules"]]
        assert len(rules) >= 8
        return [rule["annotations"].get("runbook_url") for rule in rules]

    named = links('metrics.prometheusRule.runbookUrl="https://wiki.example/psjob"')
    assert all(link and link.startswith("https://wiki.example/psjob#psjob") for link in named) and len(set(named)) == len(named)
    assert set(links('metrics.prometheusRule.runbookUrl=""')) == {None}
    assert all(link and link.startswith("https://psjob.dev") for link in links())
    assert (ROOT / "docs/runbook.md").exists(), "the page that the default leads to"


def test_artifact_hub_is_told_the_images_the_crd_and_examples() -> None:
    version = tomllib.loads((ROOT / "operator/pyproject.toml").read_text())["project"]["version"]
    container = deployment()["spec"]["template"]["spec"]["containers"][0]
    (runtime,) = (word.partition("=")[2] for word in container["args"] if word.startswith("--runtime-image="))
    assert [one["image"] for one in listed("images")] == [container["image"], runtime]
    assert container["image"].endswith(f":{version}")
    (crd,) = of_kind("CustomResourceDefinition")
    assert [(one["kind"], one["version"], one["name"]) for one in listed("crds")] == [
        (crd["spec"]["names"]["kind"], crd["spec"]["versions"][0]["name"], crd["metadata"]["name"])
    ]
    for example in listed("crdsExamples"):
        job, problems = load_job(yaml.safe_dump(example))
        assert job is not None and not problems
    assert all(one["kind"] in ("added", "changed", "deprecated", "removed", "fixed", "security") for one in listed("changes"))
    assert all(one["url"].startswith("https://") for one in listed("links"))


@pytest.mark.parametrize("values", [application()["helm"]["valuesObject"], release()["values"]], ids=["argocd", "flux"])
def test_values_of_the_gitops_examples_are_taken(values: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    for given, fails in ((values, False), ({**values, "replicaCount": 2}, True)):
        file.write_text(yaml.safe_dump(given))
        done = helm("template", "psjob", str(CHART), "-f", str(file))
        assert (done.returncode != 0) == fails, done.stderr


RUNBOOK = ROOT / "docs" / "runbook.md"


def rules() -> list[dict[str, object]]:
    (found,) = of_kind("PrometheusRule", "metrics.prometheusRule.enabled=true")
    return list(found["spec"]["groups"])


def alerts() -> dict[str, dict[str, str]]:
    return {rule["alert"]: rule["annotations"] for group in rules() for rule in group["rules"]}  # type: ignore[attr-defined]


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_alerts_fire_and_stay_silent(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": rules()}))
    told = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [one(case) for case in CASES]}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(told, width=1000))
    try:
        tool = promtool()
    except Unavailable as error:
        pytest.skip(str(error))
    done = subprocess.run([tool, "test", "rules", "tests.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def one(case: Case) -> dict[str, object]:
    """A case as promtool reads it."""
    firing = f'count(ALERTS{{alertstate="firing",alertname="{case.alert}"}}) or vector(0)'
    wanted = {"expr": firing, "eval_time": f"{case.minute}m", "exp_samples": [{"labels": "{}", "value": case.firing}]}
    series = [{"series": name, "values": values} for name, values in case.series.items()]
    return {"name": f"{case.alert}: {case.name}", "interval": "1m", "input_series": series, "promql_expr_test": [wanted]}


def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    assert len(CASES) >= 24
    for name in alerts():
        assert {bool(case.firing) for case in CASES if case.alert == name} == {True, False}, name
    assert {case.alert for case in CASES} == set(alerts())


def test_each_alert_has_a_section_of_the_runbook_to_which_it_links() -> None:
    sections = re.findall(r"(?m)^## (\w+)$", RUNBOOK.read_text())
    assert sections == list(alerts())
    for name, told in alerts().items():
        assert told["runbook_url"].endswith(f"/runbook/#{name.lower()}"), told
