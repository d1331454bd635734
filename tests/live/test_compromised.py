"""A worker that was taken over, with its own valid key: what it says beyond its part changes nothing for the others."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psjob.layout import memory
from psjob.shard.acceptor import SPARE
from psjob.shard.checks import MOST_AHEAD
from psjob.shard.pending import MOST_WAITING
from psjob.wire import event_loop, reading
from psjob.wire.frame import MAX_JSON, MAX_LEVELS, Flag, Header, Kind, WireError, load, run_digest
from psjob.wire.handshake import greet
from psjob.wire.reading import StreamClosed
from psjob.wire.tcp import Stream
from tests.live.live_shards import SECONDS, Shards, Worker, at_once, eventually, serving

LR = 0.5


def attached(shards: Shards, workers: int, overlap: bool | None = None) -> list[Worker]:
    """Workers that have joined."""
    made = []
    for rank in range(workers):
        torch.manual_seed(3)
        net = nn.Linear(8, 4, bias=False)
        made.append(Worker(shards, rank, net, torch.optim.SGD(net.parameters(), lr=LR), overlap=overlap))
    at_once(*(worker.attach for worker in made))
    return made


def step(worker: Worker, value: float = 1.0) -> None:
    for p in worker.model.parameters():
        p.grad = torch.full_like(p, value)
    worker.optimizer.step()


def weights(shards: Shards) -> torch.Tensor:
    states = [cell.state for server in shards.servers for cell in server.store.cells.values()]
    return torch.cat([state.weights.reshape(-1).clone() for state in states if state is not None])


def says(worker: Worker, kind: Kind, payload: torch.Tensor | bytes | None = None, **fields: Any) -> None:
    """Send one frame of the worker's own to shard 0. Raises StreamClosed if it has hung up."""
    lane = worker.session.links[0].main
    if lane is None:
        raise StreamClosed("shard 0 has hung up")
    header: Header = worker.session.header(kind, **fields)
    raw = b"" if payload is None else payload if isinstance(payload, bytes) else bytes(memory.view(payload))
    lane.stream.send(header._replace(length=len(raw)), raw)


@pytest.mark.parametrize("version", [0, 1 << 40])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_no_worker_gives_weights_where_the_shards_make_them(tmp_path: Path, mode: str, version: int) -> None:
    with serving(tmp_path, workers=2, shards=1, mode=mode, transport="tcp") as shards:
        good, bad = attached(shards, 2)
        before, broken = weights(shards), shards.servers[0].bad_connections
        says(bad, Kind.PUSH, torch.full((32,), 1e30), block=0, flags=Flag.STORE, version=(0, version))
        assert eventually(lambda: shards.servers[0].bad_connections > broken)
        assert torch.equal(weights(shards), before)
        assert good.session.machine.ending is None


def test_weights_of_steps_to_come_are_refused_where_workers_step(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=1, update_at="worker", transport="tcp") as shards:
        (worker,) = attached(shards, 1)
        before, broken = weights(shards), shards.servers[0].bad_connections
        says(worker, Kind.PUSH, torch.full((32,), 1e30), block=0, flags=Flag.STORE, version=(0, 5))
        assert eventually(lambda: shards.servers[0].bad_connections > broken)
        assert torch.equal(weights(shards), before)


def test_the_runs_first_buffers_are_rank_0s(tmp_path: Path) -> None:
    with serving(tmp_path, workers=2, shards=1) as shards:
        _, bad = attached(shards, 2)
        coordinator = shards.servers[0].coordinator
        assert coordinator is not None
        known = coordinator.machine.state.initial
        says(bad, Kind.RECORD, b"not rank 0's", clock=-1)
        says(bad, Kind.REPORT, b'{"mark": 1.0}')
        assert eventually(lambda: "mark" in str(coordinator.machine.state.progress.__dict__))
        assert coordinator.machine.state.initial == known and known


def test_an_absent_push_need_name_no_hyperparameters(tmp_path: Path) -> None:
    """The lowest rank's are taken, and one without a gradient has told none."""
    with serving(tmp_path, workers=2, shards=1, transport="tcp") as shards:
        bad, good = attached(shards, 2)
        before = weights(shards)
        says(bad, Kind.PUSH, block=0, flags=Flag.ABSENT, info=77)
        at_once(lambda: step(good))
        assert torch.allclose(weights(shards), before - LR) and not shards.codes


