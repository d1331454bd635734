"""The operator as Helm installs it on real nodes, and a restricted namespace a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster_fixtures import Cluster
from tests.e2e.kube import Kube, install, restricted_namespace

HOME = "psjob-system"


@pytest.fixture(scope="session")
def home(node_cluster: Cluster) -> Iterator[Kube]:
    """The operator, installed by Helm; its namespace."""
    kube = Kube(str(node_cluster.kubeconfig), HOME)
    restricted_namespace(kube)
    install(kube, "--take-ownership", "--force-conflicts")
    yield kube
    kube.helm("uninstall", "psjob", "--ignore-not-found")


@pytest.fixture
def kube(home: Kube, node_cluster: Cluster) -> Iterator[Kube]:
    """A restricted namespace of the test's own, with the operator running."""
    name = node_cluster.create_namespace("digits", {"pod-security.kubernetes.io/enforce": "restricted"}, isolated=False)
    yield Kube(home.kubeconfig, name)
    home.kubectl("delete", "namespace", name, "--wait=true", "--timeout=60s")
