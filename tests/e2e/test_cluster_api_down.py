"""The API server is away while jobs train: nobody needs it, and nothing is started again when it is back."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e import digits
from tests.e2e.digits import LABEL_JOB, pod_of, ready_to_kill
from tests.e2e.kube import Kube, shard_status, wait_for
from tests.support.cluster_fixtures import Cluster

pytestmark = [pytest.mark.soak, pytest.mark.serial]
NAME = "digits"
WINDOW = 20.0
"""Seconds in which steps are counted, before and while the API server is away."""


@pytest.fixture
def server(node_cluster: Cluster) -> Iterator[int]:
    """The API server's process; it continues after the test, whatever happens, and is waited for."""
    pid = node_cluster.pid("kube-apiserver")
    yield pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    wait_for("the API server", lambda: node_cluster.api.ok("/readyz"), 60)


def rate(kube: Kube, shard: dict[str, Any], seconds: float) -> float:
    """Steps a second over that time, asked of shard 0 itself."""
    began, first = time.monotonic(), _step(kube, shard)
    time.sleep(seconds)
    return (_step(kube, shard) - first) / (time.monotonic() - began)


def _step(kube: Kube, shard: dict[str, Any]) -> int:
    said = shard_status(kube, shard)
    assert said is not None, "shard 0 does not answer on its status port"
    return int(said["coordinator"]["step"])


def pods(kube: Kube) -> dict[str, tuple[str, str]]:
    """(uid, phase) of the job's pods by name."""
    found = kube.list("pods", f"{LABEL_JOB}={NAME}")
    return {pod["metadata"]["name"]: (pod["metadata"]["uid"], pod["status"]["phase"]) for pod in found}


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("away", [pytest.param(30.0, id="30s"), pytest.param(600.0, id="10min")])
def test_training_does_not_need_the_api_server(kube: Kube, node_cluster: Cluster, server: int, away: float) -> None:
    """Requests to it hang, as they do where its machine stands still; its nodes were not heard of for longer than the grace period."""
    kube.apply(digits.job(NAME, args=["--epochs=100000"], checkpoint={"periodSeconds": 5, "everySteps": 500}))
    ready_to_kill(kube, NAME)
    first = pod_of(kube, NAME, "shard", 0)
    before, standing = rate(kube, first, WINDOW), pods(kube)
    os.kill(server, signal.SIGSTOP)
    stopped = time.monotonic()
    spans = [rate(kube, first, min(away, 60.0) / 2)]
    time.sleep(max(0.0, away - (time.monotonic() - stopped) - 30.0))
    spans.append(rate(kube, first, min(away, 60.0) / 2))
    during = min(spans)
    os.kill(server, signal.SIGCONT)
    wait_for("the API server", lambda: node_cluster.api.ok("/readyz"), 60)
    time.sleep(45.0)  # longer than it takes to find nodes silent and to evict from them
    after = _step(kube, first)
    print(f"{during:.0f} steps a second of {before:.0f} while the API server was away for {away:.0f} s: {during / before:.2f}")
    assert pods(kube) == standing, kube.story(NAME)
    assert during >= 0.8 * before, "the exact ratio is printed; this only tells a rate from a standstill"
    status = wait_for("the status to continue", lambda: kube.status(NAME) if kube.status(NAME)["phase"] == "Running" else None, 60)
    assert not status["restarts"].get("total") and _step(kube, first) > after
