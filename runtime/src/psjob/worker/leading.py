"""Process 0 of a worker of several: it has the streams to the shards, and tells the others what comes of a step."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from psjob import contract
from psjob.layout.blocks import TensorSpec
from psjob.process import supervise
from psjob.protocol.worker import events as e
from psjob.protocol.worker.together import Part, Whole, together
from psjob.resume import composite
from psjob.wire.frame import Kind
from psjob.worker import agreeing, exits, gpus, podmemory, podsums
from psjob.worker.edges import Edges, Records
from psjob.worker.ending import SessionEnd
from psjob.worker.exchange import Exchange
from psjob.worker.gpus import Lying
from psjob.worker.podmemory import PodMemory
from psjob.worker.podsums import PodSum
from psjob.worker.session import WorkerSession
from psjob.worker.siblings import Said, Sibling
from psjob.worker.together import LeaderExchange

GONE_SECONDS = 2.0
"""So long the agent has to answer the death of a process, before it counts as one that has left."""


class LeaderSession(WorkerSession):
    """As WorkerSession. `place.sockets` leads to the agent and to each other process."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.processes = self.place.config.processes
        self.edges = Edges()
        self._memory: tuple[PodMemory, int] | None = None
        """And a descriptor of it for the others."""
        self._tables: dict[int, list[TensorSpec]] = {}
        """What the others train, by local rank."""
        self.lying: dict[int, Lying] = {}
        """Where their models lie."""
        self.met: dict[int, str] = {}
        """What has become of their making a group: empty, or why they could not."""
        self._sums: PodSum | None = None
        self._parts: dict[int, Part] = {}
        self._records = Records(self.processes)
        self._summed: set[int] = set()
        self._through: dict[int, bytes] = {}
        self._reported: dict[str, int] = {}
        """By name: the lowest process that has reported it."""
        self.last_hyperparameters: list[dict[str, Any]] = []
        """Of this process's last step."""
        self._active: list[int] = []
        """The processes that take part in the step in hand."""
        agent, *others = self.place.sockets
        self._agent = agent
        os.set_inheritable(agent, False)
        self._others = {number: Sibling(fd, str(number), self._hears(number)) for number, fd in enumerate(others, 1)}

    # -- the script's thread -------------------------------------------------------------------

    def join(self, parameters: Sequence[torch.Tensor], initial: Callable[[], bytes], hyperparameters: list[dict[str, Any]]) -> None:
        self.wait(lambda: len(self._tables) == len(self._others), self._whom(self._tables))
        self._compare()
        self.last_hyperparameters = hyperparameters
        super().join(parameters, initial, hyperparameters)
        self._tell_agent({"joined": True})
        assert self._memory is not None
        records = [] if self.record is None else composite.split(self.record)
        for number, other in self._others.items():
            mine = records[number] if number < len(records) else None
            other.say({"initial": self.initial is not None}, self.initial or b"")
            told = {"joined": self.clock, "residual": self.machine.residual, "layout": self.layout.to_json(), "recorded": mine is not None}
            other.say(told, mine or b"", self._memory[1])
        self._sums = agreeing.lead(self, gpus.device_of(parameters))

    def _compare(self) -> None:
        """Raises SessionEnd where a process has another model."""
        for number, table in sorted(self._tables.items()):
            if table == list(self.layout.table):
                continue
            pairs = zip(table, self.layout.table, strict=False)
            differs = next((f"{one.name} {one.shape} {one.dtype}" for one, mine in pairs if one != mine), f"{len(table)} parameters")
            raise SessionEnd(
                "refused",
                f"process {number} of worker {self.place.index} attached another model than process 0: it has {differs} there; every "
                "process must build the same model",
            )

    def edge(self, make_record: Callable[[], bytes], large: bool = False) -> None:
        """The worker's record is handed in once all processes have made theirs, and the rest of an edge is made where they meet: at the
        step that comes. Raises SessionEnd."""
        self.check()
        record = self.edges.edge(make_record, large)
        if record is not None:
            self._record(0, self.clock, record)

    def _record(self, local: int, clock: int | None, record: bytes) -> None:
        """A process has made its record. A worker that dies before its next step goes on from the one that is handed in now."""
        with self.cond:
            self._records.add(local, clock, record)
            whole = None if self.reduces else self._records.whole(self.clock)  # with the worker's weights where it steps by itself
            if whole is None or not self.machine.needs_record(self._records.small):
                return
            self._records.handed_in = self.clock
        self.handle(e.AtEdge(whole, False, self.idle.told), self.exchange.make_packs())

    def meet(self, part: Part) -> Whole:
        """All processes stand before a step; what it comes to. Raises SessionEnd."""
        self.wait(self._all_here, self._whom({*self._parts, *self._through}))
        with self.cond:
            parts = {0: part} | self._parts
            self._parts = {}
            self._summed.clear()
        self._stand()
        whole, self._active = together(parts), sorted(parts)
        active = list(range(self.processes)) if self.sums.everyone else self._active
        self._tell(active, {"sum": whole.present, "active": active})
        podsums.made_sum(self.sums, whole.present, active, self.place.config.reduction == "mean")
        self.wait(lambda: len(self._summed) == len(active) - 1, "the sums of the other processes of this worker")
        return whole

    def _stand(self) -> None:
        """The worker is at its edge: nothing of this clock was pushed, all of the one before is answered."""
        machine, records = self.machine, self._records
        with self.cond:
            record = records.whole(machine.clock) if machine.needs_record(records.small) else None
            if records.handed_in == machine.clock and not (machine.stops or machine.mark_wanted):
                record = None
        self.idle.at(machine.clock, time.monotonic())
        self.handle(e.AtEdge(record, True, self.idle.told), self.exchange.packs)
        self.at_edge(machine.cut_clock == machine.clock)
        self.wait(lambda: machine.may_step, "the last checkpoint" if machine.standing else "all shards to copy a checkpoint")

    def answer(self) -> None:
        """A step is made: the others take what lies in shared memory."""
        self.edges.wanted = self.machine.needs_record(False)
        none = sorted(self.nowhere) if self.reduces else []
        self._tell(self._active, {"answer": self.clock, "skipped": self.exchange.skipped, "wanted": self.edges.wanted, "none": none})

    def leave(self, make_record: Callable[[], bytes], parameters: Sequence[torch.Tensor]) -> None:
        """This script is through: serve the others until they are too. Raises SessionEnd."""
        while True:
            self.wait(self._all_here, self._whom({*self._parts, *self._through}))
            if len(self._through) == len(self._others):
                break
            if self.reduces:
                raise SessionEnd(
                    "refused",
                    f"the processes of worker {self.place.index} made different numbers of steps, and each makes the optimizer's own. Let "
                    "all of them step as often, or take an optimizer that the shards have a rule for",
                )
            self.edge(make_record)
            self.exchange.push(None, self.last_hyperparameters, False, 1.0, parameters)
        own = make_record()
        super().leave(lambda: composite.joined([own, *(self._through[number] for number in sorted(self._through))]), parameters)

    def report(self, numbers: dict[str, float | str]) -> None:
        with self.cond:
            self._reported |= dict.fromkeys(numbers, 0)
        super().report(numbers)

    def make_exchange(self) -> Exchange:
        return LeaderExchange(self)

    def begin_again(self, mode: str, more: Mapping[str, str]) -> None:
        self._tell_agent({"again": {"mode": mode, "more": dict(more)}})
        exits.finish(contract.EXIT_RETRY)

    def close(self, seconds: float) -> None:
        ending = self.machine.ending
        if ending is not None and ending.how != "rewind":  # then the agent ends them
            self._tell(list(self._others), {"end": ending.how, "message": ending.message})
        super().close(seconds)

    # -- memory --------------------------------------------------------------------------------

    def open_memory(self, parameters: Sequence[torch.Tensor]) -> None:
        """Make it, now that the layout of the job is known: before any answer lands, which threads of several links do."""
        fd = podmemory.make(self.layout, self.processes)
        self._memory = PodMemory(self.layout, self.processes, 0, os.dup(fd), gpus.device_of(parameters)), fd

    @property
    def memory(self) -> PodMemory:
        """Shared with the others. Raises RuntimeError before `open_memory`."""
        if self._memory is None:
            raise RuntimeError("an answer has landed before this worker pulled")
        return self._memory[0]

    @property
    def sums(self) -> PodSum:
        """How gradients get there. Raises RuntimeError before this worker has joined."""
        if self._sums is None:
            raise RuntimeError("a step was made before this worker joined")
        return self._sums

    # -- the others' threads -------------------------------------------------------------------

    def _hears(self, number: int) -> Callable[[Said | None], None]:
        def told(said: Said | None) -> None:
            if said is not None:
                self._take(number, said)
            elif number not in self._through:
                supervise.timer(GONE_SECONDS, self._left_alone, "process gone", number)

        return told

    def _left_alone(self, number: int) -> None:
        """A process has ended and had no step left to say so. Where it died the agent has ended this one by now."""
        if not self.over:
            sentence = (
                f"process {number} of worker {self.place.index} has ended before the others; all processes of a worker stay until their "
                "scripts are through. Let none of them end early, as by sys.exit where LOCAL_RANK is not 0"
            )
            self._end(SessionEnd("refused", sentence))

    def _take(self, number: int, said: Said) -> None:
        body = said.body
        with self.cond:
            if "table" in body:
                self._tables[number] = [TensorSpec.from_json(row) for row in body["table"]]
                self.lying[number] = Lying.of(body["lying"])
            elif "met" in body:
                self.met[number] = str(body["met"])
            elif "part" in body:
                self._parts[number] = Part.of(body["part"])
            elif "summed" in body:
                self._summed.add(number)
            self.cond.notify_all()
        if "record" in body or "through" in body:
            self._record(number, body.get("record"), said.data)
        if "through" in body:  # after its record: the step that follows may come at once
            with self.cond:
                self._through[number] = said.data
                self.cond.notify_all()
        if "report" in body:
            with self.cond:
                own = {name: value for name, value in body["report"].items() if self._reported.setdefault(name, number) >= number}
                self._reported |= dict.fromkeys(own, number)
            if own:
                self.handle(e.Said(Kind.REPORT, own))
        if "checkpoint" in body:
            self.checkpoint()

    def _all_here(self) -> bool:
        return len(self._parts.keys() | self._through.keys()) == len(self._others)

    def _whom(self, here: Any) -> str:
        missing = [str(number) for number in self._others if number not in here]
        return f"process {', '.join(missing) or 'none'} of this worker"

    def _tell(self, numbers: Sequence[int], body: Mapping[str, Any]) -> None:
        for number in numbers:
            if number:
                self._others[number].say(body)

    def tell_others(self, body: Mapping[str, Any], fd: int = -1) -> None:
        for other in self._others.values():
            other.say(body, b"", fd)

    def _tell_agent(self, body: Mapping[str, Any]) -> None:
        try:
            os.write(self._agent, json.dumps(body).encode() + b"\n")
        except OSError:
            pass  # an agent that has gone has ended this process

    def _forget_streams(self) -> None:
        super()._forget_streams()
        for other in self._others.values():
            other.forget()
        os.close(self._agent)
