"""Carries out what the planner asked for, and is the one writer of a job's status and of the Kubernetes Events that tell the same news.

Every create is a POST of a name, every delete names a uid: doing it twice changes nothing. The status is a merge patch of what differs,
compare-and-swap on the resourceVersion. Events come after it, and at most once.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from psjob_operator import keys, render
from psjob_operator.api.status import JobStatus
from psjob_operator.certificates import certificates as run_certificates
from psjob_operator.cluster import pods
from psjob_operator.cluster.cache import STRANGER_SECONDS, JobEntry, JobStore, Memory
from psjob_operator.cluster.client import (
    CLAIMS,
    CONFIGS,
    EVENTS,
    JOBS,
    LIMIT_RANGES,
    PODS,
    POLICIES,
    QUOTA,
    SECRETS,
    SERVICES,
    ApiError,
    JobKey,
    KubernetesClient,
    ResourceKind,
    limit_words,
    limited,
    of_the_pod,
    ranges,
)
from psjob_operator.cluster.operator_key import OperatorKey
from psjob_operator.plan import objects
from psjob_operator.plan.actions import (
    Action,
    CreateProcess,
    DeleteJob,
    DeleteProcess,
    EnsureClaim,
    EnsureConfig,
    EnsureKey,
    EnsurePairClaim,
    EnsurePolicy,
    EnsureService,
    Event,
)
from psjob_operator.plan.objects import listening_workers
from psjob_operator.plan.observed_state import ObservedState, Role
from psjob_operator.plan.plan import OURS
from psjob_operator.printable import LINE_ENDS, printable
from psjob_operator.render import NOBODY

AT_ONCE = 8
"""Creates, or deletes, of one job under way at a time."""
MOST = 64
"""Creates, and deletes, of one job in a turn while another job waits for its own; the next turn continues."""
ANSWERS = (400, 403, 413, 422)
"""Refusals of this very object, which the user must hear of, as of what admission says; any other code speaks of the moment."""
_log = logging.getLogger(__name__)
_NEWS = frozenset({"phase", "observedGeneration", "restarts", "interruption", "lastRecovery", "startTime", "completionTime"})
_KEYS = {"conditions": (("type",), "status"), "shards": (("index", "replica"), "attempt")}
"""Lists whose entries are told apart by the first fields; what a newer operator adds to one holds while the last stays, too."""
_MOMENTS = ("checkpoint", "progress", "interruption", "lastRecovery")
"""What is replaced whole when it changes: parts of another moment do not belong to it."""
_NOTE = 1024
ROOM = 4096
"""Events that wait to be written; the oldest goes first where there are more."""
BUSY_SECONDS, LOOK_SECONDS = 0.5, 0.05
"""An Event waits so long at most while jobs wait for their turn, since what turns write is needed sooner; and looks again so often."""


@dataclass
class ApplyOutcome:
    """What came of the acts."""

    refused: bool = False
    """The API server said no to something: the status must tell."""
    failure: ApiError | None = None
    """The first answer that leaves open what happened, or that says: later."""
    again_at: float | None = None
    more: bool = False
    """Acts are left for the next turn, which may begin at once."""
    held: ApiError | None = None
    """Why no pod is made now: something that pods need is not there."""
    kept: str = ""
    """Why the job was not deleted, though its time has come."""
    unguarded: str = ""
    """Why a NetworkPolicy is not there, without which pods are made."""


class Apply:
    """One turn's acts for one job."""

    def __init__(
        self,
        client: KubernetesClient,
        store: JobStore,
        own_key: OperatorKey,
        shard_user: int | None = NOBODY,
        busy: Callable[[], bool] = lambda: False,
        askers: Sequence[render.Peer] = (),
    ) -> None:
        self._askers = askers
        self._busy = busy
        self._client = client
        self._own_key = own_key
        self._user = shard_user
        self._store = store

    async def run(self, observed: ObservedState, actions: Sequence[Action], memory: Memory, now: float) -> ApplyOutcome:
        """Do them in order, then deletes of pods, then creates, several at a time. A refusal of one create holds back those after it:
        asking the same question a thousand times helps nobody."""
        outcome = ApplyOutcome()
        creates: list[CreateProcess] = []
        deletes: list[DeleteProcess] = []
        for action in actions:
            match action:
                case CreateProcess():
                    creates.append(action)
                    continue
                case EnsureService():
                    await self._ensure(SERVICES, render.service(observed), observed, memory, now, outcome)
                case EnsureConfig():
                    await self._ensure(
                        CONFIGS,
                        render.config(observed, action.format, action.encryption, action.resumed_from),
                        observed,
                        memory,
                        now,
                        outcome,
                    )
                case EnsureClaim():
                    await self._ensure(CLAIMS, render.claim(observed), observed, memory, now, outcome)
                case EnsurePairClaim():
                    await self._ensure(CLAIMS, render.pair_claim(observed, action.index, action.number), observed, memory, now, outcome)
                case EnsurePolicy():
                    await self._ensure_policy(action.role, observed, memory, now, outcome)
                case EnsureKey():
                    await self._ensure_key(action, observed, memory, now, outcome)
                case DeleteProcess():
                    deletes.append(action)
                case DeleteJob():
                    await self._delete_job(observed, outcome)
            if outcome.failure is not None and not outcome.kept:
                raise outcome.failure
        answers: list[ApiError | None] = []
        for first in range(0, len(deletes), AT_ONCE):
            if first >= MOST and self._busy():
                outcome.more = True
                outcome.failure = next((error for error in answers if error is not None), None)
                return outcome
            part = deletes[first : first + AT_ONCE]
            answers += await asyncio.gather(*(self._delete(observed, it) for it in part))
        if outcome.held is None:
            await self._create_all(observed, creates, memory, now, outcome)
        elif outcome.held.code != 409:
            for action in creates:
                memory.refuse(action.name, outcome.held.code, outcome.held.message, now)
        # A delete that was refused is tried again in a later turn; it has held back no create.
        outcome.failure = outcome.failure or next((error for error in answers if error is not None), None)
        return outcome

    async def _delete_job(self, observed: ObservedState, outcome: ApplyOutcome) -> None:
        try:
            await self._client.delete(JOBS, observed.namespace, observed.name, observed.uid)
        except ApiError as error:
            outcome.failure = error
            outcome.kept = error.message if error.definite else ""

    async def _delete(self, observed: ObservedState, action: DeleteProcess) -> ApiError | None:
        """Delete one pod; answers why it was not."""
        try:
            await self._client.delete(PODS, observed.namespace, action.name, action.uid, action.grace_seconds)
        except ApiError as error:
            return error
        self._store.dismiss(JobKey(observed.namespace, observed.name), action.uid)
        return None

    async def _create_all(
        self, observed: ObservedState, creates: Sequence[CreateProcess], memory: Memory, now: float, outcome: ApplyOutcome
    ) -> None:
        pods_of = render.Pods(observed, self._user, memory.asks_nothing)
        due = [action for action in creates if action.name in memory.granted and memory.due(action.name) <= now]
        made = 0
        while due and outcome.failure is None:
            if made >= MOST and self._busy():
                outcome.more = True
                return
            made += AT_ONCE
            part, due = due[:AT_ONCE], due[AT_ONCE:]
            refusals = await asyncio.gather(*(self._create(observed, action, pods_of.pod(action), memory, now, outcome) for action in part))
            held = next((refusal for refusal in refusals if refusal is not None), None)
            if held is not None:
                outcome.refused = True
                for action in due:
                    memory.refuse(action.name, held.code, held.message, now)
                return

    async def _create(
        self, observed: ObservedState, action: CreateProcess, body: Mapping[str, Any], memory: Memory, now: float, outcome: ApplyOutcome
    ) -> ApiError | None:
        """POST one pod; answers the refusal, where there was one."""
        # Whatever happens from here on but a definite no, the name may be taken: the grant is used up.
        memory.granted.discard(action.name)
        try:
            self._store.put(PODS, await self._client.create(PODS, observed.namespace, body))
        except ApiError as error:
            if error.taken:
                return await self._taken(PODS, action.name, observed, memory, now, outcome)
            if not error.definite:
                outcome.failure = outcome.failure or error
                return None
            memory.granted.add(action.name)
            if not _answers(error):
                outcome.failure = outcome.failure or error
                return None
            message = await self._told(error, action, body, observed, memory)
            memory.refuse(action.name, _code(error), message, now, error.invalid and (error.code != 422 or of_the_pod(error.causes, body)))
            return ApiError(error.code, error.reason, message)
        memory.refusals.pop(action.name, None)
        return None

    async def _told(self, error: ApiError, action: CreateProcess, body: Mapping[str, Any], observed: ObservedState, memory: Memory) -> str:
        """The refusal in words. What psjob asks for by itself gives way to a LimitRange, and stands where a quota wants to be told."""
        resources = limited(error.causes, error.message, body)
        if not resources:
            memory.asks_nothing = memory.asks_nothing and QUOTA not in error.message
            return error.message
        memory.asks_nothing = memory.asks_nothing or render.Pods(observed, self._user, asks_nothing=True).pod(action) != body
        try:
            found = await self._client.list(LIMIT_RANGES, observed.namespace)
        except ApiError:
            found = []  # without its name the sentence still says what is minded
        return limit_words(error.causes, error.message, resources, ranges(found, resources), observed.namespace)

    async def _taken(
        self, kind: ResourceKind, name: str, observed: ObservedState, memory: Memory, now: float, outcome: ApplyOutcome
    ) -> ApiError | None:
        """The name is held: by our own earlier write, by one that goes, or by a stranger. Nothing is adopted."""
        try:
            raw = await self._client.get(kind, observed.namespace, name)
        except ApiError as error:
            # Perhaps ours, made and gone again: not to be made a second time under this number.
            outcome.failure = outcome.failure or error
            return None
        if pods.controller_uid(raw["metadata"]) == observed.uid:
            # Made before under this number, by whomever: it is never made twice, also when it is going already.
            self._store.put(kind, raw)
            memory.refusals.pop(name, None)
            return None
        memory.granted.add(name)
        refusal = ApiError(409, "NameConflict", f"{kind.kind} {name} exists and {_whose(raw, observed)}")
        memory.refuse(name, refusal.code, refusal.message, now)
        return refusal

    async def _ensure(
        self, kind: ResourceKind, body: Mapping[str, Any], observed: ObservedState, memory: Memory, now: float, outcome: ApplyOutcome
    ) -> None:
        """Create what is not there; server-side apply onto what is ours and differs; leave what is another's."""

        label = f"{kind.kind}/{body['metadata']['name']}"
        if (rests := memory.contests.rests_until(label, now)) is not None:
            outcome.again_at = rests
            return

        async def make() -> None:
            self._store.put(kind, await self._create_or_apply(kind, body, observed, memory, now))

        await self._try(kind, body["metadata"]["name"], make, observed, memory, now, outcome)

    async def _ensure_policy(self, role: Role, observed: ObservedState, memory: Memory, now: float, outcome: ApplyOutcome) -> None:
        """One that another object keeps from being made holds the pods back, as with all names. One that is refused does not: keys keep
        strangers away too, and a job must not stand still because the operator may not make policies."""
        part = ApplyOutcome()
        await self._ensure(POLICIES, render.policy(observed, role, self._askers), observed, memory, now, part)
        outcome.failure = part.failure
        if part.held is None and part.again_at is not None:
            outcome.again_at = part.again_at
        if part.held is not None and part.held.code == 409:
            outcome.held, outcome.refused, outcome.again_at = part.held, part.refused, part.again_at
        elif part.held is not None:
            outcome.unguarded = part.held.message

    async def _ensure_key(self, action: EnsureKey, observed: ObservedState, memory: Memory, now: float, outcome: ApplyOutcome) -> None:
        """Make the Secret of the run's keys; it is never read. One that no pod of the run mounts may be a stranger's."""
        taken, secret = False, objects.key_secret_name(observed.name, observed.uid, action.number)

        async def make() -> None:
            nonlocal taken
            questions = self._own_key.questions(observed.uid)
            if questions is None:
                raise ApiError(403, "NoKey", self._own_key.problem)
            run = keys.fresh() | {"questions": questions}
            listeners = (observed.spec.shards.replicas, listening_workers(observed.spec))
            certificates = await asyncio.to_thread(run_certificates, *listeners) if action.certificates else {}
            try:
                await self._client.create(SECRETS, observed.namespace, render.key_secret(observed, action.number, run, certificates))
            except ApiError as error:
                if not error.taken:
                    raise
                taken = not observed.mounts(secret)
            if not taken:
                memory.key_made = action.number

        await self._try(SECRETS, secret, make, observed, memory, now, outcome)
        if taken:
            memory.key_taken, outcome.refused, outcome.again_at = action.number, True, now
            outcome.held = ApiError(409, "KeyTaken", f"keys {action.number} exist already; the run takes the next ones")

    async def _try(
        self,
        kind: ResourceKind,
        name: str,
        make: Callable[[], Awaitable[None]],
        observed: ObservedState,
        memory: Memory,
        now: float,
        outcome: ApplyOutcome,
    ) -> None:
        """Make something that pods need, unless it was refused a moment ago; what keeps it from being made holds the pods back."""
        label = f"{kind.kind}/{name}"
        refused = memory.refusals.get(name)
        if refused is not None and memory.due(name) > now:
            outcome.again_at = memory.due(name)
            outcome.held = ApiError(refused.code, "Refused", refused.message)
            return
        try:
            await make()
        except _Stranger as found:
            outcome.refused = True
            outcome.held = ApiError(409, "NameConflict", f"{label} exists and {found}")
            memory.strangers[label] = now
            outcome.again_at = now + STRANGER_SECONDS
            _log.warning("%s exists and %s", label, found, extra=_where(observed))
        except ApiError as error:
            if not _answers(error):
                outcome.failure = error
                return
            memory.refuse(name, _code(error), f"{label}: {error.message}", now)
            outcome.refused = True
            outcome.held = ApiError(_code(error), error.reason, f"{label}: {error.message}")
            outcome.again_at = memory.due(name)
        else:
            if memory.refusals.pop(name, None) is not None:
                outcome.again_at = now  # the status still tells of it, and what we made ourselves is no news
            memory.strangers.pop(label, None)

    async def _create_or_apply(
        self, kind: ResourceKind, body: Mapping[str, Any], observed: ObservedState, memory: Memory, now: float
    ) -> Mapping[str, Any]:
        try:
            return await self._client.create(kind, observed.namespace, body)
        except ApiError as error:
            if not error.taken:
                raise
        raw = await self._client.get(kind, observed.namespace, body["metadata"]["name"])
        if not _ours(kind, raw, body, observed):
            raise _Stranger(_whose(raw, observed))
        if kind == CLAIMS:
            return raw
        # The uid makes it a refusal, not a take-over, should another object have come under that name meanwhile.
        mine = {**body, "metadata": {**body["metadata"], "uid": raw["metadata"]["uid"]}}
        made = await self._client.apply(kind, observed.namespace, mine)
        memory.contests.correct(f"{kind.kind}/{body['metadata']['name']}", now)
        return made


