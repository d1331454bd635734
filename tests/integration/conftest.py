"""What the integration tests share beside the cluster itself."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from tests.cluster_fixtures import Cluster
from tests.integration.api_client import Api


@pytest.fixture(scope="session")
def job_api(control_plane: Cluster) -> Api:
    """The API server, with the CRD in it, whose refusals come back as answers."""
    return Api(control_plane.kubeconfig)


@pytest.fixture(scope="session")
def job_kubectl(control_plane: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """kubectl with a discovery cache of its own; `fails=True` where it is to fail."""
    cache = tmp_path_factory.mktemp("kubectl-cache")

    def run(*words: str, fails: bool = False) -> subprocess.CompletedProcess[str]:
        command = [control_plane.ready.kubectl, "--kubeconfig", control_plane.ready.kubeconfig, "--cache-dir", str(cache), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode != 0) == fails, f"kubectl {' '.join(words)}: {done.stdout}{done.stderr}"
        return done

    return run
