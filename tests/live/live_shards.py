"""Real shards and workers in this process: real sockets, real threads, real files, and no start of a Python a piece."""

from __future__ import annotations

import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from psjob.api import attach as attaching
from psjob.api.attach import take_over
from psjob.api.attachable import Later, Pair, later_groups
from psjob.api.training_job import TrainingJob
from psjob.contract import AUTHORITY, CERTIFICATE
from psjob.process.config import CheckpointConfig, CompressionConfig, Config, Encryption, ProcessContext, ShardAddress, encryption_of
from psjob.protocol.coordinator.events import Action, Event, Tick
from psjob.shard.acceptor import Acceptor
from psjob.shard.coordinator_driver import CoordinatorDriver
from psjob.shard.server import Server
from psjob.wire import tcp
from psjob.wire.auth import GREETING_BYTES
from psjob.wire.stream_pool import StreamPool
from psjob.wire.tcp import Stream
from psjob.worker import connection as links
from psjob.worker.connection import ShardConnection
from tests.support.ports import free
from tests.support.runkeys import handed, write_certificates

OVERLAP = False
"""Do workers overlap where nobody says? Tests whose outcome must not depend on it set both."""
SECONDS = 60.0
"""A deadline for what takes milliseconds; a loaded machine may need seconds."""
GONE_SECONDS = 10.0
"""How long threads of shards and workers that are closed are waited for."""
NEVER = CheckpointConfig(interval_seconds=3600.0, every_steps=None, keep=3, disabled=False, resume_from=None)


class Shards:
    """The shards of one run, serving until `close`."""

    def __init__(
        self, folder: Path, workers: int = 2, shards: int = 2, mode: str = "sync", update_at: str | None = None,
        checkpoint: CheckpointConfig = NEVER, run: str = "run-1", streams: int | None = 1,
        gradients: int = 1 << 32, transport: str = "auto",
        compression: CompressionConfig = CompressionConfig(), update_rule: str | None = None,
        line: Callable[[int], int] = lambda port: port, attempt: int = 1, ports: Sequence[int] = (), host: str = "127.0.0.1",
        volumes: Sequence[str] = (), **more: Any,
    ) -> None:  # fmt: skip
        """`more` are further fields of `Config`. The other shards find the coordinator, which listens at a port, at `line` of that.

        `attempt`: above 1 they continue from the newest checkpoint of `folder`. `ports`: those of shards that are gone, which these follow.
        `host`: where they listen; at 127.0.0.2 workers are on another host. `volumes`: by index, the folder that the two of a pair mount.
        """
        self._others = set(threading.enumerate())
        held = [] if ports else [free() for _ in range(2 * shards)]
        self.ports = ports = [*ports] or [int(sock.getsockname()[1]) for sock in held]
        peers = tuple(ShardAddress(host, ports[2 * i], ports[2 * i + 1]) for i in range(shards))
        self.config = Config(
            "job", run, "0" * 64, mode, 5, update_at, workers, peers, checkpoint, "AllWorkers", 10.0, 60.0, streams, gradients,
            compression, transport, update_rule, **more,
        )  # fmt: skip
        self.folder, self.volumes = folder / run, volumes
        self.folder.mkdir(parents=True, exist_ok=True)
        self.certificates = folder
        if self.config.encryption != "none":
            write_certificates(folder, shards)
        self.servers: list[Server] = []
        self.codes: dict[int, int] = {}
        self.guests: list[Worker] = []
        """They go when the shards do: one that continued dialling would come to the shards of another test, at the same port."""
        self._listeners: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._pools: list[StreamPool] = []
        for index in range(shards):
            config = self.config
            if index:
                config = replace(config, shards=(replace(peers[0], port=line(peers[0].port)), *peers[1:]))
            place = ProcessContext(
                "shard", index, run, attempt, attempt, 0, f"shard-{index}", config, host, folder, 0, "",
                handed("shard", index, attempt), self._encryption(index), pair=_at(volumes, index),
            )  # fmt: skip
            listener = tcp.listening_socket(host, peers[index].port)
            acceptor = Acceptor(place)
            pool = StreamPool(f"shard-{index}")
            pool.accept(listener, acceptor.serve, 256, GREETING_BYTES)
            self._pools.append(pool)
            server = Server(place, self.folder)
            acceptor.open(server.meet, server.refuse, server.hello_room)
            thread = threading.Thread(target=self._serve, args=(index, server), daemon=True)
            thread.start()
            self.servers.append(server)
            self._listeners.append(listener)
            self._threads.append(thread)
        for sock in held:
            sock.close()

    def place(self, rank: int, start: int = 1, rewinds: int = 0) -> ProcessContext:
        """Where a worker of this run stands."""
        return ProcessContext(
            "worker", rank, self.config.run, start, 0, rewinds, f"worker-{rank}-r{start}", self.config, None, None, 0, "",
            handed("worker", rank, start), self._encryption(), pair=_at(self.volumes, rank),
        )  # fmt: skip

    def _encryption(self, shard: int | None = None) -> Encryption:
        """Of a process of this run: of a worker, or of that shard."""
        certificate = None if shard is None else self.certificates / CERTIFICATE.format(index=shard)
        return encryption_of(self.config.encryption, self.certificates / AUTHORITY, certificate)

    def address(self, index: int) -> tuple[str, int]:
        """Where shard `index` listens for data."""
        return self.config.shards[index].host, self.config.shards[index].port

    def wait_ended(self) -> list[int]:
        """Exit statuses, once every shard has gone by itself."""
        for thread in self._threads:
            thread.join(SECONDS)
        return [self.codes[index] for index in range(len(self.servers))]

    def close(self) -> None:
        """End, with every thread that was started meanwhile: one that continued would act in the next test of this process."""
        for worker in self.guests:
            worker.die()
        for listener in self._listeners:
            listener.close()
        for server in self.servers:
            server.exit_with(1)
        for pool in self._pools:
            pool.close()
        for server in self.servers:
            server.close()
        deadline = time.monotonic() + GONE_SECONDS
        while set(threading.enumerate()) - self._others - {threading.current_thread()} and time.monotonic() < deadline:
            time.sleep(0.005)

    def _serve(self, index: int, server: Server) -> None:
        self.codes[index] = server.run_until_gone()