def _code(error: ApiError) -> int:
    """The code of a refusal: 409 is said of a name that is held, never of what admission denies."""
    return 403 if error.denied and error.code == 409 else error.code


def _answers(error: ApiError) -> bool:
    return error.code in ANSWERS or error.denied


class _Stranger(Exception):
    """The name is held by an object that is not ours."""


def _ours(kind: ResourceKind, raw: Mapping[str, Any], body: Mapping[str, Any], observed: ObservedState) -> bool:
    """A claim outlives its job and is known by its label; the others by their owner."""
    if raw["metadata"].get("deletionTimestamp"):
        return False
    if kind == CLAIMS:
        label = render.LABEL_JOB
        return bool((raw["metadata"].get("labels") or {}).get(label) == body["metadata"]["labels"][label])
    return pods.controller_uid(raw["metadata"]) == observed.uid


def _whose(raw: Mapping[str, Any], observed: ObservedState) -> str:
    if raw["metadata"].get("deletionTimestamp"):
        return "is still being deleted; it is waited for"
    holder = pods.controller_uid(raw["metadata"])
    if holder == observed.uid:
        return "is ours"
    return (
        f"belongs to another owner (uid {holder}); delete it or name this job differently"
        if holder
        else "is not ours; delete it or name this job differently"
    )


