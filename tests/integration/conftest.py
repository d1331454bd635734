"""What the integration tests share beside the cluster itself."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Callable, Iterator

import pytest

from tests.integration.api_client import Api
from tests.integration.operator_harness import World, world
from tests.integration.operator_proxy import Proxy
from tests.integration.together import beside
from tests.support.cluster_fixtures import Cluster

__all__ = ["beside"]


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


@pytest.fixture(scope="session")
def _without_pods(control_plane: Cluster) -> Iterator[str]:
    name = control_plane.create_namespace("bare")
    yield name
    control_plane.api.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture
def bare_namespace(_without_pods: str, control_plane: Cluster) -> Iterator[str]:
    """A namespace without an operator, in which there is no job: it costs less than one of the test's own."""
    yield _without_pods
    control_plane.api.delete(f"/apis/psjob.dev/v1alpha1/namespaces/{_without_pods}/pstrainingjobs")


@pytest.fixture(scope="module")
def place(request: pytest.FixtureRequest, control_plane: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A namespace of the module's own with an operator in it, with the module's OPERATOR as options.

    A module that needs another place has a fixture of this name.
    """
    about = request.module.__name__.rpartition("test_operator_")[2].replace("_", "-")
    namespace = control_plane.create_namespace(about)
    with world(control_plane, namespace, tmp_path_factory.mktemp(about)) as made:
        made.operator(*getattr(request.module, "OPERATOR", ()))
        yield made
    control_plane.api.delete(f"/api/v1/namespaces/{namespace}")


@pytest.fixture
def node(place: World) -> str:
    return place.node(f"{place.namespace}-{uuid.uuid4().hex[:6]}")


@pytest.fixture
def name() -> str:
    return f"j{uuid.uuid4().hex[:6]}"


@pytest.fixture
def proxy(place: World) -> Iterator[Proxy]:
    """A proxy between an operator and the API server, with the rights of `place`'s operator."""
    cert, key = place.certificate()
    made = Proxy(place.cluster.url, place.cluster.ca, cert, key)
    yield made
    made.close()
