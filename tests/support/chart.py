"""What the chart renders by helm, and how the examples for Argo CD and Flux take it."""

from __future__ import annotations

import copy
import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "psjob"
HELM = shutil.which("helm", path=f"{ROOT / '.venv' / 'bin'}:/usr/local/bin:/usr/bin")


def helm(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(HELM), *args], capture_output=True, text=True, timeout=60)


def render(*settings: str, files: tuple[str, ...] = ()) -> str:
    flags = [part for setting in settings for part in ("--set-json", setting)] + [part for file in files for part in ("-f", file)]
    answer = helm("template", "x", str(CHART), "-n", "home", *flags)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


template = functools.cache(render)


@functools.cache
def parsed(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.load_all(text, Loader=yaml.CSafeLoader) if document]


def objects(*settings: str) -> list[dict[str, Any]]:
    return copy.deepcopy(parsed(template(*settings)))


def of_kind(kind: str, *settings: str) -> list[dict[str, Any]]:
    return [document for document in objects(*settings) if document["kind"] == kind]


def deployment(*settings: str) -> dict[str, Any]:
    (found,) = of_kind("Deployment", *settings)
    return found


SEEN = {
    "metrics.service.enabled": "true",
    "metrics.podMonitor.enabled": "true",
    "metrics.serviceMonitor.enabled": "true",
    "metrics.prometheusRule.enabled": "true",
    "metrics.dashboard.enabled": "true",
}
ALL_SEEN = tuple(f"{key}={on}" for key, on in SEEN.items())
EXAMPLES = ROOT / "examples" / "gitops"


def application() -> dict[str, Any]:
    return dict(yaml.safe_load((EXAMPLES / "argocd" / "operator.yaml").read_text())["spec"]["source"])


def release() -> dict[str, Any]:
    return dict(list(yaml.safe_load_all((EXAMPLES / "flux" / "operator.yaml").read_text()))[1]["spec"])
