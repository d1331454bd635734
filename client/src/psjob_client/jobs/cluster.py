"""Jobs of a cluster: PSTrainingJobs with status, pods and Events; live numbers through the API server's proxy to the shards.

`reach` opens the way of a person to a cluster: the operator's client with a user's kubeconfig (`KubeClient`), and the context and namespace
that are meant (`Reach`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import yaml
from kubernetes.aio import config as kubeconfig
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config.config_exception import ConfigException

from psjob_client.jobs import translate
from psjob_client.jobs.verbs import answers_request, checked_job, next_request
from psjob_client.jobs.view import CheckpointView, EventView, HistoryView, JobView, LogLine, SpanView
from psjob_client.local.status import part, shaped
from psjob_client.problems import (
    Conflict,
    DeadlinePassed,
    JobProblem,
    NotAllowed,
    NotServed,
    NoWeights,
    Step,
    Unreachable,
    no_such_job,
    verb_step,
)
from psjob_operator import __version__, keys
from psjob_operator.cluster.client import (
    CORE_EVENTS,
    JOBS,
    PODS,
    SECRETS,
    ApiError,
    ConnectError,
    KubernetesClient,
    Limits,
    ResourceKind,
    in_cluster,
    kubeconfig_path,
    load_configuration,
)
from psjob_operator.cluster.observe import bounded, is_proven, nonce_of, parse_status
from psjob_operator.cluster.pods import parse_pod
from psjob_operator.contract import ANSWER_HEADER, CHALLENGE_PATH, HISTORY_PATH, PROOF_HEADER, STATUS_PATH, STATUS_PORT
from psjob_operator.plan import objects
from psjob_operator.plan.observed_state import Process
from psjob_operator.render.objects import LABEL_JOB

if TYPE_CHECKING:
    from psjob_client.jobs.verbs import Weights


ASK_SECONDS = 3.0
"""For what one shard says."""
MOST_ASKED = 16
"""Shards that are asked at a time."""
STATUS_SECONDS = 1.0
"""Between two looks at a job that changes."""
LOOK_SECONDS = 2.0
"""Between two looks for pods whose logs are to be followed."""
MOST_SEEN = 10_000
"""Lines of a job's history that are kept here."""
NOT_YET = 400
"""The API server's code for logs of a container that has not started."""
MANAGER = "psjob"
SECONDS = 15.0
"""For one call."""
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
CRD_MISSING = (
    "the cluster has no PSTrainingJob: install the operator as docs/install.md says, On a cluster, "
    "or only the CRD with `psjob crd | kubectl apply -f -`"
)


