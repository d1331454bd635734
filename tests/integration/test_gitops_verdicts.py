"""Argo CD's evaluator, Flux's CEL module and kstatus over every recorded status of twelve lives: what the table of docs/gitops.md says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.argocd import ACTIONS, SETTINGS
from tests.integration import lives, recording
from tests.integration.gitops_engines import EXAMPLES, JOBS, Engines, Judges, health_checks, row_of, table

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("gitops_programs")]
RECORDED = {life: recording.read(life) for life in lives.ALL}


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judges]:
    made = Judges.of(tmp_path_factory.mktemp("judges"))
    yield made
    made.close()


@pytest.mark.parametrize("life", lives.ALL)
def test_every_verdict_is_that_of_the_table(judges: Judges, life: str) -> None:
    rows = table()
    for number, live in enumerate(RECORDED[life]):
        row = row_of(live, rows)
        assert judges.ask(live) == row.verdicts, f"object {number} of {life}, which {row.about}: {live['status']}"


def test_every_line_of_the_table_is_lived() -> None:
    rows = table()
    assert {row_of(live, rows).about for life in RECORDED.values() for live in life} == {row.about for row in rows}


@pytest.mark.parametrize("life", lives.ALL)
def test_no_recorded_status_differs_from_the_manifest(life: str) -> None:
    """By gitops-engine's three-way merge, with what kubectl noted as applied last."""
    engines = Engines(("diff",))
    try:
        for live in RECORDED[life]:
            applied = yaml.safe_load(live["metadata"]["annotations"][recording.LAST_APPLIED])
            assert engines.ask({"config": applied, "live": live})["modified"] == []
            changed = {**applied, "spec": {**applied["spec"], "shards": {"replicas": 7}}}
            assert engines.ask({"config": changed, "live": live})["modified"] == ["threeWay"]
    finally:
        engines.close()


def offered(live: dict[str, Any]) -> set[str]:
    """The actions that docs/gitops.md offers for this object."""
    phase, suspended = live["status"].get("phase"), live["spec"].get("suspend") is True
    going = phase not in ("Complete", "Failed")
    return {
        *(["suspend"] if going and not suspended else []),
        *(["resume"] if going and suspended else []),
        *(["checkpoint"] if phase == "Running" and not suspended else []),
    }


def test_actions_are_offered_where_they_help_and_change_one_field() -> None:
    engines = Engines(("actions", str(SETTINGS)))
    fields = {"suspend": {"suspend": True}, "resume": {"suspend": None}}
    used = set()
    try:
        for live in (live for life in RECORDED.values() for live in life):
            made = engines.ask(live)
            assert set(made) == set(ACTIONS)
            assert {name for name, changed in made.items() if changed is not None} == offered(live), live["status"]
            for name in offered(live):
                change = recording.patch(live, made[name])
                request = change["spec"].get("checkpoint", {}).get("request", 0)
                assert change == {"spec": fields.get(name, {"checkpoint": {"request": request}})} and (request > 1e9) == (
                    name == "checkpoint"
                )
                used.add(name)
        trains = next(live for live in RECORDED["complete"] if live["status"].get("phase") == "Running")
        never = {**trains, "spec": {**trains["spec"], "checkpoint": {"disabled": True}}}
        assert engines.ask(never)["checkpoint"] is None
        again = {**trains, "spec": {**trains["spec"], "checkpoint": {"request": 9 * 10**9}}}
        assert engines.ask(again)["checkpoint"]["spec"]["checkpoint"]["request"] == 9 * 10**9 + 1
    finally:
        engines.close()
    assert used == set(ACTIONS)


def test_jobs_wait_for_the_operator(judges: Judges, tmp_path: Path) -> None:
    """Argo CD's waves are an order of what one Application holds, and wait for an object whose kind has a health script. A Kustomization of
    Flux waits for what kstatus calls Current; what depends on it comes after."""
    (operator,), (jobs,) = documents("argocd/operator.yaml"), documents("argocd/jobs.yaml")
    (apps,) = documents("argocd/apps.yaml")
    assert apps["spec"]["destination"]["namespace"] == operator["metadata"]["namespace"] == jobs["metadata"]["namespace"] == "argocd"
    first, then = (int(one["metadata"]["annotations"]["argocd.argoproj.io/sync-wave"]) for one in (operator, jobs))
    assert first < then
    for status in ("Progressing", "Degraded", "Missing", "Healthy"):
        assert judges.running.ask({**operator, "status": {"health": {"status": status}}})["argo"] == status
    assert judges.running.ask({**operator, "status": {}})["argo"] == "Progressing"
    assert_argo_cd_has_no_script_of_its_own(operator, tmp_path)

    platform, *others = (
        one
        for name in ("platform", "jobs", "jobs-until-complete")
        for one in documents(f"flux/{name}.yaml")
        if one["kind"] == "Kustomization"
    )
    assert platform["spec"]["wait"] is True and "dependsOn" not in platform["spec"]
    assert [one["spec"]["dependsOn"] for one in others] == [[{"name": platform["metadata"]["name"]}]] * 2
    assert {one["metadata"]["namespace"] for one in others} == {platform["metadata"]["namespace"]}
    (release,) = (one for one in documents("flux/operator.yaml") if one["kind"] == "HelmRelease")
    release["metadata"]["generation"] = 1
    assert judges.running.ask({**release, "status": {"observedGeneration": -1}})["kstatus"] == "InProgress"
    for ready, verdict in {"Unknown": "InProgress", "False": "InProgress", "True": "Current"}.items():
        told = {"observedGeneration": 1, "conditions": [{"type": "Ready", "status": ready, "reason": "any"}]}
        assert judges.running.ask({**release, "status": told})["kstatus"] == verdict


def assert_argo_cd_has_no_script_of_its_own(application: dict[str, Any], folder: Path) -> None:
    settings = yaml.safe_load(SETTINGS.read_text())
    del settings["data"]["resource.customizations.health.argoproj.io_Application"]
    without = folder / "argocd-cm.yaml"
    without.write_text(yaml.safe_dump(settings))
    engines = Engines(("verdicts", str(without), str(health_checks(JOBS, folder / "checks.yaml"))))
    with pytest.raises(AssertionError, match=r"no health for argoproj\.io/v1alpha1, Kind=Application"):
        engines.ask(application)


def documents(name: str) -> list[dict[str, Any]]:
    """Those of an example."""
    return [document for document in yaml.safe_load_all((EXAMPLES / name).read_text()) if document]


def test_examples_are_what_their_own_types_take() -> None:
    engines = Engines(("decode",))
    found = []
    try:
        for file in sorted([*EXAMPLES.glob("argocd/*.yaml"), *EXAMPLES.glob("flux/*.yaml")]):
            if file != SETTINGS:
                found += [engines.ask(document) for document in yaml.safe_load_all(file.read_text())]
    finally:
        engines.close()
    kinds = "argoproj.io/v1alpha1 Application", "kustomize.toolkit.fluxcd.io/v1 Kustomization", "source.toolkit.fluxcd.io/v1 GitRepository"
    assert set(found) == {*kinds, "source.toolkit.fluxcd.io/v1 OCIRepository", "helm.toolkit.fluxcd.io/v2 HelmRelease"}


def test_an_unknown_field_of_an_example_is_refused() -> None:
    document = next(yaml.safe_load_all((EXAMPLES / "argocd" / "jobs.yaml").read_text()))
    document["spec"]["syncPolicy"]["automatic"] = {}
    engines = Engines(("decode",))
    try:
        with pytest.raises(AssertionError, match='unknown field "automatic"'):
            engines.ask(document)
    finally:
        engines.close()
