"""What is done to the cluster, in order: pods by a bare client, a burst of jobs, a lost worker of each, the end of all."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Any

from bench.fleet.kube import STRATEGIC, Kube, Refused, together, until
from bench.fleet.tracker import Job, Pod, Tracker, container, job, quantiles

Figures = dict[str, Any]


async def bare(kube: Kube, namespace: str, jobs: int, pods: list[Figures], seconds: float) -> Figures:
    """This client alone makes the pods of as many jobs, and takes them away again: what this control plane can do now."""
    path, begun = f"/api/v1/namespaces/{namespace}/pods", time.monotonic()
    running: dict[str, float] = {}

    async def follow() -> None:
        async for now, kind, raw in kube.watch(path):
            name = raw["metadata"]["name"]
            if kind == "DELETED":
                running.pop(name, None)
            elif raw["status"].get("phase") == "Running":
                running.setdefault(name, now)

    watch = asyncio.create_task(follow())
    names = {f"job-{number:04d}-{seat}": pod for number in range(jobs) for seat, pod in enumerate(pods)}
    await together(kube.call("POST", path, _named(pod, name)) for name, pod in names.items())
    created = time.monotonic() - begun
    await until("the bare client's pods to run", lambda: len(running) == len(names), seconds)
    all_running = max(running.values()) - begun
    await kube.call("DELETE", path, {"gracePeriodSeconds": 0})
    await until("the bare client's pods to go", lambda: not running, seconds)
    watch.cancel()
    return {"pods": len(names), "podsPerSecond": len(names) / created, "allRunning": all_running}


def smallest(each: int) -> list[Figures]:
    """Pods with nothing in them but a container."""
    return [{"spec": {"containers": [container()]}}] * each


def alike(pods: list[Figures]) -> list[Figures]:
    """What a client has to send for such pods; their labels have other names, so that no operator knows them."""
    made = []
    for pod in pods:
        labels = {f"alike.{key}": value for key, value in pod["metadata"]["labels"].items()}
        spec = {key: value for key, value in pod["spec"].items() if key not in ("nodeName", "serviceAccount")}
        made.append({"metadata": {"labels": labels, "annotations": pod["metadata"].get("annotations") or {}}, "spec": spec})
    return made


def _named(pod: Figures, name: str) -> Figures:
    return {**pod, "metadata": {**(pod.get("metadata") or {}), "name": name}}


async def burst(kube: Kube, seen: Tracker, names: list[str], shards: int, workers: int, seconds: float) -> Figures:
    """All jobs at once, until each status says Running."""
    begun, each = time.monotonic(), shards + workers

    async def create(name: str) -> None:
        seen.jobs[name] = Job(asked=time.monotonic())
        await kube.call("POST", seen.jobs_path, job(name, shards, workers))

    await together(create(name) for name in names)
    jobs = [seen.jobs[name] for name in names]
    await until("all pods to be there", lambda: all(len(it.pods) >= each for it in jobs), seconds)
    await until("all pods to run", lambda: all(len(it.pods_running) >= each for it in jobs), seconds)
    await until("every status to say Running", lambda: all(it.running for it in jobs), seconds)
    exist = max(at for it in jobs for at in it.pods) - begun
    pods = sum(len(it.pods) for it in jobs)
    return {
        "pods": pods,
        "allExist": exist,
        "podsPerSecond": pods / exist,
        "allRunning": max(at for it in jobs for at in it.pods_running) - begun,
        "allStatusRunning": max(it.running for it in jobs) - begun,
        "toPods": quantiles(it.pods[each - 1] - it.asked for it in jobs),
        "toStatusRunning": quantiles(it.running - it.asked for it in jobs),
    }


async def lose(kube: Kube, seen: Tracker, names: list[str], seconds: float) -> Figures:
    """One worker of each job is deleted, all at once."""
    victims = {name: next(pod for pod in seen.live(name) if pod.seat == "worker-1") for name in names}
    before, asked = set(seen.pods), dict[str, float]()

    async def delete(name: str) -> None:
        asked[name] = time.monotonic()
        # Graceful, as an eviction is: kwok ends the pod at once. A forced delete makes it delete a quick successor too.
        await kube.call("DELETE", f"{seen.pods_path}/{victims[name].name}", {"gracePeriodSeconds": 1})

    def fresh() -> list[Pod]:
        return [pod for uid, pod in seen.pods.items() if uid not in before]

    await together(delete(name) for name in names)
    await until("every lost worker to run again", lambda: {pod.job for pod in fresh() if pod.running} >= set(names), seconds)
    return {
        "deleted": len(names),
        "superfluous": len(fresh()) - len(names),
        "toNewPod": quantiles(pod.added - asked[pod.job] for pod in fresh()),
        "toNewPodRunning": quantiles(pod.running - asked[pod.job] for pod in fresh() if pod.running),
    }


async def finish(kube: Kube, seen: Tracker, names: list[str], seconds: float) -> Figures:
    """All pods of all jobs end with 0; a shard that lives ends when the workers have."""
    begun = time.monotonic()

    async def end(pod: Pod) -> None:
        try:
            await kube.call("PATCH", f"{seen.pods_path}/{pod.name}/status", _ended(pod), STRATEGIC)
        except Refused as error:
            if error.code != 404:
                raise
        seen.jobs[pod.job].ended_by_us = time.monotonic()

    await together(end(pod) for name in names for pod in seen.live(name))
    jobs = [seen.jobs[name] for name in names]
    await until("every job to be Complete", lambda: all(it.complete for it in jobs), seconds)
    return {
        "allComplete": max(it.complete for it in jobs) - begun,
        "toComplete": quantiles(max(0.0, it.complete - it.ended_by_us) for it in jobs),
    }


def _ended(pod: Pod) -> dict[str, Any]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ended = {"exitCode": 0, "reason": "Completed", "startedAt": now, "finishedAt": now}
    name = "shard" if pod.seat.startswith("shard") else "main"
    state = {"name": name, "ready": False, "started": False, "state": {"running": None, "terminated": ended}}
    conditions = [{"type": kind, "status": "False", "reason": "PodCompleted"} for kind in ("Ready", "ContainersReady")]
    return {"status": {"phase": "Succeeded", "conditions": conditions, "containerStatuses": [state]}}
