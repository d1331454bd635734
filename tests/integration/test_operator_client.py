"""`Client.kube` on the real API server with the real operator; the test plays the kubelet."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from psjob import AsyncClient, Client
from psjob_client.problems import Conflict, JobFailed
from tests.docs.finding import python_blocks
from tests.integration.operator_harness import World, manifest

pytestmark = pytest.mark.cluster


@pytest.fixture
def client(place: World) -> Iterator[Client]:
    with Client.kube(namespace=place.namespace, kubeconfig=place.cluster.kubeconfig) as made:
        yield made


def test_a_function_becomes_a_job_that_runs_suspends_resumes_and_ends(place: World, client: Client, node: str, name: str) -> None:
    def train(lr: float = 0.1) -> None:
        import psjob

        print(psjob.rank(), lr, "$(HOME)")

    job = client.train(train, args={"lr": 0.5}, name=name, workers=1, image="me/train:1", resources={"gpu": 1}, env={"A": "b"})
    stored = place.job(name)["spec"]["workers"]["template"]["spec"]["containers"][0]
    assert stored["resources"]["limits"] == {"nvidia.com/gpu": "1"} and stored["env"] == [{"name": "A", "value": "b"}]
    assert "$$(HOME)" in stored["args"][0] and yaml.safe_load(job.manifest)["spec"]["workers"]["replicas"] == 1
    place.run(f"{name}-shard-0-a1", f"{name}-worker-0-r1", node=node)
    view = job.wait(phases=["Running"], timeout=60)
    assert view.shards_ready == "1/1" and view.workers_ready == "1/1" and [one.name for one in view.workers] == [f"{name}-worker-0-r1"]
    assert view.shards[0].state == "Serving" and view.shards[0].node == node and view.workers[0].state == "Running"
    assert [one.name for one in client.list() if one.name == name] == [name]
    assert {"job", "shard 0", "worker 0"} == {span.lane for span in client.timeline(name)}

    client.job(name)
    place.edit(name, suspend=True)
    place.take_off(f"{name}-worker-0-r1", f"{name}-shard-0-a1")
    job.suspend(timeout=60)
    assert job.get().phase == "Suspended"
    with pytest.raises(JobFailed, match="is suspended"):
        job.wait(timeout=5)
    with pytest.raises(Conflict, match="is suspended"):
        job.checkpoint(timeout=5)

    assert job.resume().id == name
    shard = place.until("the next shard", lambda: next((pod for pod in place.pods(name) if f"{name}-shard-0-a" in pod), None))
    worker = place.until("the next worker", lambda: next((pod for pod in place.pods(name) if f"{name}-worker-0-r" in pod), None))
    place.run(shard, worker, node=node)
    job.wait(phases=["Running"], timeout=60)
    reasons = [event.reason for event in job.events()]
    assert "Suspended" in reasons and reasons.index("Suspended") < len(reasons) - 1
    job.delete()
    assert name not in [one.name for one in client.list()]


def test_a_job_that_fails_says_why(place: World, client: Client, node: str, name: str) -> None:
    job = client.submit(manifest(name, workers=1, runPolicy={"backoffLimit": 0}))
    place.run(f"{name}-shard-0-a1", f"{name}-worker-0-r1", node=node)
    job.wait(phases=["Running"], timeout=60)
    place.end(f"{name}-worker-0-r1", code=3)
    with pytest.raises(JobFailed, match=r"ended as Failed.*exit code 3"):
        job.wait(timeout=60)
    with pytest.raises(Conflict, match="is Failed; nothing of it runs"):
        job.suspend()
    view = job.get()
    assert view.over and view.phase == "Failed" and any("exit code 3" in (one.problem or "") for one in view.workers)


def test_a_checkpoint_is_asked_for_in_the_spec_and_reaches_the_config(place: World, client: Client, node: str, name: str) -> None:
    job = client.submit(manifest(name, workers=1))
    place.run(f"{name}-shard-0-a1", f"{name}-worker-0-r1", node=node)
    job.wait(phases=["Running"], timeout=60)

    async def both() -> int:
        async with AsyncClient.kube(namespace=place.namespace, kubeconfig=place.cluster.kubeconfig) as other:
            asked = asyncio.create_task(other.checkpoint(name, timeout=60))
            asked_for = await asyncio.to_thread(
                place.until, "the request", lambda: place.job(name)["spec"].get("checkpoint", {}).get("request")
            )
            await asyncio.to_thread(
                place.until, "the config", lambda: f'"request": {asked_for}' in str(place.items("configmaps", f"psjob.dev/job-name={name}"))
            )
            kept = {"step": 40, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "bytes": 10}
            for step, request in ((30, None), (35, asked_for - 1), (40, asked_for)):
                assert not asked.done(), "a checkpoint that was under way is not what was asked for"
                told = {**kept, "step": step, "observedRequest": request}
                await asyncio.to_thread(
                    place.cluster.api.merge, place.path("pstrainingjobs", name) + "/status", {"status": {"checkpoint": told}}
                )
                await asyncio.sleep(1.2 if step == 35 else 0.0)
            return (await asked).step

    assert asyncio.run(both()) == 40


def test_logs_of_pods_that_have_not_started_are_empty_and_asked_without_an_error(place: World, client: Client, name: str) -> None:
    job = client.submit(manifest(name, workers=1))
    place.until("the pods", lambda: len(place.pods(name)) == 2)
    assert list(job.logs()) == [] and job.get().phase == "Pending"
    assert client.metrics(name).series == ()


def test_the_page_of_python_submits_to_a_cluster(place: World, tmp_path: Path) -> None:
    """Its second block, with the function of its first one."""
    blocks = python_blocks()
    function = blocks["docs/python.md#1"].text.partition("client = ")[0]
    asked = blocks["docs/python.md#3"].text.replace("team-a", place.namespace)
    (tmp_path / "page.py").write_text(function + asked + "print(job.id)\nclient.close()\n")
    env = {**os.environ, "KUBECONFIG": str(place.cluster.kubeconfig)}
    page = [sys.executable, "page.py"]
    done = subprocess.run(page, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    name = done.stdout.strip()
    spec = place.job(name)["spec"]
    container = spec["workers"]["template"]["spec"]["containers"][0]
    assert (spec["workers"]["replicas"], spec["shards"]["replicas"], container["image"]) == (4, 2, "registry.example.com/me/train:1")
    place.until("its pods", lambda: len(place.pods(name)) == 6)
