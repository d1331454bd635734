"""Takes, renews and gives back the Lease that says which of several operators takes turns; leader_election.py decides.

The API server's compare-and-swap on the resourceVersion is the judge. It has a client of its own, so that no burst of pods stands
before a renewal.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from typing import Any

from psjob_operator.cluster import leader_election
from psjob_operator.cluster.client import LEASES, ApiError, KubernetesClient, risen_version
from psjob_operator.cluster.leader_election import Do, Lease, Standing, Timing

ALONE_SECONDS = 30.0
"""How often an operator that may not have the Lease asks for it again."""
END_SECONDS = 5.0
"""Turns end at once when asked to; one that has not after this time is ended with the process."""
GIVE_BACK_SECONDS = 3.0
_log = logging.getLogger(__name__)


class Candidate:
    """One of several operators. `run` campaigns; `check` is called before each write."""

    def __init__(
        self, client: KubernetesClient, namespace: str, name: str, me: str, timing: Timing, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._namespace, self._name = namespace, name
        self._clock = clock
        self._standing = Standing(me, timing)
        self._alone = False
        self._denied_at: float | None = None
        self._told = ("", "")
        self._newest = 0
        """The highest resourceVersion that the Lease was seen with."""

    @property
    def leads(self) -> bool:
        """Whether this operator may act now."""
        return self._alone or leader_election.leads(self._standing, self._clock())

    def role(self) -> str:
        """`leader`, `standby`, or `alone` where it may not have the Lease."""
        return "alone" if self._alone else "leader" if self.leads else "standby"

    def check(self) -> None:
        """Raises ApiError if another operator may hold the Lease: after a freeze this is asked before the election was."""
        if not self.leads:
            raise ApiError(0, "NotLeader", f"{self._where} is not held by this operator, or was not renewed in time; nothing is written")

    async def run(self, term: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Until cancelled: while the Lease is held `term()` runs; it is cancelled as soon as it is not. Gives the Lease back at the end."""
        running: asyncio.Task[None] | None = None
        try:
            while True:
                if self.leads and running is None:
                    running = asyncio.create_task(term(), name="term")
                elif not self.leads and running is not None:
                    await _end(running)
                    running = None
                elif running is not None and running.done():
                    await running
                    raise RuntimeError("the turns ended by themselves")
                self._tell()
                await self._move(leader_election.decide(self._standing, self._clock()))
        finally:
            if running is not None:
                await _end(running)
            await self._give_back()

    async def _move(self, move: leader_election.LeaseMove) -> None:
        if move.do is Do.STEP_DOWN:
            late = self._standing.timing.renew
            _log.warning("%s", f"{self._where} was not renewed for {late:g} s; this operator stops its turns")
            self._standing = leader_election.step_down(self._standing)
            return
        if move.do is Do.WAIT:
            await asyncio.sleep(max(0.0, move.until - self._clock()))
            return
        began = self._clock()
        try:
            async with asyncio.timeout(self._call_seconds(began)):
                await (self._look() if move.do is Do.LOOK else self._write())
        except (ApiError, TimeoutError) as error:
            await self._fail(move, error)
        else:
            # That it can be read does not prove that it can be had.
            if self._standing.renewed_at is not None or self._clock() < leader_election.free_at(self._standing):
                self._alone, self._denied_at = False, None

    def _call_seconds(self, now: float) -> float:
        """A holder's call ends when its time does."""
        held = self._standing.renewed_at
        timing = self._standing.timing
        return timing.call if held is None else max(0.0, min(timing.call, held + timing.renew - now))

    async def _look(self) -> None:
        try:
            found: Lease | None = _read(await self._client.get(LEASES, self._namespace, self._name))
        except ApiError as error:
            if error.code != 404:
                raise
            found = None
        self._goes_on(found)
        self._standing = leader_election.saw(self._standing, found, self._clock())

    async def _write(self) -> None:
        sent_at = self._clock()
        stored = _read(await self._store(leader_election.bid(self._standing, _stamp())))
        self._goes_on(stored)
        self._standing = leader_election.wrote(self._standing, stored, sent_at, self._clock())

    def _goes_on(self, lease: Lease | None) -> None:
        """Raises RuntimeError if the API server is back at an earlier state."""
        if lease is not None and lease.version.isdecimal():
            self._newest = risen_version(self._newest, int(lease.version), self._where)

    async def _store(self, lease: Lease) -> Mapping[str, Any]:
        spec = {
            "holderIdentity": lease.holder,
            "leaseDurationSeconds": lease.seconds,
            "acquireTime": lease.acquired or None,
            "renewTime": lease.renewed,
            "leaseTransitions": lease.transitions,
        }
        if lease.version:
            body = {"metadata": {"resourceVersion": lease.version}, "spec": spec}
            return await self._client.patch(LEASES, self._namespace, self._name, body)
        made = {"apiVersion": f"{LEASES.group}/{LEASES.version}", "kind": LEASES.kind, "metadata": {"name": self._name}, "spec": spec}
        return await self._client.create(LEASES, self._namespace, made)

    async def _fail(self, move: leader_election.LeaseMove, error: ApiError | TimeoutError) -> None:
        code = error.code if isinstance(error, ApiError) else 0
        if move.do is Do.WRITE and (code == 409 or (code == 404 and self._standing.lease is not None and self._standing.lease.version)):
            self._standing = leader_election.lease_lost(self._standing)
            return
        now = self._clock()
        self._standing = leader_election.renewal_failed(self._standing, now)
        if code not in (403, 404, 405, 422):
            _log.warning("%s could not be reached: %s", self._where, str(error) or "no answer in time")
            return
        # A right may be a moment younger than the pod; only one that is not there for a while is missing.
        self._denied_at = now if self._denied_at is None else self._denied_at
        if self.leads and not self._alone:
            return
        if not self._alone and now - self._denied_at >= self._standing.timing.renew:
            self._alone = True
            why = f"{self._where} may not be had: {error}; this operator takes turns without it: run one replica, or give the right"
            _log.warning("%s", why)
        elif self._alone:
            await asyncio.sleep(ALONE_SECONDS)

    async def _give_back(self) -> None:
        """So that the next one need not wait. What comes of it does not matter: a Lease runs out by itself."""
        self._standing, self._alone = leader_election.step_down(self._standing), False
        try:
            async with asyncio.timeout(GIVE_BACK_SECONDS):
                for _ in range(2):
                    lease = leader_election.given_back(self._standing, _stamp())
                    if lease is None:
                        return
                    try:
                        await self._store(lease)
                    except ApiError as error:
                        if error.code != 409:
                            raise
                        await self._look()
                    else:
                        _log.info("%s was given back", self._where)
                        return
        except (ApiError, TimeoutError) as error:
            _log.warning("%s could not be given back, and runs out by itself: %s", self._where, str(error) or "no answer in time")

    def _tell(self) -> None:
        lease = self._standing.lease
        holder = lease.holder if lease is not None and lease.holder != self._standing.me else ""
        role = self.role()
        if (role, holder) == self._told:
            return
        self._told = (role, holder)
        if role == "leader":
            _log.info("leader: this operator holds %s and takes turns", self._where)
        elif role == "standby" and holder:
            _log.info("standby: %s is held by %s", self._where, holder)

    @property
    def _where(self) -> str:
        return f"the Lease {self._namespace}/{self._name}"


def _read(raw: Mapping[str, Any]) -> Lease:
    spec = raw.get("spec") or {}
    return Lease(
        holder=spec.get("holderIdentity") or "",
        seconds=spec.get("leaseDurationSeconds") or leader_election.GONE_SECONDS,
        renewed=spec.get("renewTime") or "",
        acquired=spec.get("acquireTime") or "",
        transitions=spec.get("leaseTransitions") or 0,
        version=raw["metadata"]["resourceVersion"],
    )


def _stamp() -> str:
    """Now, for people who read the Lease; no operator does."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


async def _end(running: asyncio.Task[None]) -> None:
    """Raises RuntimeError if it does not end, or had failed: then only the end of the process is safe."""
    running.cancel()
    done, _ = await asyncio.wait([running], timeout=END_SECONDS)
    if not done:
        raise RuntimeError(f"turns did not end {END_SECONDS:g} s after they were ordered to")
    if not running.cancelled() and running.exception() is not None:
        raise RuntimeError("the turns failed") from running.exception()
