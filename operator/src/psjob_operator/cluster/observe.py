"""What is known of a job, as the observed state that `plan()` decides on; read on demand is only what a stuck pod or claim makes needed.

`Settings` is what a turn needs to know of this installation. `pull` asks shard 0's read-only status port for progress, which is trusted
with little: it is shown, and one thing is acted on (who hangs).
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import ipaddress
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import aiohttp
from pydantic import ValidationError

from psjob_operator import keys
from psjob_operator.api.spec import JobSpec
from psjob_operator.api.status import JobStatus
from psjob_operator.api.validate import LARGEST_SPEC, too_large, validate_job
from psjob_operator.cluster import node_loss
from psjob_operator.cluster.cache import Child, JobEntry, JobStore, Memory, read_list
from psjob_operator.cluster.client import CLAIMS, CONFIGS, JOBS, PODS, POLICIES, SERVICES, JobKey, KubernetesClient, ResourceKind
from psjob_operator.cluster.node_loss import Lookups
from psjob_operator.cluster.pods import PodView
from psjob_operator.contract import ANSWER_HEADER, CHALLENGE_PATH, PROOF_HEADER, STATUS_BYTES, STATUS_PATH, STATUS_PORT
from psjob_operator.plan import objects
from psjob_operator.plan.objects import named_claim, volume
from psjob_operator.plan.observed_state import Claim, Objects, ObservedState, Process, ResumeSource, Role
from psjob_operator.plan.status import PROBLEMS
from psjob_operator.printable import printable
from psjob_operator.render import LABEL_JOB, NOBODY, Peer, policy, policy_rules, resolves, service

_NOTHING = object()
PRUNINGS = 32
"""Readings of a spec that cannot be read whole, each without what the one before could not read."""
CLAIM_SECONDS = 20.0
"""A claim that is not bound for so long gets its Events read."""
SECONDS = 2.0
TEXT = 256
REFUSED = 403
UNKNOWN_KEY = (
    "progress is unknown: shard 0 does not take this operator's key; the key was another when the run began,"
    " suspend and resume the job to hand out this one"
)
UNPROVEN = "progress is unknown: what answers at shard 0's status port does not prove that it has the run's key"
_DEPTH = 6
_ITEMS = 4096


@dataclass(frozen=True)
class Observation:
    """What is known of a job, and when something in it must be looked at again."""

    state: ObservedState
    again_at: float | None
    address: str
    """Pod IP of shard 0 where it runs."""
    shard0: str
    """Uid of that pod."""


async def refresh(client: KubernetesClient, store: JobStore, key: JobKey) -> None:
    """Read the job's pods from the API server itself, so that absence may be believed."""
    await read_list(client, store, PODS, key.namespace, labels=f"{LABEL_JOB}={key.name}", job=key)


async def observe(
    client: KubernetesClient, store: JobStore, job: JobEntry, memory: Memory, now: float, live: bool, settings: Settings
) -> Observation:
    """What is known of this job now."""
    key = JobKey(job.namespace, job.name)
    views = store.pods(key)
    lookups = Lookups(client, job.namespace, memory, now, store.tails)
    shown = slow_and_shown(views, now)
    lost = await node_loss.pods_of_lost_nodes(lookups, views, memory, job.uid)
    processes = tuple([await _process(lookups, view, view.process.uid in shown, view.process.uid in lost) for view in views])
    spec, problems = _spec(job, memory)
    observed = ObservedState(
        name=job.name,
        namespace=job.namespace,
        uid=job.uid,
        generation=job.generation,
        resource_version=job.resource_version,
        created=job.created,
        spec=spec,
        status=_status(job),
        deleting=job.deleting,
        spec_problems=problems,
        processes=processes,
        objects=await _objects(lookups, store, job, spec, settings.askers),
        progress=memory.progress,
        progress_at=memory.progress_at,
        progress_problem=memory.progress_problem,
        gone=store.removed(key),
        farewell=store.farewell(key),
        granted=frozenset(memory.granted),
        refusals=tuple(memory.refusals.values()),
        resume_source=_resume_source(store, job, spec),
        key_made=memory.key_made,
        key_taken=memory.key_taken,
        live=live,
        labels=job.labels,
        runtime_image=settings.runtime_image,
        auto_encryption=settings.auto_encryption,
        written_at=memory.wrote_at,
        contended=memory.contests.words(now),
    )
    first = next((view for view in views if node_loss.askable_shard_0(view, job.uid)), None)
    address, uid = (first.ip, first.process.uid) if first is not None else ("", "")
    return Observation(observed, lookups.again_at, address, uid)


