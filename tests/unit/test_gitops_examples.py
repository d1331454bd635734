"""The chart as the examples of docs/gitops.md install it, and Argo CD's settings beside the scripts that they are made of.

- Flux's postBuild.substitute replaces ${VAR} anywhere in a manifest: no manifest that people copy from here holds one.
"""

from __future__ import annotations

import yaml

from hack import argocd
from tests.support.chart import ROOT, application

CHART = ROOT / "charts" / "psjob"


def test_examples_name_the_chart_and_its_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (application()["chart"], application()["targetRevision"]) == (chart["name"], chart["version"])


def test_the_settings_hold_the_scripts() -> None:
    data = yaml.safe_load(argocd.SETTINGS.read_text())["data"]
    assert data["resource.customizations.health.argoproj.io_Application"] == (argocd.APPLICATION / "health.lua").read_text()
    kind = "psjob.dev_PSTrainingJob"
    assert data[f"resource.customizations.health.{kind}"] == argocd.lua("health.lua")
    actions = yaml.safe_load(data[f"resource.customizations.actions.{kind}"])
    assert actions["discovery.lua"] == argocd.lua("actions", "discovery.lua")
    assert {one["name"]: one["action.lua"] for one in actions["definitions"]} == {
        name: argocd.lua("actions", name, "action.lua") for name in argocd.ACTIONS
    }
    assert {folder.name for folder in (argocd.CUSTOMIZATION / "actions").iterdir() if folder.is_dir()} == set(argocd.ACTIONS)


PLACES = ("examples", "client/src/psjob_client/templates")


def test_no_manifest_to_copy_holds_what_flux_replaces() -> None:
    files = [file for place in PLACES for file in (ROOT / place).rglob("*") if file.is_file() and ".yaml" in file.suffixes]
    jobs = [file for file in files if "kind: PSTrainingJob" in file.read_text()]
    assert len(jobs) >= 8
    assert not [str(file.relative_to(ROOT)) for file in jobs if "${" in file.read_text()]


def test_the_page_says_what_to_write_instead() -> None:
    page = (ROOT / "docs/operations.md").read_text() + "".join(file.read_text() for file in ROOT.glob("docs/gitops.md"))
    assert "postBuild.substitute" in page and "$(VAR)" in page
