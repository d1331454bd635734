"""A worker of several processes: gradients meet in shared memory, and one push goes out for all.

Process 0 leads: it has the streams to the shards, and tells the others what comes of a step. A process that follows has no stream, and
steps with the one that has them. When they join they agree on the way in which they sum. Two processes speak over a `LocalPeer`: frames of
a few words with what they carry, and a descriptor with the first.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from psjob import contract
from psjob.collectives.local_sum import AUTO, CPU, SHARED, Given, LocalSum, choose_sum
from psjob.layout.blocks import Layout, TensorSpec
from psjob.layout.packing import Pack
from psjob.process import supervise
from psjob.process.config import ProcessContext
from psjob.process.errors import Refused
from psjob.protocol.worker import events as e
from psjob.protocol.worker.local_group import Part, RecordMaker, Records, Whole, join_records, split_records, together
from psjob.wire.frame import MAX_RECORD, Kind
from psjob.worker import exits, local_reduce
from psjob.worker.exchange import Exchange, Gradients, Groups, ModelMemory
from psjob.worker.exits import SessionEnd
from psjob.worker.local_reduce import Lying, PodMemory, PodSum, made, made_sum, make, make_group, meeting_place, why_it_failed
from psjob.worker.session import WorkerSession
from psjob.worker.step_parts import COPY_BACK, COPY_OUT, OTHERS, OWN


def session_at(place: ProcessContext, *given: Any) -> WorkerSession:
    """As WorkerSession. Raises Refused if the agent's lines to other processes are not open."""
    if place.config.processes == 1:
        return WorkerSession(place, *given)
    return FollowerSession(place, *given) if place.local else LeaderSession(place, *given)


