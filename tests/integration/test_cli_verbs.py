"""`psjob suspend` and `psjob resume` on the real API server."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.cluster_fixtures import Cluster
from tests.integration.api_client import Api
from tests.unit.api_manifest import GOOD

pytestmark = [pytest.mark.integration, pytest.mark.cluster]


def psjob(control_plane: Cluster, *args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "KUBECONFIG": str(control_plane.kubeconfig)}
    return subprocess.run([sys.executable, "-m", "psjob_client.cli.main", *args], env=env, capture_output=True, text=True, timeout=120)


def test_suspend_and_resume_set_one_field(control_plane: Cluster, job_api: Api, namespace: str) -> None:
    job_api.create(namespace, GOOD)
    for verb, value in (("suspend", True), ("resume", False)):
        done = psjob(control_plane, verb, "digits", "-n", namespace)
        assert done.returncode == 0 and "digits patched" in done.stdout, done.stderr
        assert job_api.get(namespace, "digits")["spec"]["suspend"] is value


def test_a_job_that_is_not_there_is_said_in_the_api_servers_words(control_plane: Cluster, namespace: str) -> None:
    done = psjob(control_plane, "suspend", "gone", "-n", namespace)
    assert done.returncode == 1 and '"gone" not found' in done.stderr and "Traceback" not in done.stderr
