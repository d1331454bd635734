"""A namespace of a cluster as a place for jobs: the operator does what the PSTrainingJob says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from psjob_client.jobs import clustered
from psjob_client.jobs.cluster import ClusterSource
from psjob_client.jobs.problems import Conflict, DeadlinePassed, NoWeights, call
from psjob_client.jobs.view import CheckpointView, JobView
from psjob_client.sdk.building import job_of
from psjob_client.sdk.requests import answers, next_request
from psjob_operator.cluster.client import JOBS, ApiError

if TYPE_CHECKING:
    from psjob_client.sdk.weights import Weights

LOOK_SECONDS = 1.0


class Namespace(ClusterSource):
    """The jobs of one namespace."""

    once = True

    async def submit(self, manifest: Mapping[str, Any]) -> str:
        """POST the job, checked strictly; its name."""
        job = job_of(manifest)
        namespace = job.metadata.namespace or self.where.namespace
        if namespace != self.where.namespace:
            raise Conflict(
                f"metadata.namespace is {namespace}, this is namespace {self.where.namespace}; name {namespace} here, or leave it out"
            )
        body = {**manifest, "metadata": {**manifest["metadata"], "namespace": namespace}}
        try:
            await self.client.create(JOBS, namespace, body)
        except ApiError as error:
            if error.reason == "AlreadyExists":
                raise Conflict(
                    f"there is a job {job.metadata.name} in {self.where} already; name another, or end it with ",
                    call("delete", job.metadata.name, namespace),
                ) from None
            raise await self._said(error) from None
        return job.metadata.name

    async def suspend(self, name: str, seconds: float | None) -> None:
        """spec.suspend: true, and wait until no pod is left."""
        job = await self._active(name)
        await self._patch(job.id, {"suspend": True})
        if seconds is not None:
            await self._wait(name, lambda now: now.phase == "Suspended" or now.over, seconds, "is not suspended yet")

    async def at_risk(self, name: str) -> str:
        """Why a suspension costs the job its checkpoints, as the operator says it; empty where it does not."""
        raw = await self.raw(name)
        conditions = (raw.get("status") or {}).get("conditions") or []
        told: Mapping[str, Any] = next((it for it in conditions if it.get("type") == "CheckpointReady" and it.get("status") == "False"), {})
        return str(told.get("message")) if told.get("reason") == "ClaimTerminating" else ""

    async def resume(self, name: str) -> str:
        """spec.suspend: false."""
        job = await self._active(name)
        await self._patch(job.id, {"suspend": False})
        return job.id

    async def checkpoint(self, name: str, seconds: float) -> CheckpointView:
        """spec.checkpoint.request: shard 0 reads it when the kubelet has brought it to its pod, up to two minutes later."""
        job = await self._active(name)
        if job.phase == "Suspended":
            raise Conflict(f"{name} is suspended, and its last checkpoint is of step {job.checkpoint.step if job.checkpoint else 0}")
        number = next_request(_saved(job), job.checkpoint)
        await self._patch(job.id, {"checkpoint": {"request": number}})

        def answered(now: JobView) -> bool:
            return now.over or answers(now.checkpoint, number, _saved(now))

        done = await self._wait(name, answered, seconds, "has not answered the request for a checkpoint yet")
        if done.checkpoint is None:
            raise Conflict(f"{name} has ended without a checkpoint; ", call("get", name, self.where.namespace), " says why")
        return done.checkpoint

    async def weights(self, name: str) -> Weights:
        """Not from here: they lie on the job's claim."""
        job = clustered.job_view(await self.raw(name), self.where.context)
        raise NoWeights(
            f"the weights of {job.id} are on its claim, which only pods of namespace {self.where.namespace} can read. The commands that "
            f"fetch {job.run}/final.safetensors are in docs/operations.md, Files of a script, and its weights"
        )

    async def delete(self, name: str, seconds: float) -> None:
        """Delete the job; its pods go with it."""
        raw = await self.raw(name)
        uid = raw["metadata"]["uid"]
        try:
            await self.client.delete(JOBS, self.where.namespace, name, uid)
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                left = await self.client.get(JOBS, self.where.namespace, name)
                if left["metadata"]["uid"] != uid:
                    return
                await asyncio.sleep(LOOK_SECONDS / 4)
        except ApiError as error:
            if error.code == 404:
                return
            raise await self._said(error) from None
        raise DeadlinePassed(
            f"{name} is being deleted, and still there after {seconds:g} s; `kubectl get psj {name} -o yaml` shows its finalizers"
        )

    async def _active(self, name: str) -> JobView:
        raw = await self.raw(name)
        job = clustered.job_view(raw, self.where.context)
        if job.over:
            source = f"{{run: {raw['metadata']['uid']}}}"
            raise Conflict(f"{name} is {job.phase}; nothing of it runs: submit it anew, with spec.checkpoint.resumeFrom: {source} to go on")
        return job

    async def _patch(self, name: str, spec: Mapping[str, Any]) -> None:
        try:
            await self.client.merge(JOBS, self.where.namespace, name, {"spec": spec})
        except ApiError as error:
            raise await self.missing(error, name) from None

    async def _wait(self, name: str, done: Any, seconds: float, lacking: str) -> JobView:
        until = time.monotonic() + seconds
        while not done(job := await self.get(name)):
            if time.monotonic() > until:
                why = f" ({job.message})" if job.message else ""
                raise DeadlinePassed(
                    f"{name} {lacking} after {seconds:g} s{why}; ", call("events", name, self.where.namespace), " may say why"
                )
            await asyncio.sleep(LOOK_SECONDS)
        return job


def _saved(job: JobView) -> Mapping[str, Any]:
    """spec.checkpoint."""
    found: Mapping[str, Any] = (job.manifest or {}).get("spec", {}).get("checkpoint") or {}
    return found
