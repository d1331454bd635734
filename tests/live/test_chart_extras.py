"""The chart as others use it: inside a parent chart, from a registry of their own, in Artifact Hub, with objects of theirs.

- The chart's alerts, evaluated by Prometheus' engine over series: they fire when somebody should look, and else stay silent.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.cluster.paths import Unavailable
from hack.promtool import promtool
from psjob_operator.api.load import load_job
from tests.live.alert_cases import CASES, Case
from tests.support.chart import ALL_SEEN, CHART, ROOT, application, deployment, helm, objects, of_kind, release, template

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
