"""Which processes went with a node of which nothing is heard: those for which nothing else speaks either.

A pod whose process had ended goes with its node too: nobody else would take its volume off. Beyond that a kubelet out of reach proves
nothing of the pods there. A shard that takes a connection lives, and so does a worker that has joined and has a stream to shard 0.
A process that is taken for lost and lives is fenced by the number of its successor.

Lookups asks what only a stuck pod, node or claim makes needed, each question again only after a growing while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from psjob_operator.api.status import unix
from psjob_operator.cluster.cache import STRANGER_SECONDS, Answer, Memory
from psjob_operator.cluster.client import CHILDREN, CLAIMS, CORE_EVENTS, NODES, ApiError, KubernetesClient
from psjob_operator.cluster.pods import PodView, controller_uid
from psjob_operator.cluster.redact import encoded_forms, scrub
from psjob_operator.contract import STATUS_PORT
from psjob_operator.plan.observed_state import Process
from psjob_operator.render.objects import LABEL_JOB

AGAIN_SECONDS = 2.0
BEGIN_SECONDS = 30.0
"""From when a pod was bound until its node is asked for, if no container of it has begun."""


QUESTIONS = 8
"""Of each kind in a turn; what is left is asked in the next one, soon."""
NEXT_SECONDS = 0.5
NODE_SECONDS = 2.0
"""Until a node is asked for again, at first."""
CLAIM_SECONDS = 60.0
"""Until a claim is asked for again."""
PORT_SECONDS = 1.0
_WORDS = 3
_MOST_WAIT = 900.0
_QUOTING = ("Unhealthy", "FailedPostStartHook", "FailedPreStopHook")
"""Reasons of Events in which the kubelet gives what a container printed or answered."""
_CLAIM_REASONS = ("FailedBinding", "ProvisioningFailed")


async def pods_of_lost_nodes(lookups: Lookups, views: Sequence[PodView], memory: Memory, run: str) -> frozenset[str]:
    """Uids of the pods that are lost with their nodes."""
    # The marked pods may be gone before one that its node never began: the node is looked at until it is heard of.
    nodes = dict.fromkeys(
        view.process.node for view in views if view.unheard or view.process.node in memory.silent or slow_to_begin(view, lookups)
    )
    silent = {node for node in nodes if await lookups.silent(node)}
    memory.silent = {node: memory.silent.get(node, lookups.now) for node in silent}
    # The node controller marks one pod after the other: all of the node's are looked at with the first.
    suspects = [view for view in views if view.process.node in silent and view.process.exit is None]
    shards = [view for view in suspects if view.process.role == "shard"]
    # All at once: what is sent to a machine that is off is answered by nothing but the time limit.
    answering = await asyncio.gather(*(lookups.answers(view.ip) for view in shards))
    found = {view.process.uid for view, answers in zip(shards, answering, strict=True) if not answers}
    found |= {view.process.uid for view in views if view.process.node in silent and view.holds}
    first = any(askable_shard_0(view, run) and view.process.uid not in found for view in views)
    for view in suspects:
        process = view.process
        if process.role != "worker":
            continue
        heard = memory.progress_at is not None and memory.progress_at > memory.silent[process.node]
        if not first or (heard and not joined_shard_0(memory.progress, process)):
            found.add(process.uid)
    if silent:
        lookups.at(lookups.now + AGAIN_SECONDS)
    return frozenset(found)


def slow_to_begin(view: PodView, lookups: Lookups) -> bool:
    """The pod has not begun for a while. The node controller marks only pods that were ready."""
    process = view.process
    waits = process.phase == "Pending" and process.scheduled is not None and process.deleting is None and bool(process.node)
    return waits and lookups.at((process.scheduled or 0.0) + BEGIN_SECONDS)


def askable_shard_0(view: PodView, run: str) -> bool:
    """This is the run's shard 0, and it can be asked."""
    process = view.process
    alive = process.phase == "Running" and process.deleting is None
    return process.role == "shard" and process.index == 0 and process.run == run and alive and bool(view.ip)


