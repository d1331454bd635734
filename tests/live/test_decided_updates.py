"""Modes in which the coordinator decides, on real shards: every block holds the same pushes, and just those that were decided on.

- Streams between a shard and a coordinator that decides, cut at every message: nobody goes back, and the decisions replay to the bits.
- Rows of tables in modes in which the coordinator decides: the same pushes count in every table as in every block.
- Modes in which the coordinator decides which pushes make an update; the decisions of a run, replayed in one process.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from psjob.checkpoint import manifest
from psjob.checkpoint.manifest import read_records
from psjob.checkpoint.states import read_admission, read_states
from psjob.layout.packing import Pack
from psjob.modes import Batch
from psjob.protocol.coordinator import updates
from psjob.protocol.coordinator.decisions import DecisionOrder
from psjob.protocol.coordinator.state import CoordinatorState, DecisionState
from psjob.protocol.shard import machine as links
from psjob.resume.record import unpack
from psjob.rules import named
from psjob.rules.base import BlockState, UpdateFacts
from psjob.simulate.training import _combined, _Sent
from psjob.wire import tcp
from psjob.wire.frame import HEADER_BYTES, WireError
from psjob.wire.shared_memory import accept_forever
from psjob.wire.tcp import Stream
from tests.live.checkpointing import OFTEN, counting, steps
from tests.live.embeddings import DIM, ROWS, Clicks, offloaded
from tests.live.embeddings import loss_of as decided_loss_of
from tests.live.live_shards import Shards, Worker, all_well, eventually, serving, together, until_checkpoints
from tests.live.training import batch, build, loss_of
from tests.support.reference import layout_of, reference
from tests.support.relay import DIALLER, SHARD, parts
from tests.support.soaking import rotating

__all__ = ["batches"]

pytestmark = pytest.mark.usefixtures("last_words")

BACKUP: dict[str, Any] = {"mode": "sync", "backup_workers": 1}
SOFTSYNC: dict[str, Any] = {"mode": "softsync", "splits": 1}
THRESHOLD: dict[str, Any] = {"mode": "threshold", "staleness": 1}
NUMBERS = {"lr": 0.05, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """All decisions in their order."""
    said: list[Batch] = []
    carry = updates._order

    def note(state: CoordinatorState, decided: DecisionState, order: DecisionOrder | None) -> None:
        said.extend(order.batches if order is not None else ())
        carry(state, decided, order)

    monkeypatch.setattr(updates, "_order", note)
    return said


def weights(shards: Shards) -> dict[int, torch.Tensor]:
    """Of every block, as the shards have them at the end."""
    return {index: cell.state.weights for server in shards.servers for index, cell in server.store.cells.items() if cell.state is not None}


def sgd(shards: Shards, rank: int, **options: Any) -> Worker:
    model = build()
    return Worker(shards, rank, model, torch.optim.SGD(model.parameters(), lr=0.05), **options)


def held_back(worker: Worker, batches: list[Batch] | None) -> None:
    """Before its first push worker 2 lets the others be decided on: its push is late on a machine of any speed."""
    if batches is not None and worker.rank == 2 and worker.session.clock == 0:
        assert eventually(lambda: sum(bool(one.kept) for one in batches) > 1)


def constant(worker: int, clock: int) -> list[torch.Tensor]:
    """A gradient that does not depend on the weights."""
    generator = torch.Generator().manual_seed(100 * clock + worker)
    return [torch.randn(p.shape, generator=generator) for p in build().parameters()]


def given(count: int, batches: list[Batch] | None = None, begin: int = 0, cut_by: Shards | None = None) -> Callable[[Worker], None]:
    """Steps on gradients that are given; with `cut_by` at least three checkpoints are taken meanwhile."""

    def act(worker: Worker) -> None:
        for step in range(begin, count):
            if cut_by is not None:
                until_checkpoints(worker, cut_by, 4 * step // count)
            worker.edge(step)
            time.sleep(0.004 * (1 + 3 * (worker.rank == 2)))
            held_back(worker, batches)
            for p, grad in zip(worker.model.parameters(), constant(worker.rank, worker.session.clock), strict=True):
                p.grad = grad
            worker.optimizer.step()

    return act


def replayed(batches: list[Batch]) -> dict[int, torch.Tensor]:
    """The decisions once more, by the simulator's arithmetic."""
    model, rule = build(), named("sgd")
    layout = layout_of(model)
    states: dict[int, BlockState] = {}
    for block in layout.blocks:
        flat = torch.empty(block.length)
        Pack(block, flat, layout.table).gather(list(model.parameters()))
        states[block.index] = rule.init(flat)
    for one in (one for one in batches if one.kept):
        for block in layout.blocks:
            sent = []
            for push in one.kept:
                flat = torch.empty(block.length)
                Pack(block, flat, layout.table).gather(constant(push.worker, push.clock))
                sent.append(_Sent(flat, flat.numpy(), 0.0))
            rule.apply(states[block.index], _combined(sent, one), NUMBERS, UpdateFacts(staleness=0))
    return {index: state.weights for index, state in states.items()}