def _at(volumes: Sequence[str], index: int) -> str:
    return volumes[index] if index < len(volumes) else ""


@contextmanager
def serving(folder: Path, **options: Any) -> Iterator[Shards]:
    """Shards that are closed at the end; meanwhile a worker that must rewind raises Rewound."""
    shards = Shards(folder, **options)
    try:
        with mock.patch.object(attaching.rewind, "start_again", _rewound):
            yield shards
    finally:
        shards.close()


class Died(BaseException):
    """Here a worker's process was killed."""


def _died() -> None:
    raise Died


class Rewound(BaseException):
    """Here a worker's process would become a fresh one of itself, with so many rewinds more than before."""


def _rewound(rewinds: int, mode: str, more: Mapping[str, str]) -> None:
    raise Rewound(rewinds + 1)


@contextmanager
def severed(link: ShardConnection) -> Iterator[None]:
    """Break a worker's stream; it is dialled again only at the end."""
    dial, mended = links.dial, threading.Event()

    def wait_and_dial(dialled: ShardConnection) -> Stream | None:
        if dialled is link:
            mended.wait(SECONDS)
        return dial(dialled)

    with mock.patch.object(links, "dial", wait_and_dial):
        link.close()
        try:
            yield
        finally:
            mended.set()


def eventually(true: Callable[[], bool], seconds: float = SECONDS) -> bool:
    """Whether that becomes true in a time that is long for it."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def until_checkpoints(worker: Worker, shards: Shards, count: int) -> None:
    """The worker stands between two steps until so many checkpoints are committed; towards the step of one that is ahead it continues.

    So tests have checkpoints however slow the disk is. Every worker is to call this before the same steps.
    """
    coordinator = shards.servers[0].coordinator
    assert coordinator is not None
    machine = coordinator.machine.state

    def goes_on() -> bool:
        worker.edge()
        taken, clock = machine.snapshots.current, worker.session.clock
        ahead = taken is not None and taken.step is not None and taken.step > clock and len(taken.ready) == len(shards.servers)
        return ahead or machine.progress.committed >= count

    assert eventually(goes_on), f"{machine.progress.committed} checkpoints are committed, {count} are due"


def within(coordinator: CoordinatorDriver, act: Callable[[], None]) -> None:
    """Let a part of the coordinator do something of itself, in its own thread, at its next tick."""
    machine, handle = coordinator.machine, coordinator.machine.handle

    def instead(event: Event, now: float) -> list[Action]:
        if not isinstance(event, Tick):
            return handle(event, now)
        machine.handle = handle  # type: ignore[method-assign]
        state = machine.state
        state.out, state.now = [], max(state.now, now)
        act()
        return state.out + handle(event, now)

    machine.handle = instead  # type: ignore[method-assign]


class Worker:
    """An attached model and optimizer, as a script has them."""

    def __init__(
        self,
        shards: Shards,
        rank: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        start: int = 1,
        overlap: bool | None = None,
        later: Later = (),
        **stateful: Any,
    ):
        self.rank, self.model, self.optimizer = rank, model, optimizer
        pairs = (Pair("", model, optimizer, later_groups(later, [optimizer])),)
        self.job = TrainingJob(shards.place(rank, start), pairs, stateful, OVERLAP if overlap is None else overlap)
        self.session = self.job.session
        shards.guests.append(self)

    def attach(self) -> None:
        self.job.join()
        take_over(self.job, self.job.pairs[0])

    def edge(self, batch: int | None = None) -> None:
        """Ask for a batch by its number in the one pass over the data; None: begin a step without `ps.shard`."""
        if batch is not None:
            if self.job.places.begun == 0:
                self.job.places.begin()
            if self.job.places.ask(0, {"round": batch}):
                self.job.put_back()
        self.job.step_boundary()

    def die(self) -> None:
        """Be gone without a word, as a process that is killed. A thread that waits in its session raises Died."""
        self.session.state.ended = True
        self.session.check = self.session.state.check = _died  # type: ignore[method-assign]
        for link in self.session.links:
            link.close()
        if self.session.stage_links is not None:
            self.session.stage_links.close()

    def leave(self) -> int:
        """Leave as a script that ends well; the exit status."""
        try:
            self.job.leave()
        except SystemExit as end:
            assert not any(link.alive for link in self.session.links), "a link's thread would meet the interpreter's end"
            return int(end.code or 0)
        raise AssertionError("leave came back")


def together(workers: Sequence[Worker], act: Callable[[Worker], None]) -> list[BaseException | None]:
    """Attach, `act` and leave, each worker in a thread of its own; what each one raised."""
    raised: list[BaseException | None] = [None] * len(workers)

    def run(number: int, worker: Worker) -> None:
        torch.set_num_threads(1)  # it holds for one thread only
        try:
            worker.attach()
            act(worker)
            assert worker.leave() == 0
        except BaseException as error:
            raised[number] = error

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), f"a worker hangs\n{stacks()}"
    return raised


def at_once(*calls: Callable[[], Any]) -> None:
    """Each in a thread of its own. What one raises fails the test by pytest's own look at threads."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), f"a worker hangs\n{stacks()}"


def stacks() -> str:
    """What every thread of this process does: shards and workers are threads, so it shows who waits for whom."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    return "\n".join(f"{names.get(ident)}:\n{''.join(traceback.format_stack(frame)[-8:])}" for ident, frame in frames)


def all_well(workers: Sequence[Worker], act: Callable[[Worker], None]) -> None:
    """As `together`, and nobody may raise."""
    for error in together(workers, act):
        if error is not None:
            raise error


def coordinator(shards: Shards) -> CoordinatorDriver:
    found = shards.servers[0].coordinator
    assert found is not None
    return found


def aside(act: Callable[[], Any]) -> threading.Thread:
    """Run in a thread of its own, as another process would."""

    def run() -> None:
        torch.set_num_threads(1)  # it holds for one thread only
        with suppress(SystemExit, Died):
            act()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread
