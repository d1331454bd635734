"""The chart as the examples of docs/gitops.md install it, and Argo CD's settings beside the scripts that they are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from hack import argocd

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "gitops"
CHART = ROOT / "charts" / "psjob"


def application() -> dict[str, Any]:
    return dict(yaml.safe_load((EXAMPLES / "argocd" / "operator.yaml").read_text())["spec"]["source"])


def release() -> dict[str, Any]:
    return dict(list(yaml.safe_load_all((EXAMPLES / "flux" / "operator.yaml").read_text()))[1]["spec"])


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
