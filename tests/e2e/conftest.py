"""The operator as Helm installs it on real nodes, and a restricted namespace a test."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from tests.e2e.kube import Kube, install, own_namespace, restricted_namespace, wait_for
from tests.e2e.node_faults import NODES, usable
from tests.support.cluster_fixtures import Cluster

HOME = "psjob-system"
PATIENCE = 120.0
"""Seconds for an answer of the API server, which shares two cores with all pods; a kubectl of these tests has as long."""


@pytest.fixture(scope="session")
def home(node_cluster: Cluster) -> Iterator[Kube]:
    """The operator, installed by Helm; its namespace."""
    kube = Kube(str(node_cluster.kubeconfig), HOME, replace(node_cluster.api, timeout=PATIENCE))
    restricted_namespace(kube)
    install(kube, "--take-ownership", "--force-conflicts")
    yield kube
    kube.helm("uninstall", "psjob", "--ignore-not-found")


@pytest.fixture
def kube(home: Kube, node_cluster: Cluster) -> Iterator[Kube]:
    """A restricted namespace of the test's own, with the operator running."""
    made = own_namespace(home, node_cluster, "digits")
    yield made
    home.kubectl("delete", "namespace", made.namespace, "--wait=false")
    wait_for("the namespace's pods to be gone; the rest of it is nothing to the next test", lambda: not made.list("pods"), 60)


@pytest.fixture
def nodes(node_cluster: Cluster) -> Iterator[set[int]]:
    """Kubelets that a test stops; whatever happens, they continue and every node takes pods after it."""
    stopped: set[int] = set()
    yield stopped
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    for node in NODES:
        node_cluster.run_kubectl("uncordon", node, check=False)
        wait_for(f"{node} to take pods again", partial(usable, node_cluster, node), 60)
