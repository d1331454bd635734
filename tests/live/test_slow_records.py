"""Resume records larger than a frame over a slow line: they come through, behind the steps, and a break does not begin them anew.

- A push that takes longer than the silence that a worker bears: while bytes move, the stream is alive.
- A line between real sockets that lets so many bytes a second through, and that can break.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psjob.process.config import ProcessContext
from psjob.worker import connection
from psjob.worker.exits import SessionEnd
from tests.live.live_shards import NEVER, Died, Shards, Worker, all_well, aside, eventually, serving
from tests.support.soaking import soak

BUFFER = 16 << 10
CHUNK = 2 << 10


class SlowLine:
    """Listens on `port` and carries every connection to `target`, at `rate` bytes a second each way, all connections together."""

    def __init__(self, target: tuple[str, int], rate: float) -> None:
        self.rate = rate
        self.carried = {"up": 0, "down": 0}
        self.connections = 0
        self._target = target
        self._free = {"up": 0.0, "down": 0.0}
        self._lock = threading.Lock()
        self._socks: list[socket.socket] = []
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self.port = int(self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        """Break every connection; new ones are carried."""
        with self._lock:
            socks, self._socks = self._socks, []
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End, with every thread."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(30)

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            far = socket.socket()
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
            for sock in (near, far):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                far.connect(self._target)
            except OSError:
                near.close()
                continue
            with self._lock:
                self.connections += 1
                self._socks += [near, far]
            for ends in ((near, far, "up"), (far, near, "down")):
                thread = threading.Thread(target=self._carry, args=ends, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _carry(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                with self._lock:
                    begin = max(self._free[way], time.monotonic())
                    self._free[way] = begin + len(data) / self.rate
                    self.carried[way] += len(data)
                time.sleep(max(0.0, self._free[way] - time.monotonic()))
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class Behind:
    """The shards, as a worker on the other end of a slow line finds them."""

    def __init__(self, shards: Shards, line: SlowLine) -> None:
        self._shards, self._line, self.guests = shards, line, shards.guests

    def place(self, rank: int, start: int = 1) -> ProcessContext:
        """As `Shards.place`."""
        place = self._shards.place(rank, start)
        shard = replace(place.config.shards[0], port=self._line.port)
        return replace(place, config=replace(place.config, shards=(shard,)))


RATE = 200_000
"""Bytes a second: 1.6 Mbit/s."""
RECORD = 18 << 20 if os.environ.get("PSJOB_SOAK") else 1 << 20
STEP_SECONDS = 5.0
SECONDS = RECORD / RATE * 3 + 60


class Ballast:
    """State that makes a worker's resume record as long as this."""

    def __init__(self, size: int) -> None:
        torch.manual_seed(3)
        self.noise = torch.randint(0, 255, (size,), dtype=torch.uint8)

    def state_dict(self) -> dict[str, Any]:
        """As a record takes it."""
        return {"noise": self.noise}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As a record gives it back."""
        self.noise = state["noise"]


@contextmanager
def slow_worker(folder: Path, mode: str) -> Iterator[tuple[Shards, SlowLine]]:
    """One shard, and a slow line to it. Checkpoints are asked for."""
    with serving(folder, workers=2, shards=1, mode=mode, transport="tcp", checkpoint=NEVER) as shards:
        line = SlowLine(shards.address(0), RATE)
        try:
            yield shards, line
        finally:
            line.close()


def worker_of(shards: Any, rank: int, start: int = 1, ballast: int = 0) -> Worker:
    """Of a model of 4 KB."""
    torch.manual_seed(1)
    model = nn.Linear(32, 32)
    return Worker(shards, rank, model, torch.optim.SGD(model.parameters(), lr=0.1), start, ballast=Ballast(ballast))


def in_threads(workers: list[Worker], act: Any) -> list[threading.Thread]:
    """Attach and act, each worker in a thread."""

    def run(worker: Worker) -> None:
        torch.set_num_threads(1)
        with contextlib.suppress(SystemExit, Died):
            worker.attach()
            act(worker)

    threads = [threading.Thread(target=run, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    return threads


def step(worker: Worker) -> float:
    """Make one; how long it took."""
    began = time.monotonic()
    worker.optimizer.zero_grad()
    worker.model(torch.ones(4, 32)).square().sum().backward()
    worker.optimizer.step()
    return time.monotonic() - began


class Training:
    """Workers that make steps until they are stopped, each in a thread."""

    def __init__(self, workers: list[Worker]) -> None:
        self.longest = dict.fromkeys((worker.rank for worker in workers), 0.0)
        self.steps = dict.fromkeys(self.longest, 0)
        self._over = threading.Event()
        self._workers = workers
        self._threads = in_threads(workers, self._act)

    def _act(self, worker: Worker) -> None:
        while not self._over.is_set():
            self.longest[worker.rank] = max(self.longest[worker.rank], step(worker))
            self.steps[worker.rank] += 1
            time.sleep(0.02)

    def under_way(self) -> bool:
        """Has each made a few steps? Forgets how long they took."""
        made = eventually(lambda: min(self.steps.values()) > 3, SECONDS)
        self.longest.update(dict.fromkeys(self.longest, 0.0))
        return made

    def ask(self, rank: int) -> None:
        """Ask for a checkpoint."""
        self._workers[rank].session.checkpoint()

    def end(self) -> None:
        """Let the workers die, and their threads end."""
        self._over.set()
        for worker in self._workers:
            worker.die()
            worker.session._end(SessionEnd("lost"))
        for thread in self._threads:
            thread.join(30)


@pytest.mark.parametrize("mode", ["sync", soak("async")])
def test_a_large_record_delays_no_step_and_comes_through(tmp_path: Path, mode: str) -> None:
    with slow_worker(tmp_path, mode) as (shards, line):
        training = Training([worker_of(shards, 0), worker_of(Behind(shards, line), 1, ballast=RECORD)])
        try:
            assert training.under_way()
            before, carried, steps, began = committed(shards), line.carried["up"], training.steps[1], time.monotonic()
            training.ask(0)
            assert eventually(lambda: committed(shards) > before, SECONDS), "the record has not come through"
            print(f"{time.monotonic() - began:.1f} s, {training.steps[1] - steps} steps, the longest {training.longest}")
            assert line.carried["up"] - carried > RECORD
            assert training.steps[1] - steps > 10
            assert max(training.longest.values()) < STEP_SECONDS
        finally:
            training.end()


@pytest.mark.parametrize("mode", [soak("sync"), "async"])
def test_breaks_do_not_begin_a_record_anew_and_its_process_gets_it_back(tmp_path: Path, mode: str) -> None:
    """Four breaks while it goes up, four while it comes down to the process that follows: each way it is carried little more than once."""
    with slow_worker(tmp_path, mode) as (shards, line):
        training = Training([worker_of(shards, 0), worker_of(Behind(shards, line), 1, ballast=RECORD)])
        again = None
        try:
            assert training.under_way()
            before, carried = committed(shards), line.carried["up"]
            training.ask(0)
            for part in range(1, 5):
                assert eventually(lambda: line.carried["up"] - carried > part * RECORD // 5, SECONDS)  # noqa: B023
                line.cut()
            assert eventually(lambda: committed(shards) > before, SECONDS), "the record has not come through"
            assert line.carried["up"] - carried < 1.5 * RECORD
        finally:
            training.end()
        carried = line.carried["down"]
        again = worker_of(Behind(shards, line), 1, start=2, ballast=RECORD)
        thread = aside(again.attach)
        for part in range(1, 5):
            assert eventually(lambda: line.carried["down"] - carried > part * RECORD // 5, SECONDS)  # noqa: B023
            line.cut()
        thread.join(SECONDS)
        again.die()
        assert again.session.record is not None and len(again.session.record) > RECORD
        assert line.carried["down"] - carried < 1.5 * RECORD


def committed(shards: Shards) -> int:
    """How many manifests there are."""
    return len(list(shards.folder.glob("manifest-*.json")))


SIZE = 200_000
RATE_PUSHES = 160_000
SILENCE = 1.5


@pytest.mark.rotating
@pytest.mark.parametrize("streams", [soak(1), 3])
def test_a_large_push_on_a_slow_line_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams: int) -> None:
    """Of 800 KB each way, 5 s each; the streams are dialled once."""
    monkeypatch.setattr(connection, "SILENCE_SECONDS", SILENCE)
    model = nn.Linear(SIZE, 1, bias=False)
    nn.init.zeros_(model.weight)

    def act(worker: Worker) -> None:
        for _ in range(2):
            worker.optimizer.zero_grad()
            worker.model(torch.ones(1, SIZE)).sum().backward()
            worker.optimizer.step()

    with serving(tmp_path, workers=1, shards=1, transport="tcp", streams=streams) as shards:
        line = SlowLine(shards.address(0), RATE_PUSHES)
        try:
            worker = Worker(Behind(shards, line), 0, model, torch.optim.SGD(model.parameters(), lr=1.0))  # type: ignore[arg-type]
            all_well([worker], act)
            assert torch.equal(model.weight, torch.full((1, SIZE), -2.0))
            assert line.connections == streams
            assert line.carried["up"] < 4 * SIZE * 4, "first values and two pushes go up, once each"
        finally:
            line.close()