STEPS, CUT_STEPS = 16, 24
MODES = pytest.mark.parametrize("mode", [BACKUP, SOFTSYNC, THRESHOLD], ids=["backup", "softsync", "threshold"])


def real(count: int, batches: list[Batch] | None = None) -> Callable[[Worker], None]:
    """Steps on the losses; one worker takes longer."""

    def act(worker: Worker) -> None:
        for step in range(count):
            worker.edge(step)
            time.sleep(0.004 * (1 + 3 * (worker.rank == 2)))
            worker.optimizer.zero_grad()
            loss_of(worker.model, batch(step, worker.rank)).backward()
            held_back(worker, batches)
            worker.optimizer.step()

    return act


@pytest.mark.parametrize(
    "way",
    [
        rotating({}, id="shared"),
        pytest.param({"transport": "tcp", "streams": 2}, id="lanes"),
        pytest.param({"gradients": 64 << 10}, id="little-room"),
    ],
)
def test_backup_is_a_batch_run_over_the_pushes_it_kept(tmp_path: Path, batches: list[Batch], way: dict[str, Any]) -> None:
    with serving(tmp_path, workers=3, shards=2, **BACKUP, **way) as shards:
        all_well([sgd(shards, rank) for rank in range(3)], real(STEPS, batches))
        assert shards.wait_ended() == [0, 0]
        held, counters = weights(shards), [server.store.counters for server in shards.servers]
    kept = [[(push.worker, push.clock) for push in one.kept] for one in batches if one.kept]
    dropped = sum(len(one.dropped) for one in batches)
    assert dropped and {(count.applied, count.dropped) for count in counters} == {(3 * STEPS - dropped, dropped)}
    states = reference(build(), "sgd", [NUMBERS], lambda step: [batch(clock, worker) for worker, clock in kept[step]], loss_of, len(kept))
    assert {cell: states[cell].weights.equal(flat) for cell, flat in held.items()} == dict.fromkeys(states, True)


@pytest.mark.parametrize(
    ("mode", "transport"),
    [
        pytest.param(BACKUP, "tcp", id="backup-tcp"),
        pytest.param(SOFTSYNC, "auto", id="softsync-auto"),
        pytest.param(THRESHOLD, "auto", id="threshold-auto"),
        rotating(BACKUP, "auto", id="backup-auto"),
        rotating(SOFTSYNC, "tcp", id="softsync-tcp"),
        rotating(THRESHOLD, "tcp", id="threshold-tcp"),
    ],
)
def test_the_decisions_replay_to_the_same_bits(tmp_path: Path, batches: list[Batch], mode: dict[str, Any], transport: str) -> None:
    """In softsync a worker continues before its push is decided on, and writes over the memory that it lends."""
    with serving(tmp_path, workers=3, shards=2, transport=transport, **mode) as shards:
        all_well([sgd(shards, rank) for rank in range(3)], given(STEPS, batches if mode is SOFTSYNC else None))
        held = weights(shards)
    done = sorted((push.worker, push.clock) for one in batches for push in (*one.kept, *one.dropped))
    assert done == [(worker, clock) for worker in range(3) for clock in range(STEPS)]
    if mode is SOFTSYNC:
        assert any(share < 1 / 3 for one in batches for share in one.weights or ()), "nobody lagged"
    again = replayed(batches)
    assert {cell: again[cell].equal(flat) for cell, flat in held.items()} == dict.fromkeys(again, True)


