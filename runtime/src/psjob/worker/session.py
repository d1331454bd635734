"""An attached worker: joined to its job, at one clock, exchanging blocks with every shard.

The script's thread calls `join`, `step_boundary`, `push`, `leave` and what `exchange` has; the links' threads bring what shards say.
What follows is decided by `WorkerMachine`, and `handle` carries its actions out.

The parts know the `SessionState` that the session makes, and what is below them: links, then rows, then the exchange. What a link has for
a layer above goes by its `ConnectionEnds`.

What a worker makes of its gradients by itself before it pushes:

- `LocalRounds`: rounds of local SGD, steps of its own from the weights that it took, then one push of how far they went.
- `WorkerSideRule`: the worker's half of a rule, with state that goes with the resume record.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from psjob.layout.blocks import Block, Layout, TensorSpec
from psjob.layout.packing import Pack, Packs
from psjob.modes import format_mode
from psjob.process import supervise, system
from psjob.process.config import ProcessContext
from psjob.protocol.worker import events as e
from psjob.protocol.worker.machine import WorkerEnding
from psjob.tables import TableSpec
from psjob.wire import shared_memory
from psjob.wire.frame import Flag, Kind, WireError
from psjob.worker import exits, rewind
from psjob.worker.connection import ConnectionEnds, ShardConnection
from psjob.worker.delay import Delayed, DelayedStaging
from psjob.worker.exchange import Exchange, Gradients, Groups
from psjob.worker.exits import SessionEnd
from psjob.worker.overlap import Overlap, Tree
from psjob.worker.rows import Rows
from psjob.worker.sharing import SLOTS
from psjob.worker.stage_connections import StageConnections
from psjob.worker.staging import Staging
from psjob.worker.state import TICK_SECONDS, SessionState
from psjob.worker.step_parts import OWN, DeviceClock

SMALL_RECORD = 64 << 10
"""A record of at most this many bytes goes to the coordinator with every clock, a larger one at snapshots only."""
STATE_SECONDS = 60.0
log = logging.getLogger("psjob.worker")


class WorkerSession:
    """`table` describes the parameters in order; `rule` is the shards' rule, `reduce` when the worker steps by itself."""

    def __init__(
        self,
        place: ProcessContext,
        table: Sequence[TensorSpec],
        rule: str,
        aliases: Mapping[str, str],
        tables: Sequence[TableSpec] = (),
        first_rows: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        self.place, self.rule, self.aliases = place, rule, dict(aliases)
        state = self.state = SessionState(place, table, rule, self.handle, self._call_readers, self._tell_wait)
        self.mode, self.reduces, self.stage = state.mode, state.reduces, state.stage
        self.cond, self.machine, self.idle, self.parts = state.cond, state.machine, state.idle, state.parts
        self.parts.tell = self._tell_parts
        self.header, self.check, self.wait, self.stepped = state.header, state.check, state.wait, state.stepped
        self.states: dict[int, bytes] = {}
        self._parameters: Sequence[torch.Tensor] = ()
        self._heartbeat_sent = 0.0
        self._kept: dict[int, tuple[bytes, tuple[int, int]]] = {}
        """By clock, with a delay: large records of the last step boundaries, and what `Idle.told` was there."""
        self._joined = math.inf
        self._over = threading.Event()
        self.links: list[ShardConnection] = []
        self.rows = Rows(state, self.links, tables, first_rows or {}, lambda: self.exchange.finish())
        self.stage_links: StageConnections | None = None
        """Streams to workers of neighbouring stages."""
        if self.stage is not None:
            lends = place.config.sharing == "host" and "shared" in self.row_transports
            self.stage_links = StageConnections(state, lends, self._tell_gauge)
        self.exchange = exchange = self.make_exchange()
        """The data path: what is pushed and pulled as blocks, and where the answers land."""
        self.overlap: Overlap | None = None
        """What pushes by way of `exchange`, if that overlaps."""
        neighbour = None if self.stage_links is None else self.stage_links.told
        self.ends = ConnectionEnds(exchange, exchange, self.rows, self._hello, self.adopt, self.on_state, neighbour)
        self.links += [ShardConnection(state, index, self.ends) for index in range(len(place.config.shards))]
        self.records = RecordUploader(state, self.links)
        os.register_at_fork(after_in_child=self._forget_streams)
        self.first: Callable[[Block, Pack], torch.Tensor] = lambda _block, pack: pack.gather(self._parameters)
        """Makes the first values of a block, in a buffer of its own or in that of the pack."""
        self.on_layout: Callable[[], None] = lambda: None
        """Told when `layout` and `exchange` are others than those made first."""
        self.at_step_boundary: Callable[[bool], None] = lambda _snapshot: None
        """Told that the script stands between two steps, and whether a checkpoint is made of this one."""

    def use(self, exchange: Exchange, overlap: Overlap | None = None) -> None:
        """Take another data path before anything is exchanged; `overlap`: what pushes by way of it."""
        self.exchange, self.overlap = exchange, overlap
        self.ends.blocks, self.ends.policy = exchange, overlap or exchange

    def choose_data_path(
        self, parameters: Sequence[torch.Tensor], overlaps: Tree | None, apart: frozenset[int], late: bool,
        began_behind: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Take the data path that the job and the model's device ask for.

        `overlaps`: which module holds which parameters, for a worker with overlap. Of those in `apart` no gradient is pushed. `late`: a
        stage that does not flush. For `began_behind` see `Delayed`.
        """
        config, layout = self.place.config, self.layout
        device = next((p.device for p in parameters if p.is_cuda), torch.device("cpu"))
        self.parts.device = DeviceClock(device) if device.type == "cuda" else None
        if overlaps is not None:
            overlapped = Overlap(self.rows, parameters, overlaps, device, apart)
            self.use(overlapped.exchange, overlapped)
        elif config.delay:
            self.use(Delayed(self.rows, DelayedStaging(layout, device, config.delay), began_behind))
        elif late and device.type == "cpu":
            self.use(Exchange(self.rows, deferred=True))
        elif device.type == "cuda" and config.processes == 1:
            self.use(Exchange(self.rows, Staging(layout, device, stage=self.stage)))

    # -- the script's thread -------------------------------------------------------------------

    def join(self, parameters: Sequence[torch.Tensor], initial: Callable[[], bytes], hyperparameters: list[dict[str, Any]]) -> None:
        """Enter the job; afterwards `parameters` hold the job's weights and `record` what to put back. Raises SessionEnd.

        `hyperparameters` are the rule's, a parameter group each: what a worker is sent may depend on them.
        """
        machine, self._parameters = self.machine, parameters
        self.handle(e.JoinAsked())
        self.wait(lambda: machine.joined or machine.init > 0, "the coordinator")
        while not machine.joined:
            asked = self._begin_run(initial)
            self.wait(lambda: machine.joined or machine.init > asked, "the first checkpoint")  # noqa: B023
        self.wait(lambda: machine.welcomed, "all shards")
        self.pull(parameters, hyperparameters)
        self._joined = time.monotonic()

    def pull(self, parameters: Sequence[torch.Tensor], hyperparameters: Groups) -> None:
        """As `Exchange.pull`."""
        self.exchange.pull(parameters, hyperparameters)

    def push(self, grads: Gradients, hyperparameters: Groups, skip: bool, scale: float, targets: Sequence[torch.Tensor]) -> None:
        """As `Exchange.push`, or as `Overlap.push` where gradients are sent early."""
        (self.overlap or self.exchange).push(grads, hyperparameters, skip, scale, targets)
        if self._kept:
            self._hand_in_kept()

    def _begin_run(self, initial: Callable[[], bytes]) -> int:
        """Rank 0 gives every shard the first values; for which question."""
        self.wait(lambda: self.machine.welcomed, "all shards")
        asked, packs = self.machine.init, self.exchange.make_packs()
        for block in self.layout.blocks:
            values = self.first(block, packs[block.index])
            self.links[self.owner[block.index]].send(self.header(Kind.INIT, block=block.index), values)
        self.rows.initialise(self.exchange.tell_hyperparameters([], []))
        self.handle(e.FirstValues(initial()))
        return asked

    def step_boundary(self, make_record: Callable[[], bytes], large: bool = False) -> None:
        """The script stands between two steps: hand in the record, take part in a snapshot, stop if asked. Raises SessionEnd.

        `large`: a record holds state of the model's size, so it is made for snapshots only.
        """
        self.check()
        machine, residuals = self.machine, self.exchange.compression
        self._measure()
        rewind.prepare_fork_server(time.monotonic() - self._joined)
        if residuals.feeds:
            self.exchange.finish()  # the residual of a push is known when it has been sent
        record = make_record() if residuals.small and not large else None
        small = record is not None and len(record) <= SMALL_RECORD
        late = self.exchange.delay > 0 and record is not None and not small
        settled = machine.stands(small or late)
        if settled:
            self.exchange.finish()  # under overlap the answers that tell of a snapshot may still be under way
        if record is not None and late and machine.snapshot_clock < machine.clock:
            self._keep_record(record)
        if not machine.needs_record(small):
            record = None
        elif record is None:
            record = make_record()
        self.handle(e.AtStepBoundary(record, settled, self.idle.told), self.exchange.packs)
        self.at_step_boundary(machine.snapshot_clock == machine.clock)
        self.wait(lambda: machine.may_step, "the last checkpoint" if machine.standing else "all shards to copy a checkpoint", part=OWN)

    def _keep_record(self, record: bytes) -> None:
        """Keep a large record until it is known whether a checkpoint is made of its step: the answer that tells may be under way."""
        self._kept[self.clock] = record, self.idle.told
        for old in sorted(self._kept)[: -1 - self.exchange.delay]:
            del self._kept[old]

    def _hand_in_kept(self) -> None:
        kept = self._kept.pop(self.machine.snapshot_clock, None)
        if kept is not None:
            self.handle(e.SnapshotToldLate(self.machine.snapshot_clock, *kept))

    def _measure(self, last: bool = False) -> None:
        now = time.monotonic()
        self.idle.at(self.clock, now)
        self.parts.step_boundary(self.clock, last)
        if self.stage_links is not None:
            self.stage_links.gauge.step_boundary(now, last)

    def inside_round(self) -> None:
        """The script stands between two steps of its own: a stop is asked for, and made where the round ends. Raises SessionEnd."""
        self.heartbeat()
        if self.machine.stop_requested:
            self.handle(e.InsideRound())

    def heartbeat(self) -> None:
        """The script has made a step that pushes nothing: it reports now and then that it continues. Raises SessionEnd."""
        self.check()
        now = time.monotonic()
        if self.place.config.step_timeout is not None and now - self._heartbeat_sent >= TICK_SECONDS:
            self._heartbeat_sent = now
            self.links[0].send_json(self.header(Kind.HEARTBEAT), {})

    def came_back(self, passes: int) -> None:
        """The script stands where it was, and has run through so many passes over its data again."""
        if passes:
            self.links[0].send_json(self.header(Kind.HEARTBEAT), {"passes": passes})

    def leave(self, make_record: Callable[[], bytes], parameters: Sequence[torch.Tensor]) -> None:
        """The script is through: say so, and wait until a checkpoint holds it. Raises SessionEnd (left or finished is the good one)."""
        self.exchange.catch_up()
        self._hand_in_kept()
        self._measure(last=True)
        record = make_record()
        self._parameters = parameters
        if self.stage_links is not None:
            self.stage_links.leave()
        if self.stage is None:  # others push a stage's lent blocks no more
            self.exchange.sharing.settle(self.place.config.workers - 1)  # the others may continue as soon as this worker has left
        self.handle(e.Through(record, self.idle.told))
        self.wait(lambda: False, "the checkpoint that holds this worker's end")

    def report(self, numbers: dict[str, float | str]) -> None:
        self.handle(e.Said(Kind.REPORT, numbers))

    def inputs(self, sums: list[int]) -> None:
        """What the first steps were made of."""
        self.handle(e.Said(Kind.INPUTS, {"inputs": sums}))

    def digest(self, body: dict[str, Any]) -> None:
        """What the weights of this worker are, in sums."""
        self.handle(e.Said(Kind.DIGEST, body))

    def data(self, told: Mapping[str, Any]) -> None:
        """What a pass over data that are given to `ps.shard` reads."""
        self.handle(e.Said(Kind.INPUTS, {"data": dict(told)}))

    def checkpoint(self) -> None:
        self.handle(e.Said(Kind.CHECKPOINT, {}))

    def _call_readers(self) -> None:
        for link in self.links:
            link.call()

    def _tell_wait(self, what: str, began: float, now: float) -> None:
        if self.stage_links is not None:
            self.stage_links.gauge.waits(what, began, now)

    def _tell_gauge(self, body: dict[str, Any]) -> None:
        if self.joined:
            self.links[0].send_json(self.header(Kind.MEASURED, clock=self.clock), body)

    def _tell_parts(self, body: dict[str, Any]) -> None:
        for link in self.links[:1]:  # a process that is not its worker's first one has none
            link.send_riding(self.header(Kind.MEASURED, clock=self.clock), body)

    def stop(self) -> None:
        """This process is asked to go. Only a flag is set: a signal handler may call it."""
        self.machine.stop_requested = True

    def close(self, seconds: float) -> None:
        """The script's turn is over: no stream is left, and after `seconds` no thread that could meet the interpreter's end."""
        self.state.ended = True
        self._over.set()
        self.withdraw()
        for link in self.links:
            link.close()
        if self.stage_links is not None:
            self.stage_links.close()
        deadline = time.monotonic() + seconds
        for link in self.links:
            link.join(max(0.0, deadline - time.monotonic()))
        self.records.join(max(0.0, deadline - time.monotonic()))
        self.exchange.join(max(0.0, deadline - time.monotonic()))
        if self.stage_links is not None:
            self.stage_links.join(max(0.0, deadline - time.monotonic()))

    def watch(self) -> None:
        """Let this process write its stacks where it hangs, if the job has a limit for steps."""
        if self.place.config.step_timeout is not None:
            exits.watch_progress(self.place.config.step_timeout, self._over)

    def begin_again(self, mode: str, more: Mapping[str, str]) -> None:
        """Let this worker begin again in place, in `mode` where one is named, with `more` in its environment. Does not return."""
        rewind.start_again(self.place.rewinds, mode, more)

    def make_exchange(self) -> Exchange:
        """The data path for the layout of now."""
        return Exchange(self.rows)

    # -- both sides ----------------------------------------------------------------------------

    def handle(self, event: e.Event, packs: Packs | None = None) -> None:
        """Let the machine decide what follows from `event`, and carry it out. `packs` are the calling thread's own."""
        with self.cond:
            actions = self.machine.handle(event, time.monotonic())
            self.cond.notify_all()
        for action in actions:
            self._carry_out(action, packs)

    def _carry_out(self, action: e.Action, packs: Packs | None) -> None:
        match action:
            case e.DialShard():
                self.links[action.link].dial(action.seconds)
            case e.Send():
                header = self.header(action.kind, clock=action.clock, request=action.request)
                if action.body is None:
                    self.links[action.link].send(header)
                else:
                    self.links[action.link].send_json(header, action.body)
            case e.SendRecord():
                if (lane := self.links[0].main) is not None:
                    lane.send_record(self.header(Kind.RECORD, clock=action.clock), action.record, action.idle, action.rides)
            case e.SendPieces():
                self.records.begin()
            case e.SendHyperparameters():
                self.exchange.send_info(self.links[action.link])
            case e.Resend():
                self.links[action.link].resend(action.header)
            case e.AskRows():
                self.rows.again(self.links[action.link])
            case e.StoreWeights():
                self._store(self.links[action.link], packs or self.exchange.make_packs())
            case e.Log():
                log.log(logging.getLevelName(action.level), "%s", action.text)

    def _store(self, link: ShardConnection, packs: Packs) -> None:
        """Worker-side update: give the shard the weights of this clock."""
        for block in self.blocks:
            if self.owner[block.index] == link.index:
                header = self.header(Kind.PUSH, block=block.index, clock=self.clock, flags=Flag.STORE, version=(0, self.clock))
                link.send(header, packs[block.index].gather(self._parameters))

    def _hello(self, link: ShardConnection, host: str) -> dict[str, Any]:
        codecs = self.exchange.compression
        body: dict[str, Any] = {
            "role": "worker", "codecs": codecs.offered(),
            "transports": self.transports, "rowTransports": self.row_transports, "slots": SLOTS,
            "cores": max(1, system.cores() // self.place.config.processes),
            "layout": self.layout.digest(), "mode": format_mode(self.mode),
            "push": codecs.push[link.index], "pull": codecs.pull[link.index],
        } | self.machine.hello(link.index)  # fmt: skip
        if link.index == 0:
            if self.stage_links is not None:
                body["port"] = self.stage_links.listen(host)
            body["has"] = None if link.record.id is None else [*link.record.id, link.record.count]
            body["rule"] = self.rule
            body["aliases"] = self.aliases
            body["tables"] = [spec.to_json() for spec in self.rows.specs]
            body["table"] = [spec.to_json() for spec in self.layout.table]
        return body

    @property
    def layout(self) -> Layout:
        """The parameters' blocks."""
        return self.state.layout

    @property
    def owner(self) -> Sequence[int]:
        """By block: the shard that has it."""
        return self.state.owner

    @property
    def blocks(self) -> tuple[Block, ...]:
        """What this worker pushes and pulls: the blocks of its stage, or all."""
        return self.state.blocks

    @property
    def clock(self) -> int:
        """Steps (in mode local: rounds) that this worker has made since the job began."""
        return self.machine.clock

    @property
    def nowhere(self) -> frozenset[int]:
        """Tensors for which no worker had a gradient at the last clock; told only if the workers step by themselves."""
        with self.cond:
            return frozenset().union(*(none for link in self.links for none in link.none.values()))

    @property
    def joined(self) -> bool:
        """Is this worker in the job?"""
        return self.machine.joined

    @property
    def record(self) -> bytes | None:
        """What is to be put back: the newest record of this rank, if there is one."""
        return self.machine.record

    @property
    def initial(self) -> bytes | None:
        """What rank 0 gave when the run began, where there is no record."""
        return self.machine.initial

    @property
    def transports(self) -> list[str]:
        """Ways by which blocks may go, as a hello names them."""
        # With replicas a worker that came back makes a step again which its lost process had pushed, while others may end it: weights that
        # a shard lends would change under it, and its neighbours may need what it makes. Without flush graphs outlive an update.
        again = self.stage is not None and len(self.place.config.stages.ranks(self.stage)) > 1
        kept = again or not self.place.config.flushes
        return self.row_transports if self.exchange.lends and not kept else ["tcp"]

    @property
    def row_transports(self) -> list[str]:
        """Ways by which rows may go."""
        config = self.place.config
        coded = not {config.compression.push, config.compression.pull} <= {"none", "auto"}  # only what is sent has a codec
        return ["tcp"] if coded or config.transport == "tcp" or not shared_memory.possible() else ["shared", "tcp"]

    def adopt(self, blocks: object) -> None:
        """The job's parameters lie in other blocks than this version would cut: it continues from a checkpoint of another one.

        Before anything is exchanged, while the script waits in `join`. Raises WireError for blocks that are no layout of its parameters.
        """
        if self.joined:
            return
        try:
            made = Layout.from_json({**self.layout.to_json(), "blocks": blocks})
        except ValueError as error:
            raise WireError(f"WELCOME of shard 0: {error}") from None
        with self.cond:
            self.state.layout = made
            self.use(self.make_exchange())
        self.on_layout()

    def withdraw(self) -> None:
        """The script continues without an answer, or this is a fork: what it writes must not reach a push that a shard still holds."""
        self.exchange.sharing.withdraw()
        self.rows.sharing.withdraw()

    def block_states(self) -> dict[int, bytes]:
        """The shards' optimizer state: STATE bodies by block (see optimizers.assemble_state).

        Raises SessionEnd, also if they do not come in STATE_SECONDS.
        """
        self.exchange.finish()
        with self.cond:
            self.states.clear()
        for block in self.blocks:
            self.links[self.owner[block.index]].send(self.header(Kind.STATE, block=block.index, request=block.index + 1))
        self.wait(lambda: len(self.states) == len(self.blocks), "the shards' optimizer state", STATE_SECONDS)
        return {number - 1: raw for number, raw in self.states.items()}

    def on_state(self, number: int, raw: bytes) -> None:
        """Optimizer state of a block has come."""
        with self.cond:
            self.states[number] = raw
            self.cond.notify_all()

    def _end(self, ending: SessionEnd) -> None:
        """Note an ending that no shard told."""
        with self.cond:
            self.machine.ending = self.machine.ending or WorkerEnding(ending.how, ending.message)
            self.cond.notify_all()

    def _forget_streams(self) -> None:
        """In a forked loader process: close the copies, so that a shard sees at once when this worker dies."""
        for link in self.links:
            for lane in link.lanes:
                lane.stream.sock.close()
        if self.stage_links is not None:
            self.stage_links.forget()
        self.withdraw()


WAIT_SECONDS = 0.5


class RecordUploader:
    """Sends the pieces that the machine names."""

    def __init__(self, state: SessionState, links: Sequence[ShardConnection]) -> None:
        self._state, self._links = state, links
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """There is something to send."""
        with self._state.cond:
            if self._thread is None:
                self._thread = supervise.start_thread(self._run, "records")

    def join(self, seconds: float) -> None:
        """Wait for the thread, which ends once the session has ended."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def _run(self) -> None:
        state, machine, link = self._state, self._state.machine, self._links[0]
        while True:
            with state.cond:
                if machine.records.through or state.ended:
                    self._thread = None
                    return
                piece = machine.next_piece(time.monotonic())
                if piece is None:
                    state.cond.wait(WAIT_SECONDS)
                    continue
            clock, crc, size = piece.record
            header = state.header(Kind.RECORD_PIECE, clock=clock, part=piece.offset, version=(crc, size))
            link.send(header._replace(generation=piece.idle[0], request=piece.idle[1]), bytes(piece.data))
