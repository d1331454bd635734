"""What this process knows between two turns: what was last heard of jobs and their children (JobStore), and what it did itself (Memory).

The store is a small projection, fed by watch events, re-lists and our own replies. It may be stale, never wrong for long. An older word
never replaces a newer one, and what is gone stays gone. Every write that rests on it carries a precondition. Losing all of a Memory is
safe: numbers are raised again, questions asked again. An object that another operator writes too is left alone for a while (Contests).
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic.alias_generators import to_camel

from psjob_operator.api.spec import JobSpec, with_replicas
from psjob_operator.api.status import unix
from psjob_operator.api.validate import LARGEST_SPEC
from psjob_operator.cluster import pods
from psjob_operator.cluster.client import CHILDREN, CLAIMS, CONFIGS, JOBS, PODS, POLICIES, SERVICES, JobKey, KubernetesClient, ResourceKind
from psjob_operator.plan.objects import text_digest
from psjob_operator.plan.observed_state import Process, Refusal
from psjob_operator.render import policy_rules, resolves
from psjob_operator.render.objects import CONFIG_FILE, LABEL_JOB

_TOMBSTONES = 20_000
LARGE = 64 << 10
"""Bytes of a spec's JSON; the largest template that we have seen has 20 KiB."""
SMALL = 4096
_BRIEF = (("shards", "replicas"), ("workers", "replicas"), ("checkpoint", "disabled"), ("checkpoint", "periodSeconds"))


TRIES, WITHIN_SECONDS = 3, 120.0
"""So many corrections of one object within this time are a contest. A person who edits it by hand needs longer."""
REST_SECONDS = 600.0
"""Until the object is put right once more."""
FOREIGN_SECONDS = 2.0
"""A pod whose number another operator (or one before this) gave may still be made for so long; only then its absence is believed."""
STRANGER_SECONDS = 10.0
"""An object of a stranger under a child's name is looked at again so often."""


@dataclass(frozen=True)
class JobEntry:
    """A job as stored: the raw spec and status, and the metadata that is read."""

    namespace: str
    name: str
    uid: str
    generation: int
    resource_version: str
    created: float
    deleting: bool
    labels: Mapping[str, str]
    kept: Mapping[str, Any] | bytes
    """The spec; one of more than LARGE bytes is packed, since as objects it takes fifty times as much memory."""
    brief: Mapping[str, Any]
    """Of the spec what is asked for oftener than a turn: shards.replicas, workers.replicas and checkpoint.disabled."""
    status: Mapping[str, Any]
    size: int = 0
    """Bytes of the spec's JSON. Of one above LARGEST_SPEC, which no job has, only small fields are kept."""

    @property
    def spec(self) -> Mapping[str, Any]:
        """The raw spec; `large` ones are read anew."""
        return json.loads(zlib.decompress(self.kept)) if isinstance(self.kept, bytes) else self.kept

    @property
    def large(self) -> bool:
        """What is made of the spec is not to be kept either."""
        return isinstance(self.kept, bytes)


@dataclass(frozen=True)
class Child:
    """A Service, ConfigMap, claim or NetworkPolicy of a job."""

    name: str
    uid: str
    owner: str
    digest: str = ""
    """Of a ConfigMap: of its file; of a Service: of what it resolves to; of a NetworkPolicy: of what it lets in."""
    bound: bool = False
    deleting: bool = False
    created: float = 0.0


@dataclass
class PodTally:
    """How many pods of a job there are."""

    there: int = 0
    up: int = 0
    """Of these: running, and shards ready."""
    ended: int = 0
    """Of these: ended, or going."""

    def count(self, view: pods.PodView, by: int) -> None:
        """Add this pod, or take it away with -1."""
        process = view.process
        ended = process.exit is not None or process.deleting is not None or process.phase in ("Succeeded", "Failed")
        self.there += by
        self.ended += by * ended
        self.up += by * (not ended and process.phase == "Running" and (process.ready or process.role == "worker"))


View = JobEntry | Child | pods.PodView


@dataclass(frozen=True)
class _Entry:
    uid: str
    version: int
    job: JobKey
    view: View