@pytest.mark.parametrize(("reduction", "moves"), [("median", True), ("trimmed_mean", True), ("mean", False)])
def test_a_minority_that_skips_does_not_hold_up_a_robust_reduction(tmp_path: Path, reduction: str, moves: bool) -> None:
    with serving(tmp_path, workers=3, shards=1, transport="tcp", reduction=reduction) as shards:
        bad, *good = attached(shards, 3)
        before = weights(shards)
        says(bad, Kind.PUSH, block=0, flags=Flag.SKIP, info=bad.session.exchange.tell_hyperparameters([{"lr": LR, "momentum": 0.0}], []))
        at_once(*(lambda worker=worker: step(worker) for worker in good))  # type: ignore[misc]
        assert torch.allclose(weights(shards), before - LR) if moves else torch.equal(weights(shards), before)


def test_a_bounded_push_is_what_was_measured(tmp_path: Path) -> None:
    """On one host its worker could write into a gradient that it lends, after the shard's look at it."""
    with serving(tmp_path, workers=2, shards=1, max_push_norm=1.0, transport="auto") as shards:
        first, second = attached(shards, 2)
        (cell,) = shards.servers[0].store.cells.values()
        assert cell.push_norms is not None
        seen: list[int] = []
        bounded = cell.push_norms.bounded

        def look(worker: int, clock: int, name: str, numbers: torch.Tensor) -> torch.Tensor:
            seen.append(numbers.data_ptr())
            return bounded(worker, clock, name, numbers)

        cell.push_norms.bounded = look  # type: ignore[method-assign]
        at_once(lambda: step(first, 1e-3), lambda: step(second, 1e-3))
        at_once(lambda: step(first, 1e-3), lambda: step(second, 1e-3))
        lent = {lent.flat.data_ptr() for it in shards.servers[0].sessions.values() if it.lending for lent in it.lending._blocks.values()}
        assert len(seen) == 4
        assert len(lent) == 2 and not lent & set(seen)


@pytest.mark.parametrize("kind", [Kind.PULL, Kind.PUSH])
def test_who_asks_again_and_again_for_what_is_to_come_loses_its_stream(tmp_path: Path, kind: Kind) -> None:
    """Each push of the others would look at all that wait."""
    with serving(tmp_path, workers=2, shards=1, transport="tcp") as shards:
        bad, good = attached(shards, 2)
        (cell,) = shards.servers[0].store.cells.values()
        before, broken = weights(shards), shards.servers[0].bad_connections
        info = bad.session.exchange.tell_hyperparameters([{"lr": LR, "momentum": 0.0}], [])
        for number in range(MOST_WAITING + 1):
            says(bad, kind, block=0, request=1000 + number, version=(1, 1), flags=Flag.ABSENT if kind is Kind.PUSH else 0, info=info)
        assert eventually(lambda: shards.servers[0].bad_connections > broken)
        assert cell.waiters.of(0) <= MOST_WAITING
        if kind is Kind.PUSH:
            at_once(lambda: step(good))
            assert torch.allclose(weights(shards), before - LR)


def test_who_asks_for_a_step_that_it_cannot_come_to_loses_its_stream(tmp_path: Path) -> None:
    with serving(tmp_path, workers=2, shards=1, transport="tcp") as shards:
        bad, _ = attached(shards, 2)
        (cell,) = shards.servers[0].store.cells.values()
        broken = shards.servers[0].bad_connections
        says(bad, Kind.PULL, block=0, request=1000, version=(1, MOST_AHEAD))
        assert eventually(lambda: cell.waiters.of(0) == 1)
        says(bad, Kind.PULL, block=0, request=1001, version=(1, MOST_AHEAD + 1))
        assert eventually(lambda: shards.servers[0].bad_connections > broken)


def test_answers_that_nobody_reads_are_not_kept_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "QUEUED", 200)
    with serving(tmp_path, workers=2, shards=1, transport="tcp") as shards:
        _, bad = attached(shards, 2)
        lane = bad.session.links[0].main
        assert lane is not None
        lane.stream.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        session = shards.servers[0].sessions[1]
        with session.lanes[0].stream._send_lock:  # as if the peer had stopped reading
            with contextlib.suppress(StreamClosed):  # it is hung up on, maybe before it has asked for all
                for number in range(300):
                    says(bad, Kind.PULL, block=0, request=1000 + number)
            assert eventually(lambda: session.lanes[0].stream.closed)
            assert len(session.lanes[0].stream._queue) <= 200