@pytest.mark.parametrize("breaks", [rotating(0.0), 0.1])
@MODES
def test_a_checkpoint_is_one_version_of_every_block(tmp_path: Path, mode: dict[str, Any], breaks: float) -> None:
    """Its clocks say which pushes are decided; each record is of just that clock."""
    with serving(tmp_path, workers=3, shards=2, checkpoint=OFTEN, **mode) as shards:
        all_well([counting(shards, rank) for rank in range(3)], steps(CUT_STEPS, 3, breaks, shards))
        assert shards.wait_ended() == [0, 0]
    folder = tmp_path / "run-1"
    made = [manifest.read_manifest(folder, path.name) for path in sorted(folder.glob("manifest-*.json"))]
    assert len(made) > 3 and made[0].step == 0 and made[-1].final
    for one in made:
        states = read_states(folder, one, [block.index for block in one.layout.blocks])
        values = {number for state, _ in states.values() for number in state.weights.tolist()}
        assert len(values) == 1, one.name
        assert mode is SOFTSYNC or values == {float(one.step)}
        assert {place.n for place in one.blocks} == {one.step}
        clocks = {rank: int(worker["clock"]) for rank, worker in one.workers.items()}
        for shard in range(one.shards):
            rows = read_admission(folder, one, shard)
            assert rows is not None
            assert {rank: row["complete"] for rank, row in rows.items()} == clocks and not any(row["open"] for row in rows.values())
        if not one.final:
            for rank, raw in read_records(folder, one).items():
                assert unpack(raw).step == clocks[str(rank)]
    assert {int(worker["clock"]) for worker in made[-1].workers.values()} == {CUT_STEPS}


@MODES
def test_a_worker_that_dies_comes_back_at_its_first_undecided_push(tmp_path: Path, batches: list[Batch], mode: dict[str, Any]) -> None:
    with serving(tmp_path, workers=3, shards=2, **mode) as shards:
        dying, follower = sgd(shards, 1), sgd(shards, 1, start=2)

        def act(worker: Worker) -> None:
            given(10 if worker is dying else STEPS, begin=worker.job.made)(worker)
            if worker is dying:
                worker.die()
                follower.attach()
                assert 8 <= follower.job.made <= follower.session.clock <= 10
                act(follower)
                assert follower.leave() == 0
                raise Killed

        raised = together([sgd(shards, 0), dying, sgd(shards, 2)], act)
        assert [type(error) for error in raised] == [type(None), Killed, type(None)], raised
        assert shards.wait_ended() == [0, 0]
        held = weights(shards)
    done = sorted((push.worker, push.clock) for one in batches for push in (*one.kept, *one.dropped))
    assert done == [(worker, clock) for worker in range(3) for clock in range(STEPS)]
    again = replayed(batches)
    assert {cell: again[cell].equal(flat) for cell, flat in held.items()} == dict.fromkeys(again, True)


class Killed(Exception):
    """The worker's process is no more."""


STREAM_STEPS = 24
WORDS = {"shard", "arrived", "prepared", "ready", "held", "written", "do adopt", "do decide", "do prepare", "do snapshot"}
"""Those that come more than twice in any such run."""