def joined_shard_0(progress: Mapping[str, Any] | None, worker: Process) -> bool:
    """Shard 0 says that this very process is with it. One whose stream has ended is, by an older runtime: that tells no `here`."""
    told = (progress or {}).get("coordinator")
    workers = told.get("workers") if isinstance(told, Mapping) else None
    mine = (entry for entry in workers if isinstance(entry, Mapping)) if isinstance(workers, list) else ()
    return any(
        it.get("rank") == worker.index and it.get("start") == worker.number and it.get("state") == "joined" and it.get("here", True) is True
        for it in mine
    )


class Lookups:
    """One turn's questions; `again_at` is the earliest time at which one is due anew."""

    def __init__(self, client: KubernetesClient, namespace: str, memory: Memory, now: float, tails: bool = True) -> None:
        """`tails`: of scrub.told."""
        self._tails = tails
        self._client = client
        self._namespace = namespace
        self._memory = memory
        self.now = now
        self.again_at: float | None = None
        self._left = {"events": QUESTIONS, "nodes": QUESTIONS}

    def at(self, when: float) -> bool:
        """Whether that time has come; if not, it will be looked at then."""
        if when <= self.now:
            return True
        self.again_at = when if self.again_at is None else min(self.again_at, when)
        return False

    async def events(self, uid: str) -> tuple[str, ...]:
        """Words of the warnings about this object, newest first."""
        known = self._memory.answers.get(uid)
        if known is None or not known.fresh(self.now):
            if not self._may_ask("events"):
                return () if known is None else known.words
            known = Answer(self.now, words=await self._read_events(uid), wait=_next_wait(known))
            self._memory.answers[uid] = known
        self.at(known.at + known.wait)
        return known.words

    async def lost(self, node: str, fallback: bool) -> bool:
        """Whether this node is gone or not ready; `fallback` where we may not read nodes."""
        return (await self._node(node, fallback)).lost

    async def silent(self, node: str) -> bool:
        """Whether this node is gone, or its kubelet out of reach; False where we may not read nodes."""
        return (await self._node(node, fallback=False)).silent

    async def answers(self, address: str) -> bool:
        """Whether something takes a connection on the status port there, now."""
        if not address:
            return False
        try:
            async with asyncio.timeout(PORT_SECONDS):
                _, writer = await asyncio.open_connection(address, STATUS_PORT)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    async def claim(self, name: str) -> tuple[tuple[str, ...] | None, Literal["", "going", "missing"]]:
        """Access modes of this claim, None where it cannot be read, and whether it is being deleted or not there. It is asked for again if
        the answer is old when a turn comes, and where it goes or lacks at its time."""
        known = self._memory.answers.get("claim/" + name)
        if known is None or not known.fresh(self.now):
            words, wait = ((), NODE_SECONDS) if known is None else (known.words, min(known.wait * 2, CLAIM_SECONDS))
            modes, state = await self._read_claim(name)
            known = Answer(self.now, words=modes or words, state=state, wait=CLAIM_SECONDS if words else wait)
            self._memory.answers["claim/" + name] = known
        if known.state:
            self.at(known.at + known.wait)
        return known.words or None, known.state

    async def _node(self, node: str, fallback: bool) -> Answer:
        known = self._memory.answers.get("node/" + node)
        if known is None or not known.fresh(self.now):
            if not self._may_ask("nodes"):
                return Answer(self.now) if known is None else known
            lost, silent = await self._read_node(node, fallback)
            wait = NODE_SECONDS
            # A node that changes, or that nobody has asked for since, may change again soon.
            if known is not None and (known.lost, known.silent) == (lost, silent) and self.now < known.at + 2 * known.wait:
                wait = min(known.wait * 2, 60.0)
            known = Answer(self.now, lost=lost, silent=silent, wait=wait)
            self._memory.answers["node/" + node] = known
        self.at(known.at + known.wait)
        return known

    def _may_ask(self, kind: str) -> bool:
        """Whether this turn has a question left; if not, the next one comes soon."""
        self._left[kind] -= 1
        return self._left[kind] >= 0 or self.at(self.now + NEXT_SECONDS)

    async def strangers(self, uid: str) -> tuple[str, ...]:
        """`Kind/name` of what holds our children's names and does not belong to the job `uid`; each is looked at again now and then."""
        for label, seen in list(self._memory.strangers.items()):
            if not self.at(seen + STRANGER_SECONDS):
                continue
            if await self._still_there(label, uid):
                self._memory.strangers[label] = self.now
                self.at(self.now + STRANGER_SECONDS)
            else:
                del self._memory.strangers[label]
        return tuple(sorted(self._memory.strangers))

    async def _still_there(self, label: str, uid: str) -> bool:
        word, _, name = label.partition("/")
        kind = next(kind for kind in CHILDREN if kind.kind == word)
        try:
            raw = await self._client.get(kind, self._namespace, name)
        except ApiError as error:
            if error.code == 404:
                return False
            raise
        labelled = kind == CLAIMS and LABEL_JOB in (raw["metadata"].get("labels") or {})
        return bool(raw["metadata"].get("deletionTimestamp")) or not (labelled or controller_uid(raw["metadata"]) == uid)

    async def _read_events(self, uid: str) -> tuple[str, ...]:
        try:
            found = await self._client.list(CORE_EVENTS, self._namespace, fields=f"involvedObject.uid={uid}")
        except ApiError as error:
            if not error.definite:
                raise
            return (f"its Events cannot be read: {error.message}",)
        return _newest(found, self._tails)

    async def _read_claim(self, name: str) -> tuple[tuple[str, ...], Literal["", "going", "missing"]]:
        try:
            raw = await self._client.get(CLAIMS, self._namespace, name)
        except ApiError as error:
            if error.code == 404:
                return (), "missing"
            if error.definite:
                return (), ""
            raise
        return tuple((raw.get("spec") or {}).get("accessModes") or ()), "going" if raw["metadata"].get("deletionTimestamp") else ""

    async def _read_node(self, node: str, fallback: bool) -> tuple[bool, bool]:
        """(lost, silent)."""
        try:
            raw = await self._client.get(NODES, "", node)
        except ApiError as error:
            if error.code == 404:
                return True, True
            if error.definite:
                return fallback, False
            raise
        ready = [entry for entry in (raw.get("status") or {}).get("conditions") or [] if entry.get("type") == "Ready"]
        said = str(ready[0].get("status")) if ready else "Unknown"
        return said != "True", said == "Unknown"