class JobStore:
    """Entries by kind, namespace and name; children also by the job that their label names."""

    def __init__(self, tails: bool = True) -> None:
        """`tails`: of scrub.told."""
        self.tails = tails
        self._entries: dict[ResourceKind, dict[JobKey, _Entry]] = {kind: {} for kind in (JOBS, *CHILDREN)}
        self._of_job: dict[ResourceKind, dict[JobKey, set[JobKey]]] = {kind: defaultdict(set) for kind in CHILDREN}
        self._gone: OrderedDict[str, int | None] = OrderedDict()
        self._farewells: dict[JobKey, Process] = {}
        self._removed: dict[JobKey, dict[tuple[str, int], Process]] = {}
        self._tallies: dict[JobKey, PodTally] = {}

    def put(self, kind: ResourceKind, raw: Mapping[str, Any]) -> JobKey | None:
        """Take in an object; answers the job it concerns, or None where it says nothing new."""
        metadata = raw["metadata"]
        uid, version = metadata["uid"], int(metadata["resourceVersion"])
        if not self._rises(uid, version):
            return None
        place = JobKey(metadata["namespace"], metadata["name"])
        known = self._entries[kind].get(place)
        if known is not None and known.version >= version:
            return None
        job = place if kind == JOBS else JobKey(place.namespace, (metadata.get("labels") or {}).get(LABEL_JOB, ""))
        view = self._view(kind, raw)
        if known is not None and known.job == job and known.view == view:
            self._entries[kind][place] = _Entry(uid, version, job, known.view)
            return None
        if known is not None and (known.job != job or view is None):
            # Without our labels nobody serves it any more: for its job it is as good as removed.
            self._remember(known.job, known.view)
            self._drop(kind, place)
            known = None if view is not None and job.name else known
        if view is None or not job.name:
            return known.job if known is not None else None
        if isinstance(view, pods.PodView):
            tally = self._tallies.setdefault(job, PodTally())
            tally.count(view, 1)
            if known is not None and isinstance(known.view, pods.PodView):
                tally.count(known.view, -1)
        self._entries[kind][place] = _Entry(uid, version, job, view)
        if kind != JOBS:
            self._of_job[kind][job].add(place)
        return job

    def remove(self, kind: ResourceKind, raw: Mapping[str, Any]) -> JobKey | None:
        """An object has gone; answers the job it concerned."""
        metadata = raw["metadata"]
        self._bury(metadata["uid"], int(metadata["resourceVersion"]) if "resourceVersion" in metadata else None)
        place = JobKey(metadata["namespace"], metadata["name"])
        known = self._entries[kind].get(place)
        if known is None or known.uid != metadata["uid"]:
            return None
        last = self._view(kind, raw) if "status" in raw else None
        self._remember(known.job, last or known.view)
        self._drop(kind, place)
        return known.job

    def sweep(self, kind: ResourceKind, namespace: str, present: Collection[str], version: int, job: JobKey | None = None) -> set[JobKey]:
        """A whole list of a kind, of one namespace or (empty) of all, or of one job's children, was put: what is not in it has gone.

        `present`: the uids in it; `version`: its resourceVersion. Answers the jobs for which this was news. Younger entries stay.
        """
        news: set[JobKey] = set()
        for place, entry in list(self._entries[kind].items()) if job is None else self._entries_of(kind, job):
            inside = not namespace or place.namespace == namespace
            if inside and entry.uid not in present and entry.version <= version:
                self._bury(entry.uid, version)
                self._remember(entry.job, entry.view)
                self._drop(kind, place)
                news.add(entry.job)
        return news

    def job(self, key: JobKey) -> JobEntry | None:
        """The job of this name."""
        entry = self._entries[JOBS].get(key)
        return entry.view if entry is not None and isinstance(entry.view, JobEntry) else None

    def jobs(self) -> list[JobKey]:
        """The keys of all jobs."""
        return list(self._entries[JOBS])

    def pods(self, key: JobKey) -> list[pods.PodView]:
        """The job's pods, by name."""
        return [view for view in self._children(PODS, key) if isinstance(view, pods.PodView)]

    def tally(self, key: JobKey) -> PodTally:
        """How many pods the job has, in which state."""
        return self._tallies.get(key) or PodTally()

    def farewell(self, key: JobKey) -> Process | None:
        """The last shard 0 of this job that had ended when its pod was removed."""
        return self._farewells.get(key)

    def removed(self, key: JobKey) -> tuple[Process, ...]:
        """The newest process of each seat of this job whose pod was removed, as it last was."""
        return tuple(self._removed.get(key, {}).values())

    def children(self, kind: ResourceKind, key: JobKey) -> list[Child]:
        """The job's children of this kind that are no pods, by name."""
        return [view for view in self._children(kind, key) if isinstance(view, Child)]

    def counts(self) -> dict[str, int]:
        """How many objects of each kind are known."""
        return {kind.plural: len(entries) for kind, entries in self._entries.items()}

    def _children(self, kind: ResourceKind, key: JobKey) -> list[View]:
        return [self._entries[kind][place].view for place in sorted(self._of_job[kind].get(key, ()))]

    def _entries_of(self, kind: ResourceKind, key: JobKey) -> list[tuple[JobKey, _Entry]]:
        return [(place, self._entries[kind][place]) for place in self._of_job[kind].get(key, ())]

    def _remember(self, job: JobKey, view: View) -> None:
        """A pod that ends and is removed between two turns leaves its last words here."""
        process = view.process if isinstance(view, pods.PodView) else None
        if process is not None and self.job(job) is not None:
            seats = self._removed.setdefault(job, {})
            known = seats.get((process.role, process.index))
            if known is None or known.run != process.run or known.number <= process.number:
                seats[process.role, process.index] = dataclasses.replace(process, gone=True)
        if process is not None and (process.role, process.index) == ("shard", 0) and process.exit is not None:
            self._farewells[job] = process

    def _drop(self, kind: ResourceKind, place: JobKey) -> None:
        entry = self._entries[kind].pop(place)
        if kind == JOBS:
            self._farewells.pop(place, None)
            self._removed.pop(place, None)
        else:
            members = self._of_job[kind][entry.job]
            members.discard(place)
            if not members:
                del self._of_job[kind][entry.job]
            if isinstance(entry.view, pods.PodView):
                tally = self._tallies[entry.job]
                tally.count(entry.view, -1)
                if not tally.there:
                    del self._tallies[entry.job]

    def dismiss(self, key: JobKey, uid: str) -> None:
        """A removed pod of this job was deleted again, to be sure: nothing need be done about it any more."""
        seats = self._removed.get(key, {})
        for seat in [seat for seat, process in seats.items() if process.uid == uid]:
            del seats[seat]

    def _view(self, kind: ResourceKind, raw: Mapping[str, Any]) -> View | None:
        return pods.parse_pod(raw, self.tails) if kind == PODS else _PARSE[kind](raw)

    def _rises(self, uid: str, version: int) -> bool:
        """Whether this object is there: what was removed is not, but what only lost its label for a while has a newer version."""
        buried = self._gone.get(uid, -1)
        if buried is None or version <= buried:
            return False
        self._gone.pop(uid, None)
        return True

    def _bury(self, uid: str, version: int | None) -> None:
        """Gone with this version; None: for good."""
        self._gone[uid] = version
        while len(self._gone) > _TOMBSTONES:
            self._gone.popitem(last=False)


