"""Questions that only a stuck pod or claim makes needed, each asked again only after a growing while."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from psjob_operator.api.status import unix
from psjob_operator.cluster.client import ApiError, Client
from psjob_operator.cluster.kinds import CHILDREN, CLAIMS, CORE_EVENTS, NODES
from psjob_operator.cluster.memory import STRANGER_SECONDS, Answer, Memory
from psjob_operator.cluster.pods import owner
from psjob_operator.cluster.scrub import forms, scrub
from psjob_operator.contract import STATUS_PORT
from psjob_operator.render.objects import LABEL_JOB

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


class Lookups:
    """One turn's questions; `again_at` is the earliest time at which one is due anew."""

    def __init__(self, client: Client, namespace: str, memory: Memory, now: float, tails: bool = True) -> None:
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
        return bool(raw["metadata"].get("deletionTimestamp")) or not (labelled or owner(raw["metadata"]) == uid)

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
    return " ".join(forms(words).split())


def _event_time(event: Mapping[str, Any]) -> float:
    series = event.get("series") or {}
    text = event.get("lastTimestamp") or series.get("lastObservedTime") or event.get("eventTime")
    return unix(text or event["metadata"].get("creationTimestamp")) or 0.0
