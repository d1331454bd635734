"""An operator and a control plane of their own: without the CRD, with an API server that falls silent, and one that is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.operator_harness import World, manifest, psjob_operator, until, world
from tests.integration.outages import JOBS, answers, goes_on, running, uids, unharmed
from tests.support.cluster_fixtures import Cluster, own_control_plane

pytestmark = pytest.mark.cluster
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/pstrainingjobs.psjob.dev"
SERVED = "/apis/psjob.dev/v1alpha1/pstrainingjobs"


@pytest.fixture(scope="module")
def plane(plane_programs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # Nobody answers at the pods' addresses here: a node that is taken for silent after an outage would be left.
    with own_control_plane(tmp_path_factory.mktemp("apart") / "state", grace=600.0) as cluster:
        yield cluster


@pytest.fixture
def without_crd(plane: Cluster) -> Cluster:
    plane.api.delete(CRD)
    until("the CRD to go", lambda: not plane.api.ok(CRD) and not plane.api.ok(SERVED))
    return plane


@pytest.fixture
def place(plane: Cluster, tmp_path: Path) -> Iterator[World]:
    namespace = plane.create_namespace("apart")
    with world(plane, namespace, tmp_path) as made:
        yield made
    plane.api.delete(f"/api/v1/namespaces/{namespace}")


def test_a_cluster_without_the_crd_is_told(without_crd: Cluster, tmp_path: Path) -> None:
    code, told = psjob_operator(tmp_path, "check", f"--kubeconfig={without_crd.kubeconfig}", "--namespace=default", "--seconds=1")
    assert code == 1 and "the CRD pstrainingjobs.psjob.dev is not served; install it" in told


def test_it_waits_for_the_crd_not_ready_but_alive(without_crd: Cluster, place: World) -> None:
    operator = place.operator("--crd-seconds=0.3", ready=False)
    until("the reason in its log", lambda: any("CRD" in line["message"] for line in operator.lines()), 60)
    assert not operator.ready() and operator.answers("/livez")
    without_crd.install_crd()
    until("it to be ready", operator.ready, 60, also=operator.log.read_text)
    place.create(manifest())
    place.until("pods", lambda: len(place.pods()) == 3)
    # The API server falls silent for a while and comes back.
    server = without_crd.pid("kube-apiserver")
    os.kill(server, signal.SIGSTOP)
    time.sleep(3)
    os.kill(server, signal.SIGCONT)
    place.create(manifest("later"))
    place.until("its pods", lambda: len(place.pods()) == 6, seconds=60)
    assert operator.stop() == 0


def test_the_api_server_is_restarted(plane: Cluster, place: World) -> None:
    """Twice, under running jobs: nothing of theirs is started again, and the operator continues by itself."""
    plane.install_crd()
    running(place)
    before = uids(place)
    for _ in range(2):
        was = plane.pid("kube-apiserver")
        os.kill(was, signal.SIGKILL)
        until("another API server", lambda was=was: plane.pid("kube-apiserver") != was and answers(place), 60)  # type: ignore[misc]
        time.sleep(1)
    unharmed(place, before)
    print(f"{JOBS} jobs: continued after {goes_on(place):.1f} s")


def test_the_crd_is_deleted_and_put_back(plane: Cluster, place: World) -> None:
    """The jobs go with it. The operator lives on, and takes up what is made later."""
    plane.install_crd()
    operator = place.operator("--crd-seconds=0.3")
    place.create(manifest("before", workers=1))
    place.until("pods", lambda: len(place.pods("before")) == 2)
    plane.api.delete(CRD)
    until("the CRD to go", lambda: not plane.api.ok(CRD) and not plane.api.ok(SERVED), 60)
    time.sleep(8)
    assert operator.alive(), operator.log.read_text()[-3000:]
    plane.install_crd()
    began = time.monotonic()
    place.trains("later", workers=1)
    assert time.monotonic() - began < 10, place.story()
    assert operator.alive() and operator.ready()
