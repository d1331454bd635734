"""One turn of one job: observe, plan, write the intent, act, write the status, tell the Events. Level-triggered and repeatable."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import aiohttp

from psjob_operator.api.spec import JobSpec
from psjob_operator.api.status import JobStatus
from psjob_operator.cluster import apply, observe
from psjob_operator.cluster.apply import Apply
from psjob_operator.cluster.cache import JobEntry, JobStore, Memory
from psjob_operator.cluster.client import JOBS, ApiError, JobKey, KubernetesClient
from psjob_operator.cluster.metrics import JobReading, Meter, TurnResult
from psjob_operator.cluster.observe import Settings
from psjob_operator.cluster.operator_key import OperatorKey
from psjob_operator.cluster.queue import Queue
from psjob_operator.plan.actions import Event, Plan
from psjob_operator.plan.job_state import checkpoint_unanswered
from psjob_operator.plan.observed_state import REFUSED_MOST, ObservedState
from psjob_operator.plan.plan import plan
from psjob_operator.plan.status import RECOVERED

REST_MOST, REST_PART = 1.0, 0.25e-3
"""Seconds that a job rests after a turn, at most and a pod: one of thousands of pods has as many events, and its turns are long."""
HUNG_PART = 0.2
"""Of workers.progressDeadlineSeconds: how often shard 0 is asked who hangs."""
EARLY_SECONDS = 10.0
SILENT_SECONDS = 2.0
"""While nothing is heard of a node, shard 0 is asked so often who is still there."""
DETAIL_SECONDS = 5.0
"""Details, such as which of several pods are up, are gathered for so long after a write."""
SHUT_SECONDS = 15.0
"""A job in a namespace that may not be read is looked at again."""
MISSES = 3
"""A shard that was out of reach so often is asked seldom too."""
_log = logging.getLogger(__name__)


class Reconciler:
    """Takes keys from the queue for as long as it runs."""

    def __init__(
        self,
        client: KubernetesClient,
        store: JobStore,
        queue: Queue,
        settings: Settings,
        session: aiohttp.ClientSession,
        own_key: OperatorKey,
        clock: Callable[[], float] = time.time,
        meter: Meter | None = None,
        shut: Callable[[str], str] = lambda namespace: "",
    ) -> None:
        """`shut`: why nothing may be done in a namespace; empty where it may."""
        self._client = client
        self._shut = shut
        self._meter = meter or Meter()
        self._store = store
        self._queue = queue
        self._settings = settings
        self._session = session
        self._clock = clock
        self._own_key = own_key
        self._apply = Apply(client, store, own_key, settings.shard_user, self._busy, settings.askers)
        self.recorder = apply.EventRecorder(client, settings.instance, self._busy)
        self._memories: dict[JobKey, Memory] = {}
        self._pulls: set[asyncio.Task[None]] = set()
        self.turns = 0

    async def work(self, most: int | None = None) -> None:
        """Turn after turn, with `most` only of jobs of at most that rank. A turn that fails is tried again later and never stops another
        job's."""
        while True:
            key = await self._queue.next(most)
            began, rest = time.monotonic(), True
            result: TurnResult = "ok"
            try:
                rest = not await self._turn(key)
                self._queue.succeed(key)
            except ApiError as error:
                result = "api"
                # What keeps the API server from taking this may be over at any time.
                delay = self._queue.fail(key, error.retry_after, at_most=REFUSED_MOST)
                _log.warning("%s; again in %.1f s", error, delay, extra=self._where(key))
            except Exception:
                result = "error"
                delay = self._queue.fail(key)
                _log.exception("this turn failed; again in %.1f s", delay, extra=self._where(key))
            finally:
                self.turns += 1
                self._meter.turn(result, time.monotonic() - began)
                self._queue.done(key, rest=min(REST_MOST, REST_PART * self._store.tally(key).there) if rest else 0.0)

    def _busy(self) -> bool:
        """Does a job wait for its turn?"""
        return self._queue.waiting() > 0

    async def _turn(self, key: JobKey) -> bool:
        """One turn; whether acts are left, for which the next one is to begin at once."""
        job = self._store.job(key)
        if job is None:
            self._memories.pop(key, None)
            self._queue.forget(key)
            return False
        if self._shut(key.namespace):
            # Half of what is there cannot be seen: nothing is decided on it.
            self._queue.add_at(key, self._clock() + SHUT_SECONDS)
            return False
        memory = self._memories.get(key)
        if memory is None or memory.uid != job.uid:
            memory = self._memories[key] = Memory(uid=job.uid)
        now = self._clock()
        memory.see(job.status, now, ours=False)
        seen = await self._observe(job, memory, now, live=False)
        decided = plan(seen.state, now)
        if decided.needs_live and now < memory.patience():
            self._queue.add_at(key, memory.patience())
            return False
        if decided.needs_live:
            await observe.refresh(self._client, self._store, key)
            seen = await self._observe(job, memory, now, live=True)
            decided = plan(seen.state, now)
        memory.interrupted = decided.status.interruption is not None
        self._again(key, now, seen.again_at, decided.wake_at)
        if _nothing(decided, seen.state):
            return False
        if decided.intent:
            written = await self._write(job, decided, memory, now)
            if written is None:
                return False
            job = written
            memory.granted |= decided.grants
        outcome = await self._apply.run(seen.state, decided.actions, memory, now)
        self._again(key, now, outcome.again_at)
        self._tell_unguarded(job, outcome.unguarded, memory, now)
        self._tell_kept(job, outcome.kept, memory, now)
        if outcome.refused:
            # What was just refused is news that the status must tell.
            seen = await self._observe(job, memory, now, live=seen.state.live)
            told = plan(seen.state, now)
            if told.intent:
                self._queue.add(key)
            else:
                decided = _joined(decided, told)
        if outcome.more and outcome.failure is None:
            self._queue.add(key)
            return True
        if not await self._settle(key, job, decided, memory, now):
            return False
        self._again(key, now, decided.wake_at)
        if decided.want_progress:
            self._want_progress(key, memory, seen, now)
        if outcome.failure is not None:
            raise outcome.failure
        return False

    async def _observe(self, job: JobEntry, memory: Memory, now: float, live: bool) -> observe.Observation:
        return await observe.observe(self._client, self._store, job, memory, now, live, self._settings)

    def _again(self, key: JobKey, now: float, *times: float | None) -> None:
        """Look at this job at these times, whatever becomes of this turn."""
        for when in times:
            if when is not None:
                self._queue.add_at(key, max(when, now + 0.05))

    async def _settle(self, key: JobKey, job: JobEntry, decided: Plan, memory: Memory, now: float) -> bool:
        """The last status write of a turn, if one is needed; then the Events that it tells of.

        False where the job has changed under us.
        """
        told = decided.intent
        change = apply.status_difference(job.status, decided.status)
        if change and not (told or decided.actions or decided.events) and not apply.tells_news(job.status, change):
            due = (memory.wrote_at or 0.0) + DETAIL_SECONDS
            if now < due:
                self._queue.add_at(key, due)
                return True
        if change:
            stored = await self._write(job, decided, memory, now)
            if stored is None:
                return False
            job, told = stored, True
        if told and decided.events:
            self.recorder.record(job, decided.events, now)
            last = decided.status.last_recovery
            if last is not None and any(event.reason == RECOVERED for event in decided.events):
                self._meter.recovered(last.cause, last.duration_seconds)
        return True

    async def _write(self, job: JobEntry, decided: Plan, memory: Memory, now: float) -> JobEntry | None:
        """Compare-and-swap; None where the job has changed or gone, after which it is looked at anew."""
        key = JobKey(job.namespace, job.name)
        change = apply.status_difference(job.status, decided.status)
        if not change:
            return job
        try:
            raw = await apply.write_status(self._client, job, change)
        except ApiError as error:
            if error.code not in (404, 409) or error.denied:
                self._tell_refused(job, error, memory, now)
                raise
            await self._reread(key, job)
            return None
        memory.wrote_at, memory.status_refused = now, ""
        memory.see(raw.get("status") or {}, now, ours=True)
        self._store.put(JOBS, raw)
        return self._store.job(key) if self._store.job(key) is not None else job

    def _tell_refused(self, job: JobEntry, error: ApiError, memory: Memory, now: float) -> None:
        """A status that is refused cannot tell it: an Event does, once for these words."""
        if not error.definite or error.message == memory.status_refused:
            return
        memory.status_refused = error.message
        words = f"the job's status cannot be stored, and nothing is started until it can: {error.message}"
        self.recorder.record(job, [Event("Warning", "StatusRefused", words)], now)

    def _tell_unguarded(self, job: JobEntry, why: str, memory: Memory, now: float) -> None:
        """No status tells it, since the job continues: an Event does, once for these words."""
        if why and why != memory.unguarded:
            memory.unguarded = why
            words = f"the job continues without it, and other pods can reach its ports: {why}"
            self.recorder.record(job, [Event("Warning", "NetworkPolicyRefused", words)], now)
            _log.warning("%s", words, extra=self._where(JobKey(job.namespace, job.name)))

    def _tell_kept(self, job: JobEntry, why: str, memory: Memory, now: float) -> None:
        """A job that has ended has a status that stands: an Event tells that it is not deleted, once for these words."""
        if why and why != memory.kept:
            memory.kept = why
            words = f"spec.runPolicy.ttlSecondsAfterFinished is over and the job cannot be deleted; it is tried again: {why}"
            self.recorder.record(job, [Event("Warning", "DeleteRefused", words)], now)

    async def _reread(self, key: JobKey, job: JobEntry) -> None:
        """Our picture of the job was old: take the present one, whatever the watch is doing."""
        try:
            self._store.put(JOBS, await self._client.get(JOBS, key.namespace, key.name))
        except ApiError as error:
            if error.code != 404:
                raise
            self._store.remove(JOBS, {"metadata": {"namespace": key.namespace, "name": key.name, "uid": job.uid}})
        self._queue.add(key)

    def _want_progress(self, key: JobKey, memory: Memory, seen: observe.Observation, now: float) -> None:
        if not seen.address:
            return
        spec = seen.state.spec
        pause = self._pause(memory, spec)
        due = memory.asked_at + pause
        if memory.asked_uid == seen.shard0 and now < due:
            self._queue.add_at(key, due)
            return
        memory.asked_at, memory.asked_uid = now, seen.shard0
        task = asyncio.get_running_loop().create_task(self._pull(key, memory, seen.address, spec))
        self._pulls.add(task)
        task.add_done_callback(self._pulls.discard)

    async def _pull(self, key: JobKey, memory: Memory, address: str, spec: JobSpec) -> None:
        told = await observe.pull(self._session, address, self._own_key.questions(memory.uid))
        memory.progress, memory.progress_at = told.status, self._clock()
        if told.problem and told.problem != memory.progress_problem:
            _log.warning("%s", told.problem, extra=self._where(key))
        # One that is only out of reach disproves nothing that was said before.
        memory.progress_problem = told.problem if told.problem or told.status is not None else memory.progress_problem
        self._meter.pulled(memory.progress is not None)
        memory.misses = 0 if memory.progress is not None else memory.misses + 1
        self._queue.add_at(key, memory.asked_at + self._pause(memory, spec))
        self._queue.add(key)

    def _pause(self, memory: Memory, spec: JobSpec) -> float:
        """Seconds between two questions: short while training has not begun, so that its beginning is not hidden for a minute.

        The same while a checkpoint is asked for. With a limit for steps it is a part of that, so that who hangs is known soon.
        """
        limit = spec.workers.progress_deadline_seconds
        if memory.silent and memory.misses <= MISSES:
            return SILENT_SECONDS
        if limit is not None and memory.misses <= MISSES:
            return min(self._settings.progress_seconds, max(1.0, limit * HUNG_PART))
        told = (memory.progress or {}).get("coordinator")
        begun = isinstance(told, Mapping) and bool(told.get("step")) and not told.get("waiting") and not memory.interrupted
        awaited = checkpoint_unanswered(memory.progress, spec.checkpoint.request)
        seldom = (begun and not awaited) or memory.misses > MISSES
        return self._settings.progress_seconds if seldom else min(EARLY_SECONDS, self._settings.progress_seconds)

    def seen(self) -> list[JobReading]:
        """Every job, with what its shard 0 last said, where it could be asked."""
        found = []
        for key in self._store.jobs():
            job, memory = self._store.job(key), self._memories.get(key)
            if job is not None:
                mine = memory if memory is not None and memory.uid == job.uid else None
                told = (None, None) if mine is None else (mine.progress, mine.progress_at)
                found.append(JobReading(key, job.brief, job.status, *told))
        return found

    def forget(self) -> None:
        """Another operator acts from now on: what this one remembers of its turns is not true for long."""
        self._memories.clear()
        for pull in self._pulls:
            pull.cancel()

    def _where(self, key: JobKey) -> dict[str, str]:
        memory = self._memories.get(key)
        return {"job": str(key), "uid": memory.uid if memory is not None else ""}


def _nothing(decided: Plan, observed: ObservedState) -> bool:
    """A job that is not ours, or that goes: not even the schema's default status is touched."""
    said = observed.status or JobStatus()
    return decided.status == said and not (decided.actions or decided.events or decided.wake_at or decided.want_progress)


def _joined(first: Plan, second: Plan) -> Plan:
    """The second's words with the first's news."""
    return replace(second, intent=first.intent, events=(*first.events, *second.events))


def health(reconciler: Reconciler, store: JobStore, queue: Queue) -> Mapping[str, Any]:
    """Numbers for a person who asks how the operator is."""
    return {"turns": reconciler.turns, "waiting": len(queue), **store.counts()}
