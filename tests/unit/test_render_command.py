"""`psjob render`: every object of a job's first turn, as YAML."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from psjob_client.cli.manifest_commands import NO_UID, documents, render, render_yaml
from psjob_client.local.manifest import read_job
from psjob_client.problems import BadInput

MANIFEST = """
apiVersion: psjob.dev/v1alpha1
kind: PSTrainingJob
metadata: {name: digits, namespace: team}
spec:
  suspend: true
  managedBy: kueue.x-k8s.io/multikueue
  shards: {replicas: 2}
  workers: {replicas: 4, template: {spec: {containers: [{name: worker, image: me/digits:1, command: [python, train.py]}]}}}
"""


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(MANIFEST)
    return path


def test_all_objects_in_order(manifest: Path) -> None:
    made = documents(read_job(manifest), "image:1")
    assert [(it["kind"], it["metadata"]["name"]) for it in made] == [
        ("Service", "digits-shards"),
        ("ConfigMap", "digits-config"),
        ("PersistentVolumeClaim", "digits-checkpoints"),
        ("Secret", "digits-key-00000000-1"),
        *(("Pod", f"digits-shard-{index}-a1") for index in range(2)),
        *(("Pod", f"digits-worker-{index}-r1") for index in range(4)),
    ]
    assert {it["metadata"]["namespace"] for it in made} == {"team"}
    assert made[0]["metadata"]["ownerReferences"][0]["uid"] == NO_UID


@pytest.mark.parametrize(("source", "run"), [("job=other", NO_UID), ("run=abc", "abc")])
def test_a_job_that_goes_on_from_another_shows_what_it_will_have(manifest: Path, source: str, run: str) -> None:
    """Zeros stand for the run that the operator looks up."""
    made = documents(read_job(manifest, (f"spec.checkpoint.resumeFrom.{source}",)), "image:1")
    assert [it["kind"] for it in made].count("Pod") == 6
    config = json.loads(made[1]["data"]["config.json"])
    assert config["checkpoint"]["resumeFrom"] == {"path": f"/psjob-checkpoints/{run}"}


def test_the_output_is_yaml_and_the_same_each_time(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    render(manifest, ["spec.workers.replicas=1"], "image:1")
    printed = capsys.readouterr().out
    assert len(list(yaml.safe_load_all(printed))) == 7 and "&id" not in printed
    assert printed == render_yaml(read_job(manifest, ("spec.workers.replicas=1",)), "image:1")


def test_a_bad_manifest_is_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(MANIFEST.replace("shards: {replicas: 2", "shards: {replicas: 0"))
    with pytest.raises(BadInput) as refusal:
        render(path)
    assert "spec.shards.replicas" in str(refusal.value)


def test_children_have_fixed_metadata_and_that_of_their_template_alone(manifest: Path) -> None:
    """An engine that finds its own marks on a child takes the child for its own, and prunes it."""
    marks = {"argocd.argoproj.io/instance": "app", "kustomize.toolkit.fluxcd.io/name": "app", "team": "a"}
    of_template = {"sidecar.istio.io/inject": "false"}
    job = read_job(manifest)
    raw = yaml.safe_load(manifest.read_text())
    raw["metadata"] |= {"labels": marks, "annotations": marks}
    raw["spec"]["workers"]["template"]["metadata"] = {"annotations": of_template}
    manifest.write_text(yaml.safe_dump(raw))
    plain, marked = documents(job, "image:1"), documents(read_job(manifest), "image:1")
    assert [one["metadata"]["name"] for one in plain] == [one["metadata"]["name"] for one in marked]
    for before, after in zip(plain, marked, strict=True):
        added = of_template if before["metadata"]["name"].startswith("digits-worker-") else {}
        assert after["metadata"].get("labels") == before["metadata"].get("labels"), before["metadata"]["name"]
        assert after["metadata"].get("annotations", {}) == before["metadata"].get("annotations", {}) | added, before["metadata"]["name"]
        assert after["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "psjob-operator"
