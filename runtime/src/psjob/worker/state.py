"""What the parts of an attached worker share: who the worker is, its machine, and the condition that guards both.

A session makes one `SessionState` and hands it down to its links, its rows and its exchange. None of them knows the session: what they need
done goes through `handle`, which lets the machine decide. Whatever ends the script's turn is noted in the machine. The script's thread
raises it, by `check` or inside `wait`.

`Idle` counts the part of its time in which the script waits: what sync pays for slow workers, and a pipeline for its bubble. `StageGauge`
tells it once a second for a worker of a stage: how much it waits and for whom, and the memory that it holds.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any, Final

import torch

from psjob.layout.blocks import Block, Layout, TensorSpec
from psjob.modes import of as mode_of
from psjob.process import system
from psjob.process.config import ProcessContext
from psjob.protocol.worker import events as e
from psjob.protocol.worker.machine import WorkerMachine
from psjob.wire.frame import IDLE_PARTS, Header, Kind, run_digest
from psjob.worker.exits import SessionEnd
from psjob.worker.step_parts import WIRE, StepParts

TICK_SECONDS = 0.5
SAID_SECONDS = 30.0
log = logging.getLogger("psjob.worker")


class SessionState:
    """`table` describes the parameters in order. `handle` lets the machine decide what follows from an event, and carries it out.

    `call_readers`: the script waits, so links' threads are to read. `tell_wait` is called every TICK_SECONDS of a wait, with what is waited
    for, and the monotonic times of its beginning and of now.
    """

    def __init__(
        self,
        place: ProcessContext,
        table: Sequence[TensorSpec],
        rule: str,
        handle: Callable[[e.Event], None],
        call_readers: Callable[[], None],
        tell_wait: Callable[[str, float, float], None],
    ) -> None:
        self.place, self.handle = place, handle
        self._call_readers, self._tell_wait = call_readers, tell_wait
        self.run = run_digest(place.run)
        self.mode = mode_of(place.config)
        self.reduces = rule == "reduce"
        self.stage = place.config.stages.of(place.index)
        """Which stage of the model this worker has; None: all of the model."""
        self.layout = Layout.of(tuple(table))
        """Another one where the job continues from a checkpoint of other blocks."""
        addresses = [f"{shard.host}:{shard.port}" for shard in place.config.shards]
        self.machine = WorkerMachine(place.index, self.mode, self.reduces, addresses, place.config.connect_seconds)
        self.cond = threading.Condition()
        self.owner: list[int] = []
        """By block: the shard that has it."""
        self.ended = False
        """The script's turn is over: threads end."""
        self.fenced_by = 0
        """The start of the newer process of this rank, as the shard says that will not have this one; 0: none."""
        self.idle = Idle()
        self.parts = StepParts(place.config.workers)

    # -- the script's thread -------------------------------------------------------------------

    def check(self) -> None:
        """Raise the ending that was noted, if any."""
        ending = self.machine.ending
        if ending is not None:
            raise SessionEnd(ending.how, ending.message)

    def wait(self, done: Callable[[], bool], what: str, seconds: float | None = None, part: int = WIRE) -> None:
        """Wait for `done`, as `part` of a step.

        An ending is raised first; after `seconds` (None: as long as the job waits) the worker stops.
        """
        machine, began = self.machine, time.monotonic()
        with self.cond:
            self.check()
            if done():
                return
            machine.begin_wait(what, seconds, began)
        begun = self.parts.wait(part)
        self._call_readers()
        ticked = said = began
        try:
            while True:
                with self.cond:
                    if machine.ending is None and not done():
                        self.cond.wait(TICK_SECONDS)
                    self.check()
                    if done():
                        return
                now = time.monotonic()
                if now - ticked >= TICK_SECONDS:
                    ticked = now
                    self.handle(e.Tick())
                    self._tell_wait(what, began, now)
                if now - said > SAID_SECONDS:
                    said = now
                    log.warning("waiting for %s, %d s: %s", what, now - began, machine.waiting_for())
        finally:
            machine.end_wait()
            self.parts.waited(begun)
            self.idle.waited += time.monotonic() - began

    def stepped(self) -> None:
        """A step is made: its pushes are all under way, and answered as far as the mode wants."""
        self.machine.clock += 1

    # -- every thread --------------------------------------------------------------------------

    def header(self, kind: Kind, **fields: Any) -> Header:
        """A header of this worker, in the term of now."""
        place = self.place
        return Header(kind, run=self.run, worker=place.index, start=place.number, rewinds=place.rewinds, term=self.machine.term, **fields)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """What this worker pushes and pulls: the blocks of its stage, or all."""
        return self.layout.of_stage(self.stage)

    @property
    def clock(self) -> int:
        """Steps (in mode local: rounds) that this worker has made since the job began."""
        return self.machine.clock

    @property
    def over(self) -> bool:
        """This process's turn has ended, or is about to."""
        return self.ended or self.machine.ending is not None


