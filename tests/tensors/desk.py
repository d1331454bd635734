"""A coordinator and its shards on one desk: no sockets, one thread; events and time come from the test, only the disk is real."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from psjob.checkpoint import manifest
from psjob.checkpoint.manifest import Manifest
from psjob.checkpoint.states import read_states
from psjob.layout.blocks import TensorSpec
from psjob.modes import format_mode
from psjob.process.config import CheckpointConfig, Config, ProcessContext, ShardAddress
from psjob.protocol.coordinator import checkpoints, events
from psjob.protocol.coordinator.membership import PACE_SECONDS
from psjob.protocol.coordinator.state import CoordinatorState
from psjob.resume import record
from psjob.rules.optimizers import OUTER
from psjob.shard.acceptor import hello_body
from psjob.shard.checks import group_hyperparameters
from psjob.shard.coordinator_driver import CoordinatorDriver
from psjob.shard.pending import PushMetadata
from psjob.shard.server import Server
from psjob.shard.session import Session
from psjob.wire.event_loop import NonBlockingStream
from psjob.wire.frame import Header, Kind
from tests.live.live_shards import NEVER

TABLE = [TensorSpec("w", (2048,), "float32", 0)]
"""Four blocks, so that each of two shards has some."""
SLOW = ("spare",)
"""Threads of a shard that answer when they are through."""


class Nowhere:
    """The stream of a worker that takes nothing: what is put to it is not even made."""

    is_remote = sums = closed = False

    def put(self, *_given: object) -> None: ...

    put_frame = put_control = put

    def finish(self) -> None: ...

    wake = close = finish


class Clerk(Session):
    """A worker as shard 0 has it: it keeps what it is told."""

    def __init__(self, server: Server, rank: int, start: int, rewinds: int, hello: dict[str, Any]) -> None:
        super().__init__(
            server.context, cast(NonBlockingStream, Nowhere()), Header(Kind.HELLO, worker=rank, start=start, rewinds=rewinds), hello
        )
        self.heard: list[Kind] = []
        self.placed: dict[str, Any] = {}
        """The body of the last WELCOME."""
        self.lingers = False
        """Its end is slow to hang up."""

    def tell(self, kind: Kind, body: Any = None, payload: bytes | None = None, **fields: Any) -> None:
        self.heard.append(kind)
        if kind is Kind.WELCOME:
            self.placed = body

    def hang_up(self) -> None:
        if not self.lingers:
            self.gone()

    def gone(self) -> None:
        """The stream has ended."""
        self.done.set()
        assert self.context.coordinator is not None
        self.context.coordinator.ended(self)


class Desk:
    """Shards of attempt and term `number`, in the folder of `run`, where they may find what an earlier desk left."""

    def __init__(
        self, folder: Path, workers: int = 2, shards: int = 2, number: int = 1, mode: str = "sync", update_at: str | None = None,
        policy: str = "AllWorkers", checkpoint: CheckpointConfig = NEVER, run: str = "run-1",
        **more: Any,
    ) -> None:  # fmt: skip
        """`more` are further fields of `Config`."""
        peers = tuple(ShardAddress("127.0.0.1", 1 + index, 0) for index in range(shards))
        config = Config("job", run, "0" * 64, mode, 5, update_at, workers, peers, checkpoint, policy, 10.0, 60.0, **more)
        self.folder = folder / run
        places = [ProcessContext("shard", i, run, number, number, 0, f"shard-{i}-{number}", config, None, folder, 0) for i in range(shards)]
        self.servers = [Server(place, self.folder) for place in places]
        self.rule = "reduce" if update_at == "worker" else more.get("update_rule") or (OUTER if mode == "local" else "sgd")
        self.coordination = cast(CoordinatorDriver, self.servers[0].coordinator)
        self.c = self.coordination.machine.state
        self.later = 0.0
        """Seconds by which the desk's clock is ahead of the machine's."""
        self.coordination.clock = lambda: time.monotonic() + self.later
        self._links = dict.fromkeys(range(shards), 0)
        for server in self.servers:
            server.control.answer = partial(self.coordination.answer, server.place.index)
        self.servers[0].store.on_step = self.coordination.step_passed
        self.coordination.feed(events.Started())
        self.work()
        for index in range(1, shards):
            self.relink(index)
        self.settle()

    # -- time ----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let everything that was caused happen: files are written, blocks restored, their answers heard."""
        while True:
            for thread in threading.enumerate():
                if thread.name in SLOW:
                    thread.join()
            for server in self.servers:
                server.control.disk.wait()
            self.hear()
            self.work()
            busy = any(server.control.disk.busy for server in self.servers) or not self.coordination.pending.empty()
            if not busy and not any(thread.name in SLOW for thread in threading.enumerate()):
                return

    def hear(self) -> None:
        """Let the coordinator hear what has been said so far, and nothing that follows from it."""
        for _ in range(self.coordination.pending.qsize()):
            self.coordination.feed(self.coordination.pending.get_nowait())

    def work(self) -> None:
        """Let the coordinator's disk do what was asked for, and hear of it, until nothing more is."""
        while not self.coordination.jobs.empty():
            done = self.coordination.disk.carry_out(self.coordination.jobs.get_nowait())
            if done is not None:
                self.coordination.feed(done)

    def tick(self, later: float = 0.0) -> None:
        """So many seconds pass, and the coordinator looks at the clock."""
        self.later += later
        self.coordination.tick()
        if self.c.snapshots.prepared is not None:  # a snapshot that is due waits for the shards' memory
            for thread in threading.enumerate():
                if thread.name == "spare":
                    thread.join()
            self.hear()
            self.coordination.tick()
        self.work()

    def does(self, act: Callable[[CoordinatorState], None]) -> None:
        """A part of the coordinator does something of itself."""
        self.c.out, self.c.now = [], max(self.c.now, self.coordination.clock())
        act(self.c)
        for action in self.c.out:
            self.coordination.carry_out(action)

    def begin_snapshot(self) -> None:
        """A checkpoint is due."""
        self.c.furthest = self.servers[0].store.furthest()
        self.does(checkpoints.begin)

    def drop_snapshot(self, why: str) -> None:
        """The checkpoint on its way is given up."""
        self.does(lambda state: checkpoints.drop(state, why))

    def stop_job(self) -> None:
        """The whole job is asked to go."""
        self.coordination.feed(events.StopAsked())

    # -- shards --------------------------------------------------------------------------------

    def relink(self, index: int, serving: bool | None = None, order: Callable[[Mapping[str, Any]], None] | None = None) -> None:
        """Shard `index` says hello on a new stream, as it is (or as it claims to be); `order` is how it hears from then on."""
        store = self.servers[index].store
        serves = store.phase.name == "SERVING" if serving is None else serving
        carried = 0 if store.decided is None else store.decided.carried
        body = hello_body(index, store.attempt, store.term, serves, store.restore_id, format_mode(store.mode), carried)
        self._links[index] = self.coordination.shard(index, body, order or self.servers[index].control.order)
        self.hear()
        if store.decided is not None:
            store.decided.tell_again()

    def versions(self) -> set[int]:
        """Of all blocks on all shards."""
        return {cell.n for server in self.servers for cell in server.store.cells.values()}

    # -- workers -------------------------------------------------------------------------------

    def hello(self, rank: int, start: int = 1, rewinds: int = 0, lingers: bool = False, **more: Any) -> Clerk:
        """A process of worker `rank` says hello; `fresh` unless told otherwise."""
        table = [{"name": t.name, "shape": list(t.shape), "dtype": t.dtype, "group": t.group} for t in TABLE]
        clerk = Clerk(self.servers[0], rank, start, rewinds, {"fresh": True, "rule": self.rule, "table": table} | more)
        clerk.lingers = lingers
        self.later += PACE_SECONDS  # whoever comes is asked for at once
        self.coordination.hello(clerk)
        self.hear()
        return clerk

    def say(self, clerk: Clerk, header: Header, body: Mapping[str, Any], blob: bytes) -> None:
        """A worker says something beside its pushes."""
        self.coordination.frame(clerk, header, body, blob)
        self.hear()

    def give(self, clerk: Clerk, value: float = 0.0, shards: list[int] | None = None) -> None:
        """Rank 0 gives the run's first values; `shards` (None: all) have them already when the coordinator has the rest."""
        for server in self.servers:
            if shards is not None and server.place.index not in shards:
                continue
            for block, cell in server.store.cells.items():
                if server.store.initialise(block, torch.full((cell.block.length,), value)):
                    server.initialised()
        self.say(clerk, Header(Kind.RECORD, clock=-1), {}, resume(0))

    def begun(self, **hello: Any) -> list[Clerk]:
        """All workers of a new run, welcomed at clock 0."""
        clerks = [self.hello(rank, **hello) for rank in self.c.members.all]
        self.give(clerks[0])
        self.settle()
        assert [clerk.heard[-2:] for clerk in clerks] == [[Kind.WELCOME, Kind.RECORD]] * len(clerks)
        return clerks

    def push(self, clerk: Clerk, clock: int, shards: list[int] | None = None, version: int = 0) -> None:
        """One whole clock of a worker, on `shards` (None: every one); the gradient, computed on `version`, is -1."""
        for server in self.servers:
            store = server.store
            if shards is not None and server.place.index not in shards:
                continue
            store.infos.learn(
                clerk.rank, 1, PushMetadata(group_hyperparameters(store, [] if self.rule == "reduce" else [{"lr": 1.0}]), frozenset())
            )
            for block, cell in store.cells.items():
                header = Header(
                    Kind.PUSH,
                    version=(store.attempt, version),
                    worker=clerk.rank,
                    start=clerk.incarnation[0],
                    rewinds=clerk.incarnation[1],
                    block=block,
                    clock=clock,
                    info=1,
                )
                grad = store.target(header, cell)
                if grad is not None:
                    grad.flat.fill_(-1.0)
                store.push(header, cell, grad, clerk.lanes[0], store.restored_by)

    def edge(self, clerk: Clerk, clock: int) -> None:
        """A worker stands before `clock` and hands in its record."""
        self.say(clerk, Header(Kind.RECORD, clock=clock), {}, resume(clock))

    def leave(self, clerk: Clerk, clock: int, shards: list[int] | None = None) -> None:
        """A worker is through, and says so to `shards` (None: all)."""
        for server in self.servers:
            if shards is None or server.place.index in shards:
                server.store.leave(clerk.rank, clock)
                server.control.left(clerk.rank)
        if shards is None or 0 in shards:
            self.edge(clerk, clock)
            self.say(clerk, Header(Kind.LEAVE, clock=clock), {}, b"")

    def keep(self, clock: int, shards: list[int] | None = None) -> None:
        """Rank 0 stores the weights of `clock`, which hold that number (updateAt worker)."""
        for server in self.servers:
            if shards is None or server.place.index in shards:
                for cell in server.store.cells.values():
                    cell.store(torch.full((cell.block.length,), float(clock)), clock)

    # -- disk ----------------------------------------------------------------------------------

    def manifests(self) -> list[Manifest]:
        return [manifest.read_manifest(self.folder, path.name) for path in sorted(self.folder.glob("manifest-*.json"))]

    def weights(self, made: Manifest) -> set[float]:
        """Every number that a manifest's blocks hold."""
        states = read_states(self.folder, made, [block.index for block in made.layout.blocks])
        return {number for state, _ in states.values() for number in state.weights.tolist()}