def lead(session: LeaderSession, device: torch.device) -> PodSum:
    """As process 0: choose from where all models lie, meet the others where the way needs a group, and tell them what holds.

    If they cannot meet, or one lacks the memory for it, shared memory is taken, unless the manifest asks for the way. Raises SessionEnd.
    """
    config, places = session.place.config, session.lying
    chosen = _chosen(session, [local_reduce.lying(device), *(places[local] for local in sorted(places))])
    sums: PodSum | None = None
    failed = ""
    if chosen.way != SHARED:
        fd = meeting_place()
        session.tell_others({"way": chosen.way}, fd)
        sums, failed = _met(chosen.way, session.layout, session.memory, fd, 0, config.processes, device)
        session.wait(lambda: len(session.met) == config.processes - 1, "the other processes of this worker to make a group")
        failed = failed or next((why for _, why in sorted(session.met.items()) if why), "")
        if failed and config.local_sum != AUTO:
            raise SessionEnd("refused", f"the processes of worker {session.place.index} could not make a group for {chosen.way}: {failed}; "
                             "leave out spec.workers.localSum")  # fmt: skip
        if failed:
            chosen, sums = LocalSum(SHARED, f"they could not make a group for {chosen.way}: {failed}"), None
    session.tell_others({"sums": chosen.way})
    print(
        f"psjob: the processes of worker {session.place.index} sum their gradients by {chosen.way}: {chosen.reason}",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    return sums or made(SHARED, session.layout, session.memory, 0, config.processes, device, None)


def follow_leader(session: FollowerSession, device: torch.device) -> PodSum:
    """As another process. Raises SessionEnd."""
    place, memory = session.place, session.memory
    assert memory is not None
    sums: PodSum | None = None

    def told() -> bool:
        return session.heard("way") or session.heard("sums")

    session.wait(told, "process 0 of this worker to choose how to sum")
    if session.heard("way"):
        said = session.next("way", "")
        sums, failed = _met(str(said.body["way"]), session.layout, memory, said.fd, place.local, place.config.processes, device)
        session.tell_first({"met": failed})
    way = str(session.next("sums", "the other processes of this worker to make a group").body["sums"])
    if sums is None or way == SHARED:
        return made(SHARED, session.layout, memory, place.local, place.config.processes, device, None)
    return sums


def _chosen(session: LeaderSession, places: list[Lying]) -> LocalSum:
    devices = [one.device for one in places]
    apart = CPU not in devices and len(set(devices)) == len(devices)
    matrix, numbers = local_reduce.topology(devices) if apart else (None, [])
    rates = {"host": min(one.host for one in places), "add": min(one.add for one in places)} if apart else {}
    try:
        return choose_sum(Given(devices, session.layout.nbytes, matrix, numbers, **rates), session.place.config.local_sum)
    except ValueError as error:
        sentence = f"spec.workers.localSum is {session.place.config.local_sum}, and {error}"
        raise SessionEnd("refused", sentence) from None


def _met(
    way: str, layout: Layout, memory: PodMemory, fd: int, local: int, processes: int, device: torch.device
) -> tuple[PodSum | None, str]:
    """The sum in a group of all, with its memory taken, or why it cannot be had."""
    try:
        group = make_group(way, fd, local, processes, device)
        return made(way, layout, memory, local, processes, device, group), ""
    except RuntimeError as error:  # torch.OutOfMemoryError is one too
        return None, why_it_failed(error)


GONE_SECONDS = 2.0
"""So long the agent has to answer the death of a process, before it counts as one that has left."""


class LeaderSession(WorkerSession):
    """As WorkerSession. `place.sockets` leads to the agent and to each other process."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.processes = self.place.config.processes
        self.record_maker = RecordMaker()
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
        self._others = {number: LocalPeer(fd, str(number), self._hears(number)) for number, fd in enumerate(others, 1)}

    # -- the script's thread -------------------------------------------------------------------

    def join(self, parameters: Sequence[torch.Tensor], initial: Callable[[], bytes], hyperparameters: list[dict[str, Any]]) -> None:
        self.wait(lambda: len(self._tables) == len(self._others), self._whom(self._tables))
        self._compare()
        self.last_hyperparameters = hyperparameters
        super().join(parameters, initial, hyperparameters)
        self._tell_agent({"joined": True})
        assert self._memory is not None
        records = [] if self.record is None else split_records(self.record)
        for number, other in self._others.items():
            mine = records[number] if number < len(records) else None
            other.say({"initial": self.initial is not None}, self.initial or b"")
            told = {"joined": self.clock, "residual": self.machine.residual, "layout": self.layout.to_json(), "recorded": mine is not None}
            other.say(told, mine or b"", self._memory[1])
        self._sums = lead(self, local_reduce.device_of(parameters))

    def _compare(self) -> None:
        """Raises SessionEnd if a process has another model."""
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

    def step_boundary(self, make_record: Callable[[], bytes], large: bool = False) -> None:
        """The worker's record is handed in once all processes have made theirs. The rest is done where they meet: at the next step.

        Raises SessionEnd.
        """
        self.check()
        record = self.record_maker.make(make_record, large)
        if record is not None:
            self._record(0, self.clock, record)

    def _record(self, local: int, clock: int | None, record: bytes) -> None:
        """A process has made its record. A worker that dies before its next step continues from the one that is handed in now."""
        with self.cond:
            self._records.add(local, clock, record)
            whole = None if self.reduces else self._records.whole(self.clock)  # with the worker's weights where it steps by itself
            if whole is None or not self.machine.needs_record(self._records.small):
                return
            self._records.handed_in = self.clock
        self.handle(e.AtStepBoundary(whole, False, self.idle.told), self.exchange.make_packs())

    def meet(self, part: Part) -> Whole:
        """All processes stand before a step; what it comes to. Raises SessionEnd."""
        self.wait(self._all_here, self._whom({*self._parts, *self._through}), part=OTHERS)
        with self.cond:
            parts = {0: part} | self._parts
            self._parts = {}
            self._summed.clear()
        self._stand()
        whole, self._active = together(parts), sorted(parts)
        active = list(range(self.processes)) if self.sums.everyone else self._active
        self._tell(active, {"sum": whole.present, "active": active})
        before = self.parts.to(COPY_OUT)
        made_sum(self.sums, whole.present, active, self.place.config.reduction == "mean")
        self.wait(lambda: len(self._summed) == len(active) - 1, "the sums of the other processes of this worker", part=OTHERS)
        self.parts.to(before)
        return whole

    def _stand(self) -> None:
        """The worker is at a step boundary: nothing of this clock was pushed, all of the one before is answered."""
        machine, records = self.machine, self._records
        with self.cond:
            record = records.whole(machine.clock) if machine.needs_record(records.small) else None
            if records.handed_in == machine.clock and not (machine.stops or machine.mark_wanted):
                record = None
        self.idle.at(machine.clock, time.monotonic())
        self.parts.step_boundary(machine.clock)
        self.handle(e.AtStepBoundary(record, True, self.idle.told), self.exchange.packs)
        self.at_step_boundary(machine.snapshot_clock == machine.clock)
        self.wait(lambda: machine.may_step, "the last checkpoint" if machine.standing else "all shards to copy a checkpoint", part=OWN)

    def answer(self) -> None:
        """A step is made: the others take what lies in shared memory."""
        self.record_maker.wanted = self.machine.needs_record(False)
        none = sorted(self.nowhere) if self.reduces else []
        self._tell(self._active, {"answer": self.clock, "skipped": self.exchange.skipped, "wanted": self.record_maker.wanted, "none": none})

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
            self.step_boundary(make_record)
            self.push(None, self.last_hyperparameters, False, 1.0, parameters)
        own = make_record()
        super().leave(lambda: join_records([own, *(self._through[number] for number in sorted(self._through))]), parameters)

    def report(self, numbers: dict[str, float | str]) -> None:
        with self.cond:
            self._reported |= dict.fromkeys(numbers, 0)
        super().report(numbers)

    def make_exchange(self) -> Exchange:
        return Exchange(self.rows, PodBlocks(lambda: self.memory))

    def pull(self, parameters: Sequence[torch.Tensor], hyperparameters: Groups) -> None:
        self.open_memory(parameters)
        super().pull(parameters, hyperparameters)
        self.memory.scatter(parameters)

    def push(self, grads: Gradients, hyperparameters: Groups, skip: bool, scale: float, targets: Sequence[torch.Tensor]) -> None:
        """Push the sum of all processes, once they are here."""
        exchange, self.last_hyperparameters = self.exchange, hyperparameters
        whole = self.meet(_part(self, grads, skip, scale))
        exchange.finite.found, exchange.present = whole.bad, len(whole.present)
        merged = None if whole.absent else [None if row in whole.none else _IN_MEMORY for row in range(len(targets))]
        super().push(merged, hyperparameters, whole.skip, 1.0, targets)
        before = self.parts.to(COPY_BACK)
        self.memory.scatter(targets)
        self.parts.to(before)
        self.answer()

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
        fd = make(self.layout, self.processes)
        self._memory = PodMemory(self.layout, self.processes, 0, os.dup(fd), local_reduce.device_of(parameters)), fd

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

    def _hears(self, number: int) -> Callable[[LocalFrame | None], None]:
        def told(said: LocalFrame | None) -> None:
            if said is not None:
                self._take(number, said)
            elif number not in self._through:
                supervise.timer(GONE_SECONDS, self._left_alone, "process gone", number)

        return told

    def _left_alone(self, number: int) -> None:
        """A process has ended and had no step left to say so. Where it died the agent has ended this one by now."""
        if not self.state.over:
            sentence = (
                f"process {number} of worker {self.place.index} has ended before the others; all processes of a worker stay until their "
                "scripts are through. Let none of them end early, as by sys.exit where LOCAL_RANK is not 0"
            )
            self._end(SessionEnd("refused", sentence))

    def _take(self, number: int, said: LocalFrame) -> None:
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


class FollowerSession(WorkerSession):
    """As WorkerSession. `place.sockets` leads to process 0."""

    def __init__(self, place: ProcessContext, table: Sequence[TensorSpec], *given: Any) -> None:
        super().__init__(place, table, *given)
        self.links.clear()
        self.machine.links = []
        self.record_maker = RecordMaker()
        self.memory: PodMemory | None = None
        self._sums: PodSum | None = None
        self._nowhere: frozenset[int] = frozenset()
        self._news: dict[str, LocalFrame] = {}
        """What process 0 said last, by its first word."""
        self._first = LocalPeer(place.sockets[0], "0", self._hears)

    # -- the script's thread -------------------------------------------------------------------

    def join(self, parameters: Sequence[torch.Tensor], initial: Callable[[], bytes], hyperparameters: list[dict[str, Any]]) -> None:
        device = local_reduce.device_of(parameters)
        self._first.say({"table": [spec.to_json() for spec in self.layout.table], "lying": local_reduce.lying(device).to_json()})
        said = self.next("joined", "process 0 of this worker to join the job")
        first = self._news["initial"]
        self.memory = PodMemory(self.layout, self.place.config.processes, self.place.local, said.fd, device)
        machine = self.machine
        machine.record = said.data if said.body["recorded"] else None
        machine.initial = first.data if first.body["initial"] else None
        machine.residual = bool(said.body["residual"])
        machine.clock, machine.joined = int(said.body["joined"]), True
        self.memory.scatter(parameters)
        self._sums = follow_leader(self, device)

    def step_boundary(self, make_record: Callable[[], bytes], large: bool = False) -> None:
        """Give the record to process 0. Raises SessionEnd."""
        self.check()
        record = self.record_maker.make(make_record, large)
        if record is not None:
            self._first.say({"record": self.clock}, record)

    def inside_round(self) -> None:
        self.check()

    def heartbeat(self) -> None:
        self.check()

    def meet(self, part: Part) -> None:
        """Make what this process owns of the sum. Raises SessionEnd."""
        self._first.say({"part": part.to_json()})
        self._sum("the other processes of this worker")

    def _sum(self, what: str) -> None:
        said = self.next("sum", what)
        made_sum(self.sums, said.body["sum"], said.body["active"], self.place.config.reduction == "mean")
        self._first.say({"summed": True})

    def take(self, targets: Sequence[torch.Tensor]) -> bool:
        """Take the answer to a step; was it skipped? Raises SessionEnd."""
        body = self.next("answer", "the shards' answer to process 0 of this worker").body
        assert self.memory is not None
        self.memory.scatter(targets)
        self.record_maker.wanted, self._nowhere = bool(body["wanted"]), frozenset(body["none"])
        return bool(body["skipped"])

    def leave(self, make_record: Callable[[], bytes], parameters: Sequence[torch.Tensor]) -> None:
        self._first.say({"through": True}, make_record())
        while True:  # a way in which all take part in sums needs this process too
            self._sum("the checkpoint that holds this worker's end")

    def report(self, numbers: dict[str, float | str]) -> None:
        self._first.say({"report": numbers})

    def came_back(self, passes: int) -> None:
        """Process 0 tells those of the worker."""

    def inputs(self, sums: list[int]) -> None:
        """Process 0 tells those of the worker."""

    def data(self, told: Mapping[str, Any]) -> None:
        """Process 0 tells those of the worker."""

    def checkpoint(self) -> None:
        self._first.say({"checkpoint": True})

    def stop(self) -> None:
        """Process 0 is asked too, and decides for all."""

    def watch(self) -> None:
        """Process 0 is watched."""

    def begin_again(self, mode: str, more: Mapping[str, str]) -> None:
        exits.wait_for_the_agent()

    def close(self, seconds: float) -> None:
        super().close(seconds)
        self._first.close()

    @property
    def sums(self) -> PodSum:
        """How gradients get to shared memory. Raises RuntimeError before this worker has joined."""
        if self._sums is None:
            raise RuntimeError("a step was made before this worker joined")
        return self._sums

    @property
    def nowhere(self) -> frozenset[int]:
        return self._nowhere

    def push(self, grads: Gradients, hyperparameters: Groups, skip: bool, scale: float, targets: Sequence[torch.Tensor]) -> None:
        """Bring this process's part of the sum, and take the answer to all of it."""
        self.check()
        self.meet(_part(self, grads, skip, scale))
        self.exchange.act_meanwhile()
        self.exchange.skipped = self.take(targets)
        self.stepped()

    def heard(self, word: str) -> bool:
        return word in self._news

    def tell_first(self, body: Mapping[str, Any]) -> None:
        self._first.say(body)

    def next(self, word: str, what: str) -> LocalFrame:
        """What process 0 says under this word. Raises SessionEnd."""
        self.wait(lambda: word in self._news, what)
        with self.cond:
            return self._news.pop(word)

    # -- the line's thread ---------------------------------------------------------------------

    def _hears(self, said: LocalFrame | None) -> None:
        if said is None:
            if not self.state.ended:
                self._end(SessionEnd("rewind"))  # process 0 has died, and the agent starts all again
            return
        if "end" in said.body:
            self._end(SessionEnd(str(said.body["end"]), str(said.body["message"])))
            return
        if "layout" in said.body:
            self._adopt(Layout.from_json(said.body["layout"]))
        with self.cond:
            self._news[next(iter(said.body))] = said
            self.cond.notify_all()

    def _adopt(self, layout: Layout) -> None:
        """The job's blocks, which are others than this version would cut where it continues from a checkpoint of another one."""
        if layout != self.layout:
            self.adopt(layout.to_json()["blocks"])

    def _forget_streams(self) -> None:
        super()._forget_streams()
        self._first.forget()


_IN_MEMORY: Final = torch.empty(0, dtype=torch.float32, device="cpu")
"""Stands for a gradient that lies in shared memory."""


class PodBlocks(ModelMemory):
    """Blocks that leave from memory which the processes of this worker share, and land there. `memory` raises RuntimeError before it is."""

    lends = False

    def __init__(self, memory: Callable[[], PodMemory]) -> None:
        self._memory = memory

    def leaving(self, block: int, pack: Pack, sources: Gradients) -> torch.Tensor:
        return self._memory().summed(block)

    def pieces(self, pack: Pack, targets: Sequence[torch.Tensor]) -> None:
        """None: answers land in shared memory."""
        return

    def landing(self, block: int, pack: Pack, targets: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        return self._memory().answer(block), lambda: None


def _part(session: LeaderSession | FollowerSession, grads: Gradients, skip: bool, scale: float) -> Part:
    """What this process brings; its gradients are where they are summed from then."""
    if grads is None:
        return Part(session.clock, absent=True)
    if not skip:
        before = session.parts.to(COPY_OUT)
        session.sums.gather(grads, scale)
        session.parts.to(before)
    none = frozenset(row for row, grad in enumerate(grads) if grad is None)
    return Part(session.clock, skip=skip, none=none, bad=session.exchange.finite.found)


_HEAD: Final = struct.Struct("<IQ")
MOST_WORDS: Final = 64 << 20
"""Bytes of JSON in a frame: the names and shapes of a model fit."""


class LocalFrame(NamedTuple):
    """A frame. `fd`: a descriptor that came with it, -1 for none."""

    body: Mapping[str, Any]
    data: bytes
    fd: int


class LocalPeer:
    """The line to one process. `told` is called with each frame by a thread of this object's, with None once where the line ends."""

    def __init__(self, fd: int, name: str, told: Callable[[LocalFrame | None], None]) -> None:
        try:
            self._sock = socket.socket(fileno=fd)
        except OSError as error:
            raise Refused(f"this process has no line to process {name} of its worker: {error}; leave open descriptors alone") from None
        os.set_inheritable(fd, False)
        self._told = told
        self._sending = threading.Lock()
        self._thread = supervise.start_thread(self._read, f"process-{name}")

    def say(self, body: Mapping[str, Any], data: bytes = b"", fd: int = -1) -> None:
        """Send a frame. Nothing where the line has ended: the agent ends this process soon."""
        raw = json.dumps(body).encode()
        head = _HEAD.pack(len(raw), len(data))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
        with self._sending:
            try:
                self._sock.sendmsg([head], rights)
                self._sock.sendall(raw + data)
            except OSError:
                pass

    def close(self) -> None:
        """Nothing is said or heard any more."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def forget(self) -> None:
        """In a fork: close the copy."""
        self._sock.close()

    def _read(self) -> None:
        try:
            while (said := self._next()) is not None:
                self._told(said)
        except (OSError, ValueError):
            pass
        self._told(None)

    def _next(self) -> LocalFrame | None:
        head, rights, _flags, _address = self._sock.recvmsg(_HEAD.size, socket.CMSG_SPACE(4), socket.MSG_WAITALL)
        if len(head) < _HEAD.size:
            return None
        words, size = _HEAD.unpack(head)
        if words > MOST_WORDS or size > MAX_RECORD:
            raise ValueError(f"a frame of {words} and {size} bytes")
        raw = self._exactly(words)
        data = self._exactly(size)
        given = [data for level, kind, data in rights if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)]
        fds = [fd for one in given for fd in array.array("i", one)]
        body = json.loads(raw)
        if not isinstance(body, dict):
            raise ValueError("a frame without names")
        return LocalFrame(body, data, fds[0] if fds else -1)

    def _exactly(self, size: int) -> bytes:
        found = bytearray(size)
        view, at = memoryview(found), 0
        while at < size:
            got = self._sock.recv_into(view[at:])
            if not got:
                raise ValueError("the line ended in a frame")
            at += got
        return bytes(found)
