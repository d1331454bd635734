"""Helm 3 beside Helm 4, and what a release has made, to compare what the two make."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from hack.cluster.paths import program
from tests.e2e.kube import Kube

CRD = "pstrainingjobs.psjob.dev"
GIVEN = ("clusterIP", "clusterIPs")
"""Fields of a Service's spec that the API server chooses."""
REVISION = "deployment.kubernetes.io/revision"
"""Counted by the controller of Deployments."""


def helm3(home: Kube, *words: str) -> str:
    """What Helm 3 prints; the test fails with its words where it does."""
    command = [str(program("helm3")), f"--kubeconfig={home.kubeconfig}", f"--namespace={home.namespace}", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, f"helm 3 {' '.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout


def objects(home: Kube, release: str = "psjob") -> dict[str, dict[str, Any]]:
    """By kind and name, what the manifest has made as the API server has it, without what differs between two of one manifest."""
    found = json.loads(home.kubectl("get", "-f", "-", "-o", "json", stdin=home.helm("get", "manifest", release)))
    made = {}
    for one in found["items"]:
        about, kept = one["metadata"], {key: value for key, value in one.items() if key not in ("metadata", "status")}
        notes = {key: value for key, value in about.get("annotations", {}).items() if key != REVISION}
        if one["kind"] == "Service":
            kept["spec"] = {key: value for key, value in kept["spec"].items() if key not in GIVEN}
        made[f"{one['kind']}/{about['name']}"] = {**kept, "labels": about.get("labels"), "annotations": notes}
    assert f"CustomResourceDefinition/{CRD}" in made
    return made