def slow_and_shown(views: Iterable[PodView], now: float) -> frozenset[str]:
    """Uids of the pods that are slow to start and whose Events are worth reading: as many of each role as a status shows."""
    slow = sorted((view.process for view in views if (view.process.slow_at or math.inf) <= now), key=lambda process: process.index)
    roles = ([process.uid for process in slow if process.role == role] for role in ("shard", "worker"))
    return frozenset(uid for uids in roles for uid in uids[:PROBLEMS])


async def _process(lookups: Lookups, view: PodView, shown: bool, lost: bool) -> Process:
    process = dataclasses.replace(view.process, node_lost=True) if lost else view.process
    slow, overdue = view.process.slow_at, view.overdue_at()
    if slow is not None and lookups.at(slow) and shown:
        process = dataclasses.replace(process, events=await lookups.events(process.uid))
    if not lost and overdue is not None and lookups.at(overdue) and await lookups.lost(process.node, fallback=view.tainted):
        process = dataclasses.replace(process, node_lost=True)
    return process


@dataclass(frozen=True)
class _Identity:
    """What the documents of a job are rendered from: as an ObservedState, before that is complete."""

    name: str
    namespace: str
    uid: str
    spec: JobSpec


async def _objects(lookups: Lookups, store: JobStore, job: JobEntry, spec: JobSpec, askers: Sequence[Peer]) -> Objects:
    own = named_claim(spec) if not job.status.get("completionTime") else ""
    key = JobKey(job.namespace, job.name)
    wanted = _Identity(job.name, job.namespace, job.uid, spec)
    headless = _mine(store, SERVICES, key, objects.service_name(job.name), job.uid)
    config = _mine(store, CONFIGS, key, objects.config_name(job.name), job.uid)
    claim, pairs = None, []
    for child in store.children(CLAIMS, key):
        if child.owner == job.uid and not child.deleting and child.name.startswith(objects.pair_claim_prefix(job.name, job.uid)):
            pairs.append(child.name)
        if child.name == objects.claim_name(job.name):
            words: tuple[str, ...] = ()
            if not child.bound and lookups.at(child.created + CLAIM_SECONDS):
                words = await lookups.events(child.uid)
            claim = Claim(name=child.name, ours=True, bound=child.bound, deleting=child.deleting, message="; ".join(words))
    modes, named = await lookups.claim(own) if own else (None, "")
    return Objects(
        service=headless is not None and headless.digest == resolves(service(wanted)["spec"]),
        config_digest=config.digest if config is not None else "",
        claim=claim,
        pair_claims=tuple(sorted(pairs)),
        modes=modes,
        named=named,
        unguarded=_unguarded(store, wanted, askers) if askers else (),
        strangers=await lookups.strangers(job.uid),
    )


def _resume_source(store: JobStore, job: JobEntry, spec: JobSpec) -> ResumeSource | None:
    """The job that `spec` names to continue from, as the watch has it; not asked for once its run is pinned."""
    asked = spec.checkpoint.resume_from
    known = asked is None or asked.job is None or ((job.status.get("internal") or {}).get("pinned") or {}).get("resumedFrom")
    other = None if asked is None or asked.job is None or known else store.job(JobKey(job.namespace, asked.job))
    if other is None:
        return None
    # A status of another run, as a backup brings it, gives no facts.
    run = other.uid if other.status.get("run") == other.uid else ""
    kept = volume(other.name, _lenient(other.spec, other.status))
    return ResumeSource(run=run, checkpoint=bool(run and other.status.get("checkpoint")), volume=kept)