async def read_list(
    client: KubernetesClient, store: JobStore, kind: ResourceKind, namespace: str, labels: str, job: JobKey | None = None
) -> tuple[set[JobKey], int]:
    """Reads a whole list into the store, a page at a time: of 10,000 pods no more than a page is held as it came.

    Answers the jobs for which it was news, and the list's resourceVersion. Raises ApiError; what was read before it stays.
    """
    news: set[JobKey] = set()
    present: set[str] = set()
    version = 0
    async for page in client.pages(kind, namespace, labels):
        news |= {found for raw in page.items if (found := store.put(kind, raw)) is not None}
        present |= {raw["metadata"]["uid"] for raw in page.items}
        version = page.version
    return news | store.sweep(kind, namespace, present, version, job), version


def _job(raw: Mapping[str, Any]) -> JobEntry:
    metadata, spec = raw["metadata"], raw.get("spec") or {}
    counted = with_replicas(spec)
    text, brief = json.dumps(spec, separators=(",", ":")).encode(), _brief(counted)
    if len(text) <= LARGEST_SPEC:
        kept: Mapping[str, Any] | bytes = zlib.compress(text, 1) if len(text) > LARGE else spec
    else:
        kept = brief | {"workers": {"template": {}, **brief.get("workers", {})}} | _small(spec)
    return JobEntry(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        generation=int(metadata.get("generation") or 0),
        resource_version=metadata["resourceVersion"],
        created=unix(metadata.get("creationTimestamp")) or 0.0,
        deleting=bool(metadata.get("deletionTimestamp")),
        labels=dict(metadata.get("labels") or {}),
        kept=kept,
        brief=brief,
        status=raw.get("status") or {},
        size=len(text),
    )


