"""When pods and jobs were first seen to be there, to run, to be gone: two watches, from outside the operator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.fleet.kube import Kube

JOBS = "/apis/psjob.dev/v1alpha1"
LABEL_JOB, LABEL_ROLE, LABEL_INDEX = "psjob.dev/job-name", "psjob.dev/role", "psjob.dev/index"


@dataclass
class Pod:
    """One pod, by uid."""

    name: str
    job: str
    seat: str
    added: float
    running: float = 0.0
    gone: float = 0.0


@dataclass
class Job:
    """One job; times are monotonic, 0 while it was not seen."""

    asked: float = 0.0
    pods: list[float] = field(default_factory=list)
    pods_running: list[float] = field(default_factory=list)
    running: float = 0.0
    complete: float = 0.0
    ended_by_us: float = 0.0


@dataclass
class Tracker:
    """What was seen in one namespace."""

    namespace: str
    pods: dict[str, Pod] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)

    @property
    def pods_path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    @property
    def jobs_path(self) -> str:
        return f"{JOBS}/namespaces/{self.namespace}/pstrainingjobs"

    async def follow_pods(self, kube: Kube) -> None:
        async for now, kind, raw in kube.watch(self.pods_path):
            metadata = raw["metadata"]
            labels = metadata.get("labels") or {}
            if LABEL_JOB not in labels:
                continue
            job = self.jobs.setdefault(labels[LABEL_JOB], Job())
            pod = self.pods.get(metadata["uid"])
            if pod is None:
                seat = f"{labels[LABEL_ROLE]}-{labels[LABEL_INDEX]}"
                pod = self.pods[metadata["uid"]] = Pod(metadata["name"], labels[LABEL_JOB], seat, now)
                job.pods.append(now)
            if not pod.running and raw["status"].get("phase") == "Running":
                pod.running = now
                job.pods_running.append(now)
            if kind == "DELETED":
                pod.gone = now

    async def follow_jobs(self, kube: Kube) -> None:
        async for now, _, raw in kube.watch(self.jobs_path):
            job = self.jobs.setdefault(raw["metadata"]["name"], Job())
            phase = (raw.get("status") or {}).get("phase")
            if phase == "Running" and not job.running:
                job.running = now
            if phase == "Complete" and not job.complete:
                job.complete = now

    def live(self, job: str) -> list[Pod]:
        """The job's pods that are there."""
        return [pod for pod in self.pods.values() if pod.job == job and not pod.gone]


def quantiles(values: Iterable[float]) -> Mapping[str, float]:
    """p50, p95, p99 and max; empty without values."""
    found = sorted(values)
    if not found:
        return {}
    at = {f"p{share}": found[max(0, math.ceil(share / 100 * len(found) - 1e-9) - 1)] for share in (50, 95, 99)}
    return {**at, "max": found[-1]}


def container(name: str = "main") -> dict[str, Any]:
    """The container of every pod here."""
    return {"name": name, "image": "pause:3", "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}}}


def job(name: str, shards: int, workers: int) -> dict[str, Any]:
    """A job without checkpoints, since a bare client's pods have none."""
    template = {"spec": {"containers": [{"name": "shard", "resources": container()["resources"]}]}}
    worker = {**container(), "command": ["python", "train.py"]}
    spec = {
        "shards": {"replicas": shards, "template": template},
        "checkpoint": {"disabled": True},
        "workers": {"replicas": workers, "template": {"spec": {"containers": [worker]}}},
    }
    return {"apiVersion": "psjob.dev/v1alpha1", "kind": "PSTrainingJob", "metadata": {"name": name}, "spec": spec}
