"""`psjob.Client` and a job that really trains on real nodes: live numbers through the API server's proxy, logs of its pods, a pause."""

from __future__ import annotations

import pytest

from psjob import Client
from tests.e2e import digits
from tests.e2e.kube import Kube, wait_for

pytestmark = [pytest.mark.soak, pytest.mark.serial]


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