def _brief(spec: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for part, name in _BRIEF:
        if isinstance(fields := spec.get(part), Mapping) and name in fields:
            found.setdefault(part, {})[name] = fields[name]
    return found


def _small(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a spec that have SMALL values and letters at most, such as suspend and managedBy."""
    names = map(to_camel, JobSpec.model_fields)
    return {name: spec[name] for name in names if name in spec and _is_small(spec[name])}


def _is_small(value: Any) -> bool:
    left, todo = SMALL, [value]
    while todo and left > 0:
        part = todo.pop()
        left -= 1 + (len(part) if isinstance(part, str | Mapping | list) else 0)
        if left > 0 and isinstance(part, Mapping):
            left -= sum(map(len, part))
            todo.extend(part.values())
        elif left > 0 and isinstance(part, list):
            todo.extend(part)
    return left > 0


def _child(raw: Mapping[str, Any]) -> Child:
    metadata = raw["metadata"]
    return Child(
        name=metadata["name"],
        uid=metadata["uid"],
        owner=pods.controller_uid(metadata),
        bound=(raw.get("status") or {}).get("phase") == "Bound",
        deleting=bool(metadata.get("deletionTimestamp")),
        created=unix(metadata.get("creationTimestamp")) or 0.0,
    )


def _service(raw: Mapping[str, Any]) -> Child:
    return dataclasses.replace(_child(raw), digest=resolves(raw.get("spec") or {}))


def _config(raw: Mapping[str, Any]) -> Child:
    """By its text: whoever may patch it may leave its label as it was."""
    return dataclasses.replace(_child(raw), digest=text_digest(str((raw.get("data") or {}).get(CONFIG_FILE, ""))))


def _policy(raw: Mapping[str, Any]) -> Child:
    return dataclasses.replace(_child(raw), digest=policy_rules(raw.get("spec") or {}))


_PARSE: dict[ResourceKind, Callable[[Mapping[str, Any]], View | None]] = {
    JOBS: _job,
    SERVICES: _service,
    CONFIGS: _config,
    CLAIMS: _child,
    POLICIES: _policy,
}


@dataclass
class Contests:
    """Of one job's objects, by `Kind/name`."""

    corrected: dict[str, list[float]] = field(default_factory=dict)
    """When this process put an object right that it had found changed."""

    def correct(self, label: str, now: float) -> None:
        """It was put right now."""
        self.corrected[label] = [*self.corrected.get(label, ()), now][-TRIES:]

    def rests_until(self, label: str, now: float) -> float | None:
        """Unix time until which it is left as the other writes it; None where it may be put right."""
        times = self.corrected.get(label, [])
        if len(times) < TRIES or times[-1] - times[0] > WITHIN_SECONDS or now >= times[-1] + REST_SECONDS:
            return None
        return times[-1] + REST_SECONDS

    def words(self, now: float) -> str:
        """What is contended now; empty for nothing."""
        found = sorted(label for label in self.corrected if self.rests_until(label, now) is not None)
        if not found:
            return ""
        return (
            f"another operator, or another controller, keeps changing {', '.join(found[:3])}; "
            f"it is left as it is for {REST_SECONDS / 60:.0f} minutes. Let one release of the chart serve this namespace"
        )


@dataclass
class Answer:
    """Something read on demand: the words of Events, or whether a node is lost."""

    at: float
    words: tuple[str, ...] = ()
    lost: bool = False
    state: Literal["", "going", "missing"] = ""
    """Of a claim: it is being deleted, or not there."""
    silent: bool = False
    """Of a node: it is gone, or its kubelet was not heard of for the control plane's grace period."""
    wait: float = 60.0
    """Seconds until it is asked again, while it still matters."""

    def fresh(self, now: float) -> bool:
        """Whether it need not be asked again yet."""
        return now < self.at + self.wait


@dataclass
class Memory:
    """Of one job (one uid)."""

    uid: str
    granted: set[str] = field(default_factory=set)
    """Names of pods whose number this process raised, and that were not created yet."""
    refusals: dict[str, Refusal] = field(default_factory=dict)
    asks_nothing: bool = False
    """A LimitRange refused what psjob's own parts ask for by default: they are left to what it gives."""
    key_made: int | None = None
    """Number of the run's keys whose Secret is known to be made."""
    key_taken: int | None = None
    """Number of keys whose Secret was there before this run had a pod."""
    strangers: dict[str, float] = field(default_factory=dict)
    """`Kind/name` -> when it was last seen to be another's."""
    silent: dict[str, float] = field(default_factory=dict)
    """Nodes of which nothing is heard -> since when we know."""
    answers: dict[str, Answer] = field(default_factory=dict)
    """By uid of the pod or claim, or name of the node."""
    progress: Mapping[str, Any] | None = None
    progress_at: float | None = None
    progress_problem: str = ""
    """Of ObservedState."""
    asked_at: float = 0.0
    """When shard 0 was last asked."""
    misses: int = 0
    """Questions in a row that were not answered."""
    interrupted: bool = False
    """Something was started again, and the first step after it is looked for."""
    asked_uid: str = ""
    """Pod that was asked last."""
    wrote_at: float | None = None
    """When this process last stored the status."""
    contests: Contests = field(default_factory=Contests)
    status_refused: str = ""
    """Why the API server refused the last status write; empty where it took it."""
    unguarded: str = ""
    """Why the API server last refused a NetworkPolicy of this job."""
    kept: str = ""
    """Why the API server last refused to delete this job in its time."""
    numbers: tuple[Any, ...] = ()
    """Term, worker start and attempts of the status when last looked at."""
    numbers_at: float = 0.0
    """When another process gave the present numbers, as far as we know; 0 where we did, or nobody."""
    observed: tuple[int, Any, tuple[str, ...]] | None = None
    """(generation, parsed spec, its problems)."""

    def see(self, status: Mapping[str, Any], now: float, ours: bool) -> None:
        """Notice the numbers of this status, and whether it was us who gave them."""
        shards, internal = status.get("shards"), status.get("internal")
        attempts = tuple(entry.get("attempt") for entry in (shards if isinstance(shards, list) else ()) if isinstance(entry, Mapping))
        own = internal if isinstance(internal, Mapping) else {}
        numbers = (own.get("term"), own.get("workerStart"), attempts)
        if numbers != self.numbers:
            given = any((numbers[0], numbers[1], attempts))
            self.numbers, self.numbers_at = numbers, now if given and not ours else 0.0

    def patience(self) -> float:
        """Until when the pods of numbers that another process gave may still be on their way."""
        return self.numbers_at + FOREIGN_SECONDS if self.numbers_at else 0.0

    def refuse(self, name: str, code: int, message: str, now: float, invalid: bool = False) -> None:
        """Remember that the API server refused to create this."""
        known = self.refusals.get(name)
        tries = known.tries + 1 if known else 1
        self.refusals[name] = Refusal(name=name, code=code, message=message, at=now, tries=tries, invalid=invalid)

    def due(self, name: str) -> float:
        """When this may be tried again; 0 where it was never refused."""
        known = self.refusals.get(name)
        return 0.0 if known is None else known.again_at