def resume(clock: int) -> bytes:
    """A resume record."""
    return record.pack(record.ResumeRecord({"epoch": 0, "round": clock}, clock, {}, {}, []))


def mark(desk: Desk, clerk: Clerk, clock: int) -> None:
    """A worker stands before `clock` and holds its pushes for the snapshot."""
    snapshot = desk.c.snapshots.current
    assert snapshot is not None
    desk.edge(clerk, clock)
    desk.say(clerk, Header(Kind.MARK, clock=clock, request=snapshot.number), {}, b"")
    for server in desk.servers:
        server.control.mark(clerk.rank, snapshot.number)


def take_snapshot(desk: Desk, clerks: list[Clerk], clocks: list[int]) -> None:
    """Take a checkpoint once each worker has made so many steps; marks hold it in async, else all continue to its step."""
    for number in range(max(clocks)):
        for clerk, clock in zip(clerks, clocks, strict=True):
            if number < clock:
                desk.push(clerk, number)
    desk.begin_snapshot()
    desk.settle()
    current = desk.c.snapshots.current
    assert current is not None
    for clerk, clock in zip(clerks, clocks, strict=True):
        if current.step is None:
            mark(desk, clerk, clock)
    for number in range(current.step or 0):
        for clerk, clock in zip(clerks, clocks, strict=True):
            if number >= clock:
                desk.push(clerk, number)
                desk.edge(clerk, number + 1)
    desk.settle()
    assert desk.c.snapshots.current is None and desk.manifests()[-1].step > 0


def in_the_way(desk: Desk, snapshot: int) -> Path:
    """What stands where shard 0 would write its file of the `snapshot`-th snapshot, so that this fails."""
    path = desk.folder / f"v000001-c{desk.c.snapshots.number + snapshot:06d}-shard000-a1.safetensors"
    (path / "x").mkdir(parents=True)
    return path