def _mine(store: JobStore, kind: ResourceKind, key: JobKey, name: str, uid: str) -> Child | None:
    """The child of that name, where it is this job's and stays."""
    return next((child for child in store.children(kind, key) if child.name == name and child.owner == uid and not child.deleting), None)


def _unguarded(store: JobStore, job: _Identity, askers: Sequence[Peer]) -> tuple[Role, ...]:
    """Roles without a NetworkPolicy of this job that lets in what it should."""
    key, roles = JobKey(job.namespace, job.name), get_args(Role)
    there = {role: _mine(store, POLICIES, key, objects.policy_name(job.name, role), job.uid) for role in roles}
    return tuple(role for role, it in there.items() if it is None or it.digest != policy_rules(policy(job, role, askers)["spec"]))


def _spec(job: JobEntry, memory: Memory) -> tuple[JobSpec, tuple[str, ...]]:
    """The parsed spec; where it cannot be read at all a stand-in that nothing is made of, since there are problems."""
    if memory.observed is None or memory.observed[0] != job.generation:
        metadata = {"name": job.name, "namespace": job.namespace, "uid": job.uid}
        written = job.spec
        raw = {"apiVersion": f"{JOBS.group}/{JOBS.version}", "kind": JOBS.kind, "metadata": metadata, "spec": written}
        found, problems = (None, too_large(job.size)) if job.size > LARGEST_SPEC else validate_job(raw)
        spec = found.spec if found is not None else _lenient(written if isinstance(written, Mapping) else {}, job.status)
        told = tuple(str(problem) for problem in problems)
        if job.large:
            return spec, told
        memory.observed = (job.generation, spec, told)
    return memory.observed[1], memory.observed[2]


def _lenient(raw: Mapping[str, Any], status: Mapping[str, Any]) -> JobSpec:
    """What of the spec can be read, without what cannot: suspension, deadline and policies hold. Shards and workers are as many as the
    status has, where the spec does not say."""
    try:
        kept = copy.deepcopy(dict(raw))
    except RecursionError:
        kept = _owned(raw)
    for _ in range(PRUNINGS):
        try:
            return JobSpec.model_validate(kept)
        except RecursionError:
            break
        except ValidationError as error:
            pruned = [_prune(kept, problem["loc"]) for problem in error.errors(include_url=False)]
            if not any(pruned):
                break
        shards, workers = kept.setdefault("shards", {}), kept.setdefault("workers", {})
        if isinstance(shards, dict) and isinstance(workers, dict):
            shards.setdefault("replicas", max(1, len(status.get("shards") or ())))
            workers.setdefault("replicas", max(1, (status.get("workers") or {}).get("desired") or 0))
            workers.setdefault("template", {})
    return JobSpec.model_validate({**_owned(raw), "shards": {"replicas": 1}, "workers": {"replicas": 1, "template": {}}})