def _next_wait(known: Answer | None) -> float:
    return 60.0 if known is None else min(_MOST_WAIT, known.wait * 2)


def _newest(events: Iterable[Mapping[str, Any]], tails: bool) -> tuple[str, ...]:
    """At most three different sentences, newest first: warnings, and what a claim waits for; what the scheduler said is over by then."""
    told = [event for event in events if event.get("type") == "Warning" or event.get("reason") in _CLAIM_REASONS]
    told = [event for event in told if event.get("reason") != "FailedScheduling"]
    told.sort(key=_event_time, reverse=True)
    words = (f"{event.get('reason', '')}: {_message(event, tails)}" for event in told)
    return tuple(dict.fromkeys(words))[:_WORDS]


def _message(event: Mapping[str, Any], tails: bool) -> str:
    words = str(event.get("message") or "")
    if event.get("reason") in _QUOTING:
        what, failed, _ = words.partition("failed: ")
        words = scrub(words) if tails else what + failed.rstrip(": ")
    return " ".join(encoded_forms(words).split())


def _event_time(event: Mapping[str, Any]) -> float:
    series = event.get("series") or {}
    text = event.get("lastTimestamp") or series.get("lastObservedTime") or event.get("eventTime")
    return unix(text or event["metadata"].get("creationTimestamp")) or 0.0
