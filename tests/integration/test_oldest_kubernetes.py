"""The oldest Kubernetes that the chart allows: what asks an API server of CRD, operator and chart, on a control plane of that version."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hack.cluster import build, paths
from hack.cluster.paths import REPO, Unavailable

TESTS = (
    "test_cluster.py",
    "test_crd_agreement.py",
    "test_crd_changes.py",
    "test_crd_kubectl.py",
    "test_render_server.py",
    "test_operator_life.py",
    "test_operator_failures.py",
    "test_chart_life.py",
    "test_job_policy.py",
)


@pytest.mark.soak
@pytest.mark.cluster
@pytest.mark.timeout(7200)
def test_on_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    oldest = paths.pinned()[0]
    assert oldest != paths.NEWEST
    monkeypatch.setenv("PSJOB_KUBERNETES", oldest)
    try:
        build.build("integration", quiet=True)
    except Unavailable as error:
        pytest.skip(str(error))
    files = [str(REPO / "tests" / "integration" / name) for name in TESTS]
    inner = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PSJOB_TEST_"))}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", *files], cwd=REPO, env=inner, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:]