RECENT: Final = 32
"""Steps that `Idle.recent` is made of, at most."""


def waited_share(waited: float, counted: float) -> float:
    """The part of `counted` seconds in which somebody waited, 0 to 1; 0 of no time."""
    return min(1.0, max(0.0, waited / counted)) if counted > 0 else 0.0


class Idle:
    """For the script's thread. Counted from the end of the first step: until then workers wait for each other's imports."""

    def __init__(self) -> None:
        self.waited = 0.0
        """Seconds in all."""
        self.told = (0, 0)
        """(milliseconds counted, IDLE_PARTS of them waited) at the last step boundary; (0, 0): there was no step yet."""
        self._first: int | None = None
        self._began: tuple[float, float] | None = None
        self._edges: deque[tuple[float, float]] = deque(maxlen=RECENT + 1)
        """Of the last steps: when they ended, and what was waited until then."""

    def at(self, clock: int, now: float) -> None:
        """The script stands before step `clock` at `now`, monotonic seconds."""
        if self._first is None:
            self._first = clock
        if clock == self._first:
            return
        self._edges.append((now, self.waited))
        if self._began is None:
            self._began = now, self.waited
        counted, waited = now - self._began[0], self.waited - self._began[1]
        if counted >= 0.001:
            self.told = int(1000 * counted), round(IDLE_PARTS * waited_share(waited, counted))

    def recent(self, now: float, waits: float = 0.0) -> float | None:
        """The part of the last RECENT steps, and of the time since, that was waited; None before the second step has ended.

        `waits`: seconds of a wait that is under way, which `waited` does not hold yet.
        """
        if len(self._edges) < 2 and not (self._edges and waits):
            return None
        begun, before = self._edges[0]
        return waited_share(self.waited + waits - before, now - begun)


TELL_SECONDS: Final = 1.0
WAIT_SECONDS: Final = 2.0
"""A shorter wait is not told: stages wait for each other in every step."""


class StageGauge:
    """Of one session, for the script's thread. `send` sends what it tells; nothing goes out before the worker has joined."""

    def __init__(self, idle: Idle, send: Callable[[dict[str, Any]], None]) -> None:
        self._idle, self._send = idle, send
        self._told = 0.0
        self._waited = False
        """Was a wait the last that was told?"""
        self._for: int | None = None
        self._late: deque[int] = deque(maxlen=RECENT)
        """By how many updates the last ones were late, without flush."""
        self._over = False
        """Has the script ended? It waits for the others' ends then, which is no part of any step."""

    @contextlib.contextmanager
    def waits_for(self, rank: int) -> Iterator[None]:
        """What is waited for meanwhile comes from that worker."""
        self._for = rank
        try:
            yield
        finally:
            self._for = None
            if self._waited:
                self._tell(time.monotonic(), None, 0.0)

    def updated(self, late: int) -> None:
        """An update was pushed, on gradients of weights so many updates old. In a flush nobody says it."""
        self._late.append(late)

    def step_boundary(self, now: float, last: bool = False) -> None:
        """The script stands between two steps; `last`: after its last one."""
        self._over = last
        if last or self._waited or now - self._told >= TELL_SECONDS:
            self._tell(now, None, 0.0)

    def waits(self, what: str, began: float, now: float) -> None:
        """The script has waited for `what` since `began`, and still does."""
        if not self._over and now - began >= WAIT_SECONDS and now - self._told >= TELL_SECONDS:
            self._tell(now, what, now - began)

    def _tell(self, now: float, what: str | None, seconds: float) -> None:
        self._told, self._waited = now, what is not None
        body: dict[str, Any] = {
            "idle": self._idle.recent(now, seconds), "rss": system.resident_memory(), "peak": system.peak_memory(),
            "devicePeak": device_peak(),
        }  # fmt: skip
        if self._late:
            body["delay"] = fmean(self._late)
        if what is not None:
            body |= {"waits": what, "for": self._for, "seconds": seconds}
        self._send(body)


def device_peak() -> int | None:
    """The most bytes that tensors of this process have held on its CUDA device; None where it has used none."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return int(torch.cuda.max_memory_allocated())