def _where(observed: ObservedState) -> dict[str, str]:
    return {"job": f"{observed.namespace}/{observed.name}", "uid": observed.uid}


async def write_status(client: KubernetesClient, job: JobEntry, change: Mapping[str, Any]) -> dict[str, Any]:
    """Store `change` (of `difference`) if the job is still as `job` says; answers the object as stored.

    Raises ApiError: 409 where it has changed, 404 where it has gone, 422 where a rule of the schema refuses it.
    """
    body = {"metadata": {"resourceVersion": job.resource_version, "uid": job.uid}, "status": change}
    return await client.patch_status(JOBS, job.namespace, job.name, body)


def status_difference(stored: Mapping[str, Any], wanted: JobStatus) -> dict[str, Any]:
    """The merge patch from the stored status to the wanted one; empty where nothing differs.

    What only a newer operator knows, or what cannot be read, is left as it is.
    """
    read = JobStatus.read(stored)
    if stored and read == wanted:
        return {}
    known = read.to_manifest()
    if read.run not in (None, wanted.run):
        # The run before has nothing to say of this one but its numbers.
        return merge_patch({key: value for key, value in stored.items() if key in known}, wanted.to_manifest())
    return merge_patch(stored, _kept(stored, known, wanted.to_manifest()))


def _kept(stored: Mapping[str, Any], known: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """`wanted` with what of `stored` is not `known`, that is, what was not understood of it."""
    made = dict(wanted)
    for key, value in stored.items():
        if key not in wanted:
            if key not in known:
                made[key] = value
        elif key in _MOMENTS:
            made[key] = value if known.get(key) == wanted[key] else wanted[key]
        elif key in _KEYS and isinstance(value, list):
            made[key] = _entries(value, known.get(key) or [], wanted[key], *_KEYS[key])
        elif isinstance(value, Mapping) and isinstance(wanted[key], Mapping):
            made[key] = _kept(value, known.get(key) or {}, wanted[key])
    return made


def _entries(stored: list[Any], known: list[Any], wanted: list[Any], names: tuple[str, ...], same: str) -> list[Any]:
    """The same for a list: entries that were not understood stand behind the others."""
    before = {key: entry for entry in stored if isinstance(entry, Mapping) and (key := _key(entry, names)) is not None}
    understood = {_key(entry, names): entry for entry in known}
    made = []
    for entry in wanted:
        key = _key(entry, names)
        old = before.pop(key, {}) if key is not None else {}
        alike = key in understood and old.get(same) == entry[same]
        made.append(_kept(old, understood[key], entry) if alike else entry)
    return [*made, *(entry for key, entry in before.items() if key not in understood)]


def _key(entry: Mapping[str, Any], names: tuple[str, ...]) -> tuple[Any, ...] | None:
    """What tells an entry from the others; None where it lacks a part of that."""
    found = tuple(entry.get(name) for name in names)
    return found if all(isinstance(value, str | int) for value in found) else None


def tells_news(stored: Mapping[str, Any], change: Mapping[str, Any]) -> bool:
    """Does a change tell more than details: another phase, another number, a condition that came, went or turned?

    Another reason for what is waited for is a detail: most such reasons (a pod not yet scheduled, a claim not yet bound) are
    over before anyone could read them.
    """
    if _NEWS & change.keys() or "term" in (change.get("internal") or {}):
        return True
    return "conditions" in change and _said(stored.get("conditions")) != _said(change["conditions"])


def _said(conditions: Any) -> list[tuple[Any, Any]]:
    return [(entry.get("type"), entry.get("status")) for entry in conditions or ()]


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """RFC 7386: what to send so that `old` becomes `new`."""
    patch: dict[str, Any] = {}
    for key in old.keys() - new.keys():
        patch[key] = None
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            inner = merge_patch(before, value)
            if inner:
                patch[key] = inner
        elif key not in old or before != value:
            patch[key] = value
    return patch


class EventRecorder:
    """Writes Events beside the turns, one after the other, and seldom while jobs wait: a job that waits for a pod does not wait for them.

    One that cannot be written, or for which there is no room, is lost, which hurts nobody: the status has the news.
    """

    def __init__(self, client: KubernetesClient, instance: str, busy: Callable[[], bool]) -> None:
        self._client = client
        self._instance = instance
        self._busy = busy
        self._bodies: deque[tuple[str, dict[str, Any]]] = deque(maxlen=ROOM)
        self._changed = asyncio.Event()

    def record(self, job: JobEntry, events: Sequence[Event], now: float) -> None:
        """Have them written soon.

        Their names are made from the job's resourceVersion, which the status write has just moved, so the same news cannot come twice.
        """
        for number, event in enumerate(events):
            self._bodies.append((job.namespace, _body(job, event, number, self._instance, now)))
        self._changed.set()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._bodies:
                await self._turns_first()
                await self._write(*self._bodies.popleft())

    async def _turns_first(self) -> None:
        end = time.monotonic() + BUSY_SECONDS
        while self._busy() and time.monotonic() < end:
            await asyncio.sleep(LOOK_SECONDS)

    async def _write(self, namespace: str, body: dict[str, Any]) -> None:
        try:
            await self._client.create(EVENTS, namespace, body)
        except ApiError as error:
            name = body["regarding"]["name"]
            _log.warning("the Event %s was not written: %s", body["reason"], error, extra={"job": f"{namespace}/{name}"})


def _body(job: JobEntry, event: Event, number: int, instance: str, now: float) -> dict[str, Any]:
    seed = f"{job.uid}/{job.resource_version}/{number}/{event.reason}"
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"namespace": job.namespace, "name": f"{job.name}.{hashlib.sha256(seed.encode()).hexdigest()[:16]}"},
        "regarding": {
            "apiVersion": f"{JOBS.group}/{JOBS.version}",
            "kind": JOBS.kind,
            "namespace": job.namespace,
            "name": job.name,
            "uid": job.uid,
        },
        "type": event.type,
        "reason": event.reason[:128],
        "note": printable(event.message, LINE_ENDS, _NOTE),
        "action": "Reconcile",
        "reportingController": OURS,
        "reportingInstance": instance[:128],
        "eventTime": datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
    }