def _owned(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Who runs the job and whether it is to run, of a spec of which nothing else can be read: another controller's job is not touched."""
    manager, suspend = raw.get("managedBy"), raw.get("suspend")
    owned: dict[str, Any] = {} if manager is None else {"managedBy": str(manager)}
    return owned | ({"suspend": suspend} if isinstance(suspend, bool) else {})


def _prune(raw: Any, path: tuple[int | str, ...]) -> bool:
    """Remove what stands at that path, or the nearest thing above it; False where there is neither."""
    *above, last = path
    for number, key in enumerate(above):
        inner = raw.get(key) if isinstance(raw, dict) else None
        if not isinstance(inner, dict):
            last = above[number]
            break
        raw = inner
    return isinstance(raw, dict) and raw.pop(last, _NOTHING) is not _NOTHING


def _status(job: JobEntry) -> JobStatus | None:
    """None where only the schema's default stands there."""
    if not any(key in job.status for key in ("observedGeneration", "run", "shards", "internal")):
        return None
    return JobStatus.read(job.status)


@dataclass(frozen=True)
class Settings:
    """By the options of `psjob-operator run`."""

    runtime_image: str
    instance: str
    progress_seconds: float = 60.0
    shard_user: int | None = NOBODY
    """Of render.pod."""
    auto_encryption: str = "auto"
    """Of ObservedState."""
    askers: Sequence[Peer] = ()
    """Who may reach the status port of shards, by the NetworkPolicies that runs are given; empty: runs are given none."""


@dataclass(frozen=True)
class ProgressAnswer:
    """What shard 0 said; None where it is out of reach, slow, too long or no JSON object. `problem`: why an answer is not believed."""

    status: Mapping[str, Any] | None = None
    problem: str = ""


async def pull(session: aiohttp.ClientSession, ip: str, questions: bytes | None) -> ProgressAnswer:
    """Ask the process at this pod IP for its status, with the run's key `questions`; None: this operator has none yet."""
    try:
        address = ipaddress.ip_address(ip)
    except ValueError:
        return ProgressAnswer()
    if questions is None:
        return ProgressAnswer()
    host = f"[{address}]" if address.version == 6 else str(address)
    try:
        async with asyncio.timeout(SECONDS):
            return await _ask(session, f"http://{host}:{STATUS_PORT}", questions)
    except (TimeoutError, aiohttp.ClientError, OSError):
        return ProgressAnswer()


async def _ask(session: aiohttp.ClientSession, base: str, questions: bytes) -> ProgressAnswer:
    """The challenge, then the question: over one connection, where the process keeps it."""
    async with session.get(base + CHALLENGE_PATH, allow_redirects=False) as reply:
        nonce = nonce_of(await bounded(reply.content)) if reply.status == 200 else ""
    if not nonce:
        return ProgressAnswer()
    proof = {PROOF_HEADER: f"{nonce} {keys.question(questions, nonce, STATUS_PATH)}"}
    async with session.get(base + STATUS_PATH, headers=proof, allow_redirects=False) as reply:
        if reply.status == REFUSED:
            return ProgressAnswer(problem=UNKNOWN_KEY)
        raw = await bounded(reply.content) if reply.status == 200 else None
        if raw is None:
            return ProgressAnswer()
        if not is_proven(questions, nonce, STATUS_PATH, raw, reply.headers.get(ANSWER_HEADER)):
            return ProgressAnswer(problem=UNPROVEN)
    return ProgressAnswer(parse_status(raw))


def nonce_of(raw: bytes | None) -> str:
    """What a challenge asks to be proven; empty where it is none."""
    nonce = (parse_status(raw) or {}).get("nonce")
    return nonce if isinstance(nonce, str) and nonce.isascii() and nonce.isalnum() else ""


def is_proven(questions: bytes, nonce: str, path: str, body: bytes, header: str | None) -> bool:
    """Whether who sent this body to that question has the run's key."""
    return header is not None and keys.same(header.strip(), keys.answer(questions, nonce, path, body))


def parse_status(raw: bytes | None) -> Mapping[str, Any] | None:
    """A JSON object with numbers finite, strings cut and nesting bounded; None for anything else."""
    if raw is None or len(raw) > STATUS_BYTES:
        return None
    try:
        found = json.loads(raw, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    clean = _clean(found, _DEPTH)
    return clean if isinstance(clean, dict) else None


async def bounded(stream: aiohttp.StreamReader) -> bytes | None:
    """A body; None where it is longer than any that is right."""
    parts = bytearray()
    async for part in stream.iter_chunked(16 * 1024):
        parts += part
        if len(parts) > STATUS_BYTES:
            return None
    return bytes(parts)


def _clean(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return printable(value, most=TEXT)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**63 else None
    if depth == 0:
        return None
    if isinstance(value, list):
        return [_clean(item, depth - 1) for item in value[:_ITEMS]]
    if isinstance(value, dict):
        return {_clean(str(key), 0): _clean(item, depth - 1) for key, item in list(value.items())[:_ITEMS]}
    return None
