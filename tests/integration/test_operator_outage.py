"""The API server restarted and etcd stopped under running jobs: nothing of theirs is started again, and the operator goes on by itself."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hack.cluster.api import ApiError
from tests.cluster_fixtures import Cluster
from tests.integration.operator_harness import Operator, World, manifest, until, world
from tests.soaking import soak

pytestmark = [pytest.mark.integration, pytest.mark.cluster]
JOBS = 4
AGAIN_SECONDS = 25.0
"""From the return of the API server to the pod of what was lost while it was away."""


@pytest.fixture
def place(fresh_control_plane: Callable[..., Cluster], tmp_path: Path) -> Iterator[World]:
    """A control plane of our own, with running jobs in it."""
    # Nobody answers at the pods' addresses here: a node that is taken for silent after the outage would be left.
    cluster = fresh_control_plane(grace=600.0)
    cluster.install_crd()
    with world(cluster, cluster.create_namespace("outage"), tmp_path) as made:
        node = made.node("n")
        made.operator()
        for number in range(JOBS):
            made.create(manifest(f"j{number}"))
        for number in range(JOBS):
            made.run(*(f"j{number}-{pod}" for pod in ("ps-0-a1", "worker-0-r1", "worker-1-r1")), node=node)
        for number in range(JOBS):
            made.until_phase("Running", f"j{number}")
        yield made


def unharmed(place: World, before: dict[str, str]) -> None:
    """Every pod is the one it was, nothing was started, and the operator lives."""
    operator: Operator = place.operators[0]
    assert operator.alive(), place.story()
    assert {name: pod["metadata"]["uid"] for name, pod in place.pods().items()} == before
    for number in range(JOBS):
        status = place.status(f"j{number}")
        assert status["phase"] == "Running" and status["restarts"].get("total", 0) == 0, place.story()


def uids(place: World) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in place.pods().items()}


def goes_on(place: World) -> float:
    """A worker that is lost starts again; answers the seconds that took."""
    began = time.monotonic()
    place.remove("j0-worker-1-r1")
    place.until("the worker to start again", lambda: "j0-worker-1-r2" in place.pods(), AGAIN_SECONDS)
    place.create(manifest("late"))
    place.until("a new job's pods", lambda: len(place.pods("late")) == 3, AGAIN_SECONDS)
    assert place.operators[0].alive() and place.status("j0")["restarts"]["counted"] == 0
    return time.monotonic() - began


def answers(place: World) -> bool:
    try:
        return bool(place.items("pods"))
    except (ApiError, OSError):
        return False


def test_the_api_server_is_restarted(place: World) -> None:
    before = uids(place)
    for _ in range(2):
        os.kill(place.cluster.pid("kube-apiserver"), signal.SIGKILL)
        time.sleep(1)
        until("the API server to be back", lambda: answers(place), 60)
        time.sleep(2)
    unharmed(place, before)
    print(f"went on after {goes_on(place):.1f} s")


@pytest.mark.parametrize("seconds", [8, soak(90)])
@pytest.mark.parametrize("component", ["etcd", "kube-apiserver"])
def test_it_is_stopped_for_a_while(place: World, component: str, seconds: int) -> None:
    """Requests are taken and not answered, or answered with 500: no watch is given up for good."""
    before = uids(place)
    pid = place.cluster.pid(component)
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)
    until("the API server to answer", lambda: answers(place), 60)
    time.sleep(3)
    unharmed(place, before)
    print(f"{component} away {seconds} s: went on after {goes_on(place):.1f} s")


@pytest.mark.soak
def test_it_is_gone_for_long(place: World) -> None:
    """Connections are refused again and again for two minutes: longer than any retry lasts."""
    before, until_then = uids(place), time.monotonic() + 120
    while time.monotonic() < until_then:
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.kill(place.cluster.pid("kube-apiserver"), signal.SIGKILL)
        time.sleep(0.5)
    until("the API server to be back", lambda: answers(place), 60)
    unharmed(place, before)
    print(f"gone for 120 s: went on after {goes_on(place):.1f} s")