class ClusterJobs:
    """The jobs of one namespace; an empty one means all of them, for `list`. The operator does what each PSTrainingJob says."""

    once = True

    def __init__(self, client: KubeClient, where: Reach) -> None:
        self.client, self.where = client, where
        self._seen: dict[str, list[dict[str, Any]]] = {}
        self._keys: dict[str, tuple[int, bytes]] = {}
        """By run: number of its keys, and the one that its status ports are asked with."""

    @property
    def title(self) -> str:
        """Where it reads."""
        return str(self.where)

    async def list(self) -> Sequence[JobView]:
        """All jobs, the newest first; without their processes."""
        try:
            found = await self.client.list(JOBS, self.where.namespace)
        except ApiError as error:
            raise await self._said(error) from None
        jobs = [translate.cluster_view(raw, self.where.context) for raw in found]
        return sorted(jobs, key=lambda job: job.created or 0.0, reverse=True)

    async def get(self, name: str) -> JobView:
        """A job with its pods, and what its shards say of themselves right now, where the cluster allows that."""
        raw = await self.raw(name)
        pods = processes(await self._pods(name), raw["metadata"]["uid"])
        questions, limited = await self._questions(raw, pods)
        told = await self._ask(pods, questions)
        now = time.time()
        try:
            job = translate.cluster_view(raw, self.where.context, pods, told, now)
        except (TypeError, ValueError, AttributeError):
            job = translate.cluster_view(raw, self.where.context, pods)  # A pod of the user's has answered something else.
        self._remember(job)
        return job.model_copy(update={"limited": limited}) if limited else job

    async def history(self, name: str, most: int | None = None) -> HistoryView:
        """What shard 0 remembers of it while it runs, and what this source has seen of it."""
        job = await self.get(name)
        first = next((shard for shard in job.shards if shard.index == 0 and shard.name), None)
        told = None
        if job.fresh and first is not None:
            questions = self._keys.get(job.run or "")
            if questions is not None:
                path = PODS.path(self.where.namespace, str(first.name))
                told = await self.client.told_by(path, HISTORY_PATH, questions[1], ASK_SECONDS)
        seen = self._seen.setdefault(job.run or job.id, [])
        if told is not None and isinstance(told.get("entries"), list):
            remembered = [entry for entry in told["entries"] if isinstance(entry, dict) and isinstance(entry.get("time"), int | float)]
            seen[:] = sorted({entry["time"]: entry for entry in (*seen, *remembered)}.values(), key=lambda entry: entry["time"])[
                -MOST_SEEN:
            ]
        return translate.history_view(translate.thinned(seen, most), complete=first is not None and first.attempt == 1 and told is not None)

    async def events(self, name: str) -> Sequence[EventView]:
        """Of the job, its pods and its claim; the API server forgets them after an hour."""
        await self.raw(name)
        ours = re.compile(rf"{re.escape(name)}-(?:(?:shard|worker)-\d+-[ar]\d+|checkpoints)")
        try:
            own = await self.client.list(
                CORE_EVENTS, self.where.namespace, fields=f"involvedObject.kind=PSTrainingJob,involvedObject.name={name}"
            )
            rest = [
                event
                for kind in ("Pod", "PersistentVolumeClaim")
                for event in await self.client.list(CORE_EVENTS, self.where.namespace, fields=f"involvedObject.kind={kind}")
                if ours.fullmatch(str((event.get("involvedObject") or {}).get("name")))
            ]
        except ApiError as error:
            raise await self._said(error) from None
        return translate.cluster_events([*own, *rest])

    async def timeline(self, name: str) -> Sequence[SpanView]:
        """By its conditions, and by the pods that are still there."""
        raw = await self.raw(name)
        found = await self._pods(name)
        pods = processes(found, raw["metadata"]["uid"])
        return translate.cluster_timeline(translate.cluster_view(raw, self.where.context, pods), pods, raw, translate.pod_ends(found))

    async def checkpoints(self, name: str) -> Sequence[CheckpointView]:
        """The newest one: the others are on the volume, which only the job's shards see."""
        job = translate.cluster_view(await self.raw(name), self.where.context)
        return [job.checkpoint] if job.checkpoint is not None else []

    async def logs(self, name: str, process: str | None = None, *, follow: bool = False, tail: int | None = None) -> AsyncIterator[LogLine]:
        """From the pods' trained containers."""
        queue: asyncio.Queue[LogLine | JobProblem | None] = asyncio.Queue(maxsize=1000)
        reader = asyncio.create_task(self._read_logs(name, process, follow, tail, queue))
        try:
            while (line := await queue.get()) is not None:
                if isinstance(line, JobProblem):
                    raise line
                yield line
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def close(self) -> None:
        """Close the connections."""
        await self.client.close()

    async def submit(self, manifest: Mapping[str, Any]) -> str:
        """POST the job, checked strictly; its name."""
        job = checked_job(manifest)
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
                    verb_step("delete", job.metadata.name, namespace),
                ) from None
            raise await self._said(error) from None
        return job.metadata.name

    async def suspend(self, name: str, seconds: float | None) -> None:
        """spec.suspend: true, and wait until no pod is left."""
        job = await self._active(name)
        await self._patch(job.id, {"suspend": True})
        if seconds is not None:
            await self._wait(name, lambda now: now.suspended or now.over, seconds, "is not suspended yet")

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
        if job.suspended:
            raise Conflict(f"{name} is suspended, and its last checkpoint is of step {job.checkpoint.step if job.checkpoint else 0}")
        number = next_request(_saved(job), job.checkpoint)
        await self._patch(job.id, {"checkpoint": {"request": number}})

        def answered(now: JobView) -> bool:
            return now.over or answers_request(now.checkpoint, number, _saved(now))

        done = await self._wait(name, answered, seconds, "has not answered the request for a checkpoint yet")
        if done.checkpoint is None:
            raise Conflict(f"{name} has ended without a checkpoint; ", verb_step("get", name, self.where.namespace), " says why")
        return done.checkpoint

    async def weights(self, name: str) -> Weights:
        """Not from here: they lie on the job's claim."""
        job = translate.cluster_view(await self.raw(name), self.where.context)
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
                await asyncio.sleep(STATUS_SECONDS / 4)
        except ApiError as error:
            if error.code == 404:
                return
            raise await self._said(error) from None
        raise DeadlinePassed(
            f"{name} is being deleted, and still there after {seconds:g} s; `kubectl get psj {name} -o yaml` shows its finalizers"
        )

    async def raw(self, name: str) -> Mapping[str, Any]:
        """The object as it is stored. Raises NoSuchJob."""
        try:
            return await self.client.get(JOBS, self.where.namespace, name)
        except ApiError as error:
            raise await self.missing(error, name) from None

    async def missing(self, error: ApiError, name: str) -> JobProblem:
        """What to say about an error over the job `name`."""
        problem = await self._said(error)
        if error.code != 404 or isinstance(problem, NotServed):
            return problem
        known: list[str] = []
        with contextlib.suppress(ApiError):
            known = [raw["metadata"]["name"] for raw in await self.client.list(JOBS, self.where.namespace)]
        listing = verb_step("list", namespace=self.where.namespace)
        return no_such_job(name, f"namespace {self.where.namespace} of {self.where.context}", known, listing)

    async def _said(self, error: ApiError) -> JobProblem:
        if error.code == 404 and not await served(self.client):
            return NotServed(CRD_MISSING)
        return said(error, self.where)

    async def _pods(self, name: str) -> Sequence[Mapping[str, Any]]:
        try:
            return await self.client.list(PODS, self.where.namespace, labels=f"{LABEL_JOB}={name}")
        except ApiError as error:
            if error.code == 403:
                return []  # Without the right to see pods only the status speaks.
            raise await self._said(error) from None

    async def _questions(self, raw: Mapping[str, Any], pods: Sequence[Process]) -> tuple[bytes | None, str]:
        """The key that the run's status ports are asked with, and why there is none: it is read with the rights of who asks."""
        metadata, pinned = raw["metadata"], part(raw, "status", "internal", "pinned")
        run, number = str(metadata["uid"]), pinned.get("key")
        if not isinstance(number, int) or not any(one.phase == "Running" for one in pods):
            return None, ""
        if self._keys.get(run, (0, b""))[0] == number:
            return self._keys[run][1], ""
        name = objects.key_secret_name(str(metadata["name"]), run, number)
        told = f"the numbers are those of status, a minute old at most: the running job is asked with the Secret {name}, and"
        try:
            data = part(await self.client.get(SECRETS, self.where.namespace, name), "data")
            self._keys[run] = (number, bytes.fromhex(base64.b64decode(data["questions"]).decode()))
        except ApiError as error:
            why = "the right `get secrets` is missing" if error.code == 403 else f"it cannot be read ({error.message})"
            return None, f"{told} {why}"
        except (KeyError, ValueError):
            return None, f"{told} it has no entry questions"
        return self._keys[run][1], ""

    async def _ask(self, pods: Sequence[Process], questions: bytes | None) -> dict[int, Mapping[str, Any]]:
        if questions is None:
            return {}
        shards = {one.index: one for one in pods if one.role == "shard" and one.phase == "Running" and one.deleting is None}
        gate = asyncio.Semaphore(MOST_ASKED)

        async def ask(pod: Process) -> Mapping[str, Any] | None:
            async with gate:
                return await self.client.told_by(PODS.path(self.where.namespace, pod.name), STATUS_PATH, questions, ASK_SECONDS)

        first = shards.get(0)
        said = await ask(first) if first is not None else None
        if said is None or first is None:
            return {}  # Where shard 0 cannot be asked, nobody waits for the others.
        others = [shard for index, shard in shards.items() if index]
        answers = await asyncio.gather(*(ask(shard) for shard in others))
        return {0: said} | {shard.index: told for shard, told in zip(others, answers, strict=True) if told is not None}

    def _remember(self, job: JobView) -> None:
        told = job.progress
        lines = self._seen.setdefault(job.run or job.id, [])
        if told.time is not None and (not lines or lines[-1]["time"] < told.time):
            parts = list(told.step_parts.values())
            lines.append({"time": told.time, "step": told.step, "rate": told.rate, "metrics": told.metrics, "stepParts": parts})

    async def _read_logs(
        self, name: str, process: str | None, follow: bool, tail: int | None, queue: asyncio.Queue[LogLine | JobProblem | None]
    ) -> None:
        started: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                raw = await self.raw(name)
                pods = [one for one in processes(await self._pods(name), raw["metadata"]["uid"]) if is_asked_for(one, name, process)]
                over = translate.cluster_view(raw, self.where.context).over
                for one in pods:
                    if one.name not in started and (one.started is not None or not follow):
                        reading = self._read_log(one, follow, tail, queue)
                        started[one.name] = asyncio.create_task(reading)
                        if not follow:
                            await started[one.name]
                if not follow or (over and all(task.done() for task in started.values())):
                    break
                await asyncio.sleep(LOOK_SECONDS)
            await asyncio.gather(*started.values())
        except JobProblem as problem:
            await queue.put(problem)
        finally:
            for task in started.values():
                task.cancel()
            await queue.put(None)

    async def _read_log(self, pod: Process, follow: bool, tail: int | None, queue: asyncio.Queue[LogLine | JobProblem | None]) -> None:
        query: dict[str, Any] = {"follow": str(follow).lower()}
        if tail is not None:
            query["tailLines"] = tail
        path = f"{PODS.path(self.where.namespace, pod.name)}/log"
        # The trained container is named after its role, or it is the only one, whatever its name.
        for container in ({"container": pod.role}, {}):
            try:
                async for line in self.client.lines(path, {**container, **query}):
                    await queue.put(LogLine(process=pod.name, text=line))
                return
            except ApiError as error:
                if error.code not in (404, NOT_YET):
                    await queue.put(said(error, self.where))
                    return

    async def _active(self, name: str) -> JobView:
        raw = await self.raw(name)
        job = translate.cluster_view(raw, self.where.context)
        if job.over:
            source = f"{{run: {raw['metadata']['uid']}}}"
            raise Conflict(
                f"{name} is {job.phase}; nothing of it runs: submit it anew, with spec.checkpoint.resumeFrom: {source} to continue"
            )
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
                    f"{name} {lacking} after {seconds:g} s{why}; ", verb_step("events", name, self.where.namespace), " may say why"
                )
            await asyncio.sleep(STATUS_SECONDS)
        return job


