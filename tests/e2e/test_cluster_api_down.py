"""The API server is away while jobs train: nobody needs it, and nothing is started again when it is back.

- `psjob.Client` and a job that really trains on real nodes: live numbers through the API server's proxy, logs of its pods, a pause.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from psjob import Client
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


@pytest.mark.timeout(600)
def test_a_job_is_seen_and_steered_from_python(kube: Kube) -> None:
    made = digits.job("digits", args=[f"--epochs={digits.LONG_EPOCHS}"], checkpoint={"periodSeconds": 3})
    with Client.kube(namespace=kube.namespace, kubeconfig=kube.kubeconfig) as client:
        job = client.submit(made)
        story = lambda: kube.story(job.id)  # noqa: E731
        job.wait(phases=["Running"], timeout=180)
        view = wait_for("numbers of the job itself", lambda: (v := job.get()).fresh and v.progress.step > 50 and v, 120, story=story)
        assert view.progress.loss is not None and view.progress.rate and view.checkpoint is not None and view.checkpoint.bytes
        assert {one.state for one in view.shards} == {"Serving"} and {one.state for one in view.workers} == {"Running"}
        assert all(one.clock and one.node and one.idle is not None for one in view.workers)
        assert all(one.applied and one.memory_bytes for one in view.shards)
        history = job.metrics()
        loss = history.of("loss")
        assert history.complete and loss is not None and len(loss.values) > 1 and loss.steps[0] < 20, (
            "from the beginning, though nobody looked"
        )
        lines = client.logs(job.id, "worker-0", follow=True)
        first = next(lines)
        assert first.process.startswith("digits-worker-0-r") and first.text
        assert {line.process for line in job.logs(tail=1)} >= {first.process}
        job.suspend(timeout=180)
        paused = job.get()
        assert paused.phase == "Suspended" and not paused.workers and paused.checkpoint is not None
        job.resume()
        again = wait_for(
            "it to train on", lambda: (v := job.get()).fresh and v.progress.step >= paused.checkpoint.step and v, 180, story=story
        )
        assert again.phase in ("Running", "Pending", "Recovering")
        assert len(job.metrics().series) >= 2
        done = job.wait(timeout=300)
        assert done.phase == "Complete" and not done.fresh and done.seconds(0.0)
        assert {one.state for one in done.workers} == {"Succeeded"}
        job.delete()
