"""etcd or the API server stopped under running jobs: nothing of theirs is started again, and the operator goes on by itself.

A restart of the API server is in test_operator_apart.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster_fixtures import Cluster
from tests.integration.operator_harness import World, until, world
from tests.integration.outages import answers, goes_on, running, uids, unharmed
from tests.soaking import rotating, soak

pytestmark = pytest.mark.cluster


@pytest.fixture
def place(fresh_control_plane: Callable[..., Cluster], tmp_path: Path) -> Iterator[World]:
    """A control plane of our own, with running jobs in it."""
    # Nobody answers at the pods' addresses here: a node that is taken for silent after the outage would be left.
    cluster = fresh_control_plane(grace=600.0)
    cluster.install_crd()
    with world(cluster, cluster.create_namespace("outage"), tmp_path) as made:
        running(made)
        yield made


@pytest.mark.parametrize("seconds", [rotating(8), soak(90)])
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