def is_asked_for(pod: Process, job: str, process: str | None) -> bool:
    """Is this the pod that was asked for: `worker-0`, `shard-1`, or its whole name?"""
    short = f"{pod.role}-{pod.index}"
    return process in (None, pod.name, short)


def _saved(job: JobView) -> Mapping[str, Any]:
    """spec.checkpoint."""
    found: Mapping[str, Any] = (job.manifest or {}).get("spec", {}).get("checkpoint") or {}
    return found


def processes(pods: Iterable[Mapping[str, Any]], uid: str) -> list[Process]:
    """Those of this very job, the oldest start first."""
    found = [view.process for pod in pods if (view := parse_pod(pod)) is not None]
    return sorted((one for one in found if one.run in (uid, "")), key=lambda one: (one.role, one.index, one.number))


@dataclass(frozen=True)
class Reach:
    """Which cluster, and where in it."""

    context: str
    """Of the kubeconfig; in-cluster in a pod."""
    namespace: str
    host: str

    def __str__(self) -> str:
        """`kind/team-a`."""
        return f"{self.context}/{self.namespace}"


class KubeClient(KubernetesClient):
    """With the verbs that the operator never needs."""

    async def merge(self, kind: ResourceKind, namespace: str, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Merge patch of an object, checked strictly."""
        query = {"fieldManager": self._manager, "fieldValidation": "Strict"}
        return await self._call("PATCH", kind.path(namespace, name), query, body, content="application/merge-patch+json")

    async def told_by(self, pod: str, path: str, questions: bytes, seconds: float) -> dict[str, Any] | None:
        """The JSON object that the status port of this pod proves to be its answer to `path`, read as a stranger's.

        None where there is none, or no answer in so many seconds."""
        base = f"{pod}:{STATUS_PORT}/proxy"
        try:
            async with asyncio.timeout(seconds):
                async with self._request("GET", base + CHALLENGE_PATH, None, None, "") as reply:
                    nonce = nonce_of(await bounded(reply.content)) if reply.status == 200 else ""
                proof = {PROOF_HEADER: f"{nonce} {keys.question(questions, nonce, path)}"}
                async with self._request("GET", base + path, None, None, "", proof=proof) as reply:
                    raw = await bounded(reply.content) if nonce and reply.status == 200 else None
                    if raw is None or not is_proven(questions, nonce, path, raw, reply.headers.get(ANSWER_HEADER)):
                        return None
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None
        clean = parse_status(raw)
        return None if clean is None else shaped(clean)

    async def lines(self, path: str, query: Mapping[str, Any]) -> AsyncIterator[str]:
        """The text at `path`, a line at a time, until the API server ends it. Raises ApiError."""
        try:
            request = await self._api.param_serialize(
                "GET", path, query_params=list(query.items()), header_params={"Accept": "*/*"}, auth_settings=["BearerToken"]
            )
            # No deadline for the whole: a log that is followed is quiet for as long as its process is.
            response = await self._api.call_api(*request, _request_timeout=aiohttp.ClientTimeout(total=None, sock_connect=SECONDS))
            if response.status >= 400:
                raise ApiError(response.status, "Unknown", (await response.read())[:500].decode("utf-8", "replace"))
            rest = b""
            async for chunk in response.response.content.iter_any():
                *whole, rest = (rest + chunk).split(b"\n")
                for line in whole:
                    yield line.decode("utf-8", "replace")
            if rest:
                yield rest.decode("utf-8", "replace")
        except (aiohttp.ClientError, ApiException, OSError, TimeoutError) as error:
            raise ApiError(0, "Connection", str(error)) from error


async def reach(context: str | None, namespace: str | None, config: str | None = None) -> tuple[KubeClient, Reach]:
    """A client for `context` (the current one) and the place that it means; `namespace` absent: that of the context.

    Raises:
        Unreachable: there is no kubeconfig, or it cannot be used.
    """
    try:
        configuration = await load_configuration(config, context)
    except ConnectError as error:
        why = str(error)
        why_here = Step(why.replace("--kubeconfig FILE", "kubeconfig=FILE").replace("--kubeconfig", "kubeconfig"), why)
        local = Step("`psjob.Client.local()`", "add --local")
        raise Unreachable("no cluster can be reached: ", why_here, "; runs of this machine: ", local) from None
    name, own = ("in-cluster", _own_namespace()) if in_cluster(config) else _context(kubeconfig_path(config), context)
    client = KubeClient(configuration, Limits(qps=50.0, burst=100, timeout=SECONDS), f"psjob/{__version__}", MANAGER)
    return client, Reach(name, (own or "default") if namespace is None else namespace, str(configuration.host))


def said(error: ApiError, where: Reach) -> JobProblem:
    """What the API server, or nobody, answered, as one sentence with the next step."""
    message = " ".join(error.message.split())
    if error.code == 0:
        return Unreachable(
            f"the cluster of context {where.context} at {where.host} gives no answer ({message[:200]}); "
            f"check it with `kubectl --context {where.context} version`, or name another ",
            Step("context: `psjob.Client.kube(context=…)`", "--context"),
        )
    if error.code == 401:
        return NotAllowed(f"the cluster does not accept the credentials of context {where.context}: {message}; log in again")
    if error.code == 403:
        return NotAllowed(
            f"the cluster refuses: {message}; ask for the right, `kubectl auth can-i --list -n {where.namespace}` shows yours"
        )
    if error.code == 404 and "could not find the requested resource" in message:
        return NotServed(CRD_MISSING)
    if error.code in (409, 422):
        return Conflict(f"the cluster refuses: {message}")
    return JobProblem(f"the cluster answers {error.code} {error.reason}: {message}; try again, or look at `kubectl get pstrainingjobs`")


async def served(client: KubeClient) -> bool:
    """Does the cluster know PSTrainingJob? True where that cannot be asked."""
    try:
        return await client.served(JOBS)
    except ApiError:
        return True


def _context(path: str, name: str | None) -> tuple[str, str]:
    try:
        contexts, current = kubeconfig.list_kube_config_contexts(path)
    except (ConfigException, yaml.YAMLError, OSError, ValueError, TypeError, AttributeError, KeyError):
        return name or "current", ""
    found = next((one for one in contexts if one.get("name") == name), current) if name else current
    return str(found.get("name") or "current"), str((found.get("context") or {}).get("namespace") or "")


def _own_namespace() -> str:
    try:
        return NAMESPACE_FILE.read_text().strip()
    except OSError:
        return os.environ.get("POD_NAMESPACE", "")