class Line:
    """Where shards dial the coordinator. Once training is open each word is cut: before it, in its middle, then behind it."""

    def __init__(self, coordinator: int) -> None:
        self.coordinator = coordinator
        self.open = False
        self.seen: Counter[str] = Counter()
        self.listener = tcp.listening_socket("127.0.0.1", 0)
        self.port = int(self.listener.getsockname()[1])
        accept_forever(self.listener, self.carry, 64, "line", Stream)

    def close(self) -> None:
        """End the thread that accepts, which a close alone would leave waiting."""
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def carry(self, shard: Stream) -> None:
        with suppress(StopIteration):
            coordinator = next(tcp.connect("127.0.0.1", self.coordinator, 10.0))
            back = threading.Thread(target=self.pass_on, args=(coordinator, shard, SHARD), daemon=True)
            back.start()
            self.pass_on(shard, coordinator, DIALLER)
            back.join()

    def pass_on(self, source: Stream, to: Stream, handshake: tuple[int, ...]) -> None:
        """One direction, until the stream ends or is cut."""
        try:
            for header, whole in parts(source.sock, handshake):
                if header is None:
                    to.sock.sendall(whole)
                    continue
                body = json.loads(whole[HEADER_BYTES:])
                word = str(body.get("did") or body.get("role") or (f"do {body['do']}" if "do" in body else header.kind.name))
                self.seen[word] += self.open
                to.sock.sendall({1: b"", 2: whole[: len(whole) // 2]}.get(self.seen[word], whole))
                if self.seen[word] in (1, 2, 3):
                    return
                self.open = self.open or word == "do open"
        except (OSError, WireError):
            pass
        finally:
            source.close()
            to.close()


@pytest.mark.parametrize(
    "mode", [BACKUP, rotating(SOFTSYNC, id="softsync"), rotating(THRESHOLD, id="threshold")], ids=["backup", None, None]
)
def test_a_stream_that_breaks_at_any_message_costs_no_step(
    tmp_path: Path, batches: list[Batch], monkeypatch: pytest.MonkeyPatch, mode: dict[str, Any]
) -> None:
    monkeypatch.setattr(links, "AGAIN_SECONDS", 0.01)
    lines: list[Line] = []

    def line(port: int) -> int:
        lines.append(Line(port))
        return lines[-1].port

    with serving(tmp_path, workers=3, shards=2, checkpoint=OFTEN, line=line, **mode) as shards:
        all_well([sgd(shards, rank) for rank in range(3)], given(STREAM_STEPS, cut_by=shards))
        assert shards.wait_ended() == [0, 0]
        held = weights(shards)
        lines[0].close()
    assert {word for word, count in lines[0].seen.items() if count > 2} >= WORDS, lines[0].seen
    done = sorted((push.worker, push.clock) for one in batches for push in (*one.kept, *one.dropped))
    assert done == [(worker, clock) for worker in range(3) for clock in range(STREAM_STEPS)]
    again = replayed(batches)
    assert {cell: again[cell].equal(flat) for cell, flat in held.items()} == dict.fromkeys(again, True)


def worker_by_sgd(shards: Shards, rank: int) -> Worker:
    model = offloaded()
    return Worker(shards, rank, model, torch.optim.SGD(model.parameters(), lr=0.1))


def table(shards: Shards, number: int) -> torch.Tensor:
    """All rows of a table, from every shard; 0 where there is none."""
    rows = torch.zeros(ROWS, DIM)
    for server in shards.servers:
        held = server.store.row_cells[number].table.export()
        rows[held["ids"]] = held["weights"]
    return rows


@pytest.mark.parametrize("way", [pytest.param({}, id="shared"), rotating({"transport": "tcp"}, id="tcp")])
def test_backup_takes_the_same_pushes_in_tables_as_in_blocks(tmp_path: Path, batches: list[Batch], way: dict[str, Any]) -> None:
    def act(worker: Worker) -> None:
        for step in range(15):
            time.sleep(0.004 * (1 + 3 * (worker.rank == 2)))
            worker.optimizer.zero_grad()
            decided_loss_of(worker.model, step, worker.rank).backward()
            held_back(worker, batches)
            worker.optimizer.step()

    with serving(tmp_path, workers=3, shards=2, **BACKUP, **way) as shards:
        all_well([worker_by_sgd(shards, rank) for rank in range(3)], act)
        held = [table(shards, number) for number in range(2)]
    assert any(one.dropped for one in batches)
    alone = Clicks()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for one in (one for one in batches if one.kept):
        optimizer.zero_grad()
        for push in one.kept:
            (decided_loss_of(alone, push.clock, push.worker) / len(one.kept)).backward()
        optimizer.step()
    torch.testing.assert_close(held[0], alone.user.weight.detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(held[1][1:], alone.pages.weight.detach()[1:], rtol=0, atol=1e-5)


def test_softsync_weighs_rows_as_blocks(tmp_path: Path, batches: list[Batch]) -> None:
    """Every gradient is 1 of every row: each row falls by the sum of all weights."""
    with serving(tmp_path, workers=3, shards=2, **SOFTSYNC) as shards:

        def ones(worker: Worker) -> None:
            for _ in range(10):
                time.sleep(0.004 * (1 + 3 * (worker.rank == 2)))
                worker.optimizer.zero_grad()
                (worker.model.user(torch.arange(ROWS)).sum() + 0 * worker.model.head.bias.sum()).backward()
                held_back(worker, batches)
                worker.optimizer.step()

        workers = [worker_by_sgd(shards, rank) for rank in range(3)]
        before = Clicks().user.weight.detach()
        all_well(workers, ones)
        held = table(shards, 0)
    fallen = 0.1 * sum(share for one in batches for share in one.weights or ())
    assert any(share < 1 / 3 for one in batches for share in one.weights or ()), "nobody lagged"
    torch.testing.assert_close(before - held, torch.full((ROWS, DIM), fallen), rtol=0, atol=1e-4)