def test_no_more_is_read_of_a_worker_that_reads_no_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "BEHIND", 50)
    with serving(tmp_path, workers=2, shards=1, transport="tcp") as shards:
        good, bad = attached(shards, 2)
        stream = shards.servers[0].sessions[1].lanes[0].stream
        with stream._send_lock:  # as if the peer had stopped reading
            for number in range(300):
                says(bad, Kind.PULL, block=0, request=1000 + number)
            assert eventually(lambda: stream._pauses) and len(stream._queue) <= 50
        stream.pump()
        assert eventually(lambda: not stream._queue and not stream._pauses) and not stream.closed
        at_once(lambda: step(good), lambda: step(bad))


def test_one_key_takes_no_more_places_than_its_process_needs(tmp_path: Path) -> None:
    """It begins streams, proves itself on each and says no hello; the others come in as ever."""
    with serving(tmp_path, workers=2, shards=1, transport="tcp", streams=1) as shards:
        place, begun = shards.place(1), []
        for _ in range(40):
            sock = socket.create_connection(shards.address(0))
            stream = Stream(sock)
            greet(stream, place, 0, SECONDS)
            begun.append(stream)
        held = lambda: sum(1 for stream in begun if not gone(stream.sock))  # noqa: E731
        assert eventually(lambda: held() <= 1 + SPARE)
        attached(shards, 2)
        for stream in begun:
            stream.close()


def test_one_key_has_one_hello_of_many_frames_at_a_time(tmp_path: Path) -> None:
    with serving(tmp_path, workers=2, shards=1, transport="tcp", streams=4) as shards:
        first, second, small = (begins(shards, Flag.MORE if large else Flag.NONE) for large in (True, True, False))
        assert eventually(lambda: gone(first.sock))
        assert not gone(second.sock) and not gone(small.sock)
        attached(shards, 2)
        for stream in (first, second, small):
            stream.close()


def test_a_hello_has_to_end_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that comes as fast as it has to."""
    monkeypatch.setattr(reading, "HELLO_WHOLE_SECONDS", 0.6)
    with serving(tmp_path, workers=2, shards=1, transport="tcp") as shards:
        stream, sent = begins(shards, Flag.MORE), 0
        with pytest.raises(StreamClosed):
            while sent < 100:
                time.sleep(0.05)
                stream.write(bytes(8000))
                sent += 1
        assert 8 <= sent < 60
        attached(shards, 2)


def begins(shards: Shards, flags: Flag) -> Stream:
    """A stream of worker 1 by which a mebibyte of hello is to come, and the first bytes of it have."""
    stream = Stream(socket.create_connection(shards.address(0)))
    greet(stream, shards.place(1), 0, SECONDS)
    hello = Header(Kind.HELLO, run=run_digest(shards.place(1).run), worker=1, start=1, flags=flags, length=MAX_JSON)
    stream.write(hello, bytes(1000))
    return stream


@pytest.mark.parametrize(
    ("body", "says_why"),
    [
        ({"none": [], "hyperparameters": [{}] * 70}, "70 parameter groups, the model has 1"),
        ({"none": [0, 0], "hyperparameters": []}, "2 tensors have no gradient, the model has 1"),
        ({"none": [], "hyperparameters": [], "long": "x" * (2 * MAX_JSON)}, f"above the limit of {MAX_JSON}"),
    ],
    ids=["groups", "none", "frames"],
)
def test_what_pushes_are_made_with_is_no_longer_than_the_job(
    tmp_path: Path, body: dict[str, Any], says_why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path, workers=2, shards=1, transport="tcp") as shards:
        _, bad = attached(shards, 2)
        lane = bad.session.links[0].main
        assert lane is not None
        with contextlib.suppress(StreamClosed):  # it may be hung up on before all is sent
            lane.stream.send_json(bad.session.header(Kind.INFO, info=9), body)
        assert eventually(lambda: says_why in caplog.text), caplog.text


def gone(sock: socket.socket) -> bool:
    """The other side has closed."""
    sock.setblocking(False)
    try:
        return sock.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize("levels", [MAX_LEVELS, 900])
def test_a_body_that_is_nested_deep_is_no_control_body(levels: int) -> None:
    nested = b'{"rule": ' + b"[" * levels + b"]" * levels + b"}"
    with pytest.raises(WireError, match="nested deeper than 32 levels"):
        load(nested)
    assert load(b'{"rule": ' + b"[" * (MAX_LEVELS - 2) + b"]" * (MAX_LEVELS - 2) + b"}")
    assert load(b'{"table": [' + b",".join([b'{"shape": [1, 2]}'] * 200) + b"]}")
