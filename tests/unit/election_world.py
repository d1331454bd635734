"""Operators that want one Lease, on virtual time: the shipped driver over a register with compare-and-swap.

A process can be frozen between any two of its steps: its timers and replies then come late, all at once, while its clock continues. Clocks
differ and run at different rates. Requests and replies are late or lost.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
import selectors
from collections.abc import Callable, Mapping
from typing import Any

from psjob_operator.cluster.client import ApiError
from psjob_operator.cluster.leader_election import Timing
from psjob_operator.cluster.lease import Candidate

OWNER: contextvars.ContextVar[str] = contextvars.ContextVar("owner", default="")


class _Jumps(selectors.DefaultSelector):
    """Waits by moving the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nobody will ever do anything again"
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is virtual, and in which the steps of one owner can be held back."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        self.frozen: dict[str, float] = {}
        self.faults: list[str] = []
        self.after: Callable[[], None] = lambda: None
        """Called after each step."""
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.now

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        return super().call_soon(self._step, callback, args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return super().call_at(when, self._step, callback, args, context=context)

    def _step(self, callback: Any, args: tuple[Any, ...]) -> None:
        thaw = self.frozen.get(OWNER.get(), 0.0)
        if thaw > self.time():
            super().call_at(thaw, self._step, callback, args)
            return
        callback(*args)
        self.after()


class Register:
    """One Lease, as an API server keeps it."""

    def __init__(self) -> None:
        self.version = 0
        self.spec: dict[str, Any] | None = None

    def get(self) -> dict[str, Any]:
        if self.spec is None:
            raise ApiError(404, "NotFound", "no such Lease")
        return {"metadata": {"resourceVersion": str(self.version)}, "spec": dict(self.spec)}

    def put(self, spec: Mapping[str, Any], version: str | None) -> dict[str, Any]:
        if version is None and self.spec is not None:
            raise ApiError(409, "AlreadyExists", "it is there")
        if version is not None and (self.spec is None or version != str(self.version)):
            raise ApiError(409, "Conflict", "it has changed") if self.spec is not None else ApiError(404, "NotFound", "no such Lease")
        self.version += 1
        self.spec = dict(spec)
        return self.get()


class Wire:
    """What `lease.Candidate` asks of a client, over a network of this temper."""

    def __init__(self, register: Register, dice: random.Random) -> None:
        self._register, self._dice = register, dice
        self.loss = 0.0
        self.slowest = 0.05
        self.cut_until = 0.0
        self._parcels: set[asyncio.Task[None]] = set()

    async def get(self, *_: Any) -> dict[str, Any]:
        return await self._carry(self._register.get)

    async def create(self, _kind: Any, _namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._carry(lambda: self._register.put(body["spec"], None))

    async def patch(self, _kind: Any, _namespace: str, _name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._carry(lambda: self._register.put(body["spec"], body["metadata"]["resourceVersion"]))

    async def _carry(self, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[dict[str, Any]] = loop.create_future()
        # The network continues while the process is frozen, and when it has given up waiting.
        parcel = loop.create_task(self._deliver(call, reply), context=contextvars.Context())
        self._parcels.add(parcel)
        parcel.add_done_callback(self._parcels.discard)
        return await reply

    async def _deliver(self, call: Callable[[], dict[str, Any]], reply: asyncio.Future[dict[str, Any]]) -> None:
        if self._lost():
            return
        await asyncio.sleep(self._dice.uniform(0.0, self.slowest))
        try:
            answer: dict[str, Any] | ApiError = call()
        except ApiError as error:
            answer = error
        if self._lost():
            return
        await asyncio.sleep(self._dice.uniform(0.0, self.slowest))
        if reply.done():
            return
        if isinstance(answer, ApiError):
            reply.set_exception(answer)
        else:
            reply.set_result(answer)

    def _lost(self) -> bool:
        return asyncio.get_running_loop().time() < self.cut_until or self._dice.random() < self.loss


class Replica:
    """One operator: when it acts is noted."""

    def __init__(self, name: str, register: Register, dice: random.Random, timing: Timing, acts: list[tuple[float, str]]) -> None:
        self.name, self.acts = name, acts
        self.wire = Wire(register, dice)
        self._offset, self._rate = dice.uniform(-1e6, 1e6), dice.uniform(0.9, 1.1)
        self.candidate = Candidate(self.wire, "ns", "lease", name, timing, self.clock)  # type: ignore[arg-type]
        self.task: asyncio.Task[None] | None = None

    def clock(self) -> float:
        return self._offset + self._rate * asyncio.get_running_loop().time()

    def start(self) -> None:
        context = contextvars.Context()
        context.run(OWNER.set, self.name)
        self.task = asyncio.get_running_loop().create_task(self.candidate.run(self.term), context=context)

    async def term(self) -> None:
        """What an operator does: ask, then write."""
        while True:
            try:
                self.candidate.check()
            except ApiError:
                pass
            else:
                self.acts.append((asyncio.get_running_loop().time(), self.name))
            await asyncio.sleep(0.25)
