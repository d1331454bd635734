"""Workers and shards that speak in codecs: the oracle's bits, whatever breaks; each push's error fed back once.

- Error feedback after an async worker's death: what an older record says was left out has been sent since, and is not sent twice.
- A worker that pushes far too much, among others: no step moves the weights by more than its bound, in every mode and on every road.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import psjob
from bench.peers.slow_link import Bucket, SlowLink
from psjob.checkpoint.final import tensors_sha256
from psjob.process.config import CompressionConfig, ProcessContext, ShardAddress
from psjob.shard.server import Server
from psjob.shard.status_server import status
from psjob.wire.frame import Kind
from psjob.wire.tcp import Stream
from psjob.worker import compression, session
from tests.live.live_shards import (
    NEVER,
    SECONDS,
    Rewound,
    Shards,
    Worker,
    all_well,
    aside,
    eventually,
    serving,
    severed,
    together,
    until_checkpoints,
)
from tests.live.training import batch, build, loss_of, one_inf, push_filled, steps, train_step
from tests.support.covering import each_pair
from tests.support.reference import Wire, reference
from tests.support.soaking import rotating

pytestmark = pytest.mark.usefixtures("last_words")

RATIO = 0.1


def asked(push: str = "none", pull: str = "none") -> CompressionConfig:
    return CompressionConfig(push, pull, RATIO)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def oracle(codec: str, count: int, workers: int = 2, batches: Callable[[int, int], object] = batch) -> tuple[torch.nn.Module, Wire]:
    """One process that encodes and decodes as the workers and shards do."""
    model, wire = build(), Wire(codec, RATIO, seed=5)
    hyperparameters = {"lr": 0.05, "momentum": 0.9}
    reference(model, "sgd", [hyperparameters], lambda step: [batches(step, rank) for rank in range(workers)], loss_of, count, wire=wire)
    return model, wire


def same(model: torch.nn.Module, other: torch.nn.Module) -> bool:
    return tensors_sha256(model.parameters()) == tensors_sha256(other.parameters())


def workers_of(shards: Shards, count: int = 2, make: Callable[[torch.nn.Module], torch.optim.Optimizer] = sgd) -> list[Worker]:
    return [Worker(shards, rank, model, make(model)) for rank, model in enumerate(build() for _ in range(count))]


@pytest.mark.parametrize(("codec", "streams"), [rotating("bf16", 1), rotating("fp16", 2), ("int8", 2), ("topk", 1), rotating("randomk", 2)])
def test_weights_are_the_oracles_bits_though_streams_break(tmp_path: Path, codec: str, streams: int) -> None:
    """What is sent again is what was sent, and what it left out is fed back once."""
    chance = random.Random(codec)

    def act(worker: Worker) -> None:
        for step in range(12):
            if chance.random() < 0.4:
                worker.session.links[chance.randrange(2)].close()
            train_step(worker, step)

    with serving(tmp_path, shards=2, compression=asked(codec), streams=streams) as shards:
        workers = workers_of(shards)
        all_well(workers, act)
        assert [server.store.counters.applied for server in shards.servers] == [24, 24]
        assert status(shards.servers[0])["coordinator"]["codecs"] == f"push {codec}, pull none"
    model, wire = oracle(codec, 12)
    assert same(workers[0].model, model)
    for (rank, block), left in wire.left.items():
        assert torch.equal(workers[rank].session.exchange.compression.state()["left"][block], left)
    without, _ = oracle("none", 12)
    assert not same(workers[0].model, without)


@pytest.mark.parametrize("codec", ["int8", rotating("topk")])
def test_a_push_that_broke_in_the_middle_is_sent_again_as_it_was(tmp_path: Path, codec: str) -> None:
    """One shard has its part of the clock, the other not, when the stream to it comes back."""

    def act(worker: Worker) -> None:
        steps(3)(worker)
        if worker.rank == 0:
            with severed(worker.session.links[1]):
                pushing = aside(lambda: train_step(worker, 3))
                eventually(lambda: shards.servers[0].store.clocks()[0] >= 4)
            pushing.join(SECONDS)
        else:
            train_step(worker, 3)
        train_step(worker, 4)

    with serving(tmp_path, shards=2, compression=asked(codec)) as shards:
        workers = workers_of(shards)
        all_well(workers, act)
    assert same(workers[0].model, oracle(codec, 5)[0])


@pytest.mark.parametrize("codec", ["topk", rotating("int8")])
def test_what_was_left_out_comes_back_with_a_workers_record(tmp_path: Path, codec: str) -> None:
    """Rank 1 dies between two steps and continues from its record; every bit is as without its death."""

    def act(worker: Worker) -> None:
        for step in range(worker.session.clock, 8):
            worker.edge(step)
            if worker.rank == 1 and step == 4 and worker.job.place.number == 1:
                assert eventually(lambda: 4 in shards.servers[0].coordinator.machine.state.members[1].records)  # type: ignore[union-attr]
                worker.die()
                raise Gone
            train_step(worker, step)

    def returning() -> None:
        gone.wait(SECONDS)
        torch.set_num_threads(1)
        model = build()
        again = Worker(shards, 1, model, sgd(model), start=2)
        again.attach()
        assert again.session.clock == 4
        act(again)
        assert again.leave() == 0

    gone = threading.Event()
    with serving(tmp_path, shards=2, compression=asked(codec)) as shards:
        workers = workers_of(shards)
        follower = aside(returning)

        def first(worker: Worker) -> None:
            try:
                act(worker)
            except Gone:
                gone.set()
                raise

        raised = together(workers, first)
        follower.join(SECONDS)
        assert raised[0] is None and isinstance(raised[1], Gone)
        assert shards.wait_ended() == [0, 0]
    assert same(workers[0].model, oracle(codec, 8)[0])


class Gone(Exception):
    """This worker's process is no more."""


@pytest.mark.parametrize("codec", ["topk"])
def test_a_skipped_clock_leaves_alone_what_was_left_out(tmp_path: Path, codec: str) -> None:
    """Rank 1 finds inf at step 2: nobody's push counts, on neither side, and the oracle never made that step."""
    with serving(tmp_path, shards=2, compression=asked(codec)) as shards:
        workers = workers_of(shards)
        all_well(workers, one_inf({}))
    model, wire = oracle(codec, 6, batches=lambda step, rank: None if step == 2 else batch(step, rank))
    assert same(workers[0].model, model)
    for (rank, block), left in wire.left.items():
        assert torch.equal(workers[rank].session.exchange.compression.state()["left"][block], left)


def test_absent_ranks_and_tensors_without_gradients_leave_it_alone(tmp_path: Path) -> None:
    def act(worker: Worker) -> None:
        for step in range(5):
            if step == 3 and worker.rank == 1:
                worker.job.absent_step()
                continue
            worker.optimizer.zero_grad(set_to_none=True)
            loss_of(worker.model, batch(step, worker.rank)).backward()
            if step == 2:
                held[worker.rank] = {k: v.clone() for k, v in worker.session.exchange.compression.state()["left"].items()}
                worker.model[2].weight.grad = None
            worker.optimizer.step()
            if step == 2:
                after = worker.session.exchange.compression.state()["left"]
                row = next(i for i, spec in enumerate(worker.session.layout.table) if spec.name == "2.weight")
                for block, piece in worker.session.layout.pieces_of(row):
                    span = slice(piece.block_offset, piece.block_offset + piece.length)
                    assert torch.equal(after[block.index][span], held[worker.rank][block.index][span])

    held: dict[int, dict[int, torch.Tensor]] = {}
    with serving(tmp_path, shards=2, compression=asked("topk")) as shards:
        workers = workers_of(shards)
        all_well(workers, act)
    assert same(workers[0].model, workers[1].model)


@pytest.mark.parametrize("pull", [rotating("bf16"), "fp16"])
def test_pulled_weights_are_rounded_and_the_shards_keep_whole_ones(tmp_path: Path, pull: str) -> None:
    with serving(tmp_path, shards=2, compression=asked(pull=pull)) as shards:
        workers = workers_of(shards)
        all_well(workers, steps(6))
    held = load_file(shards.folder / "final.safetensors")
    assert same(workers[0].model, workers[1].model)
    model, _ = oracle("none", 6)
    for name, mine in workers[0].model.named_parameters():
        assert not torch.equal(mine, held[name])
        assert torch.allclose(mine, held[name], rtol=2.0**-8, atol=1e-7)
        assert torch.allclose(held[name], dict(model.named_parameters())[name], atol=1e-2)


def test_where_workers_step_the_mean_is_encoded_and_weights_are_whole(tmp_path: Path) -> None:
    def rmsprop(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(model.parameters(), lr=0.005)

    with serving(tmp_path, shards=2, compression=asked("int8", "bf16")) as shards:
        workers = workers_of(shards, make=rmsprop)
        all_well(workers, steps(6))
    held = load_file(shards.folder / "final.safetensors")
    assert same(workers[0].model, workers[1].model)
    assert all(torch.equal(mine, held[name]) for name, mine in workers[0].model.named_parameters())


def test_an_async_shard_takes_each_encoded_push_once(tmp_path: Path) -> None:
    """Whole numbers that int8 carries exactly: the sum tells how often each counted."""

    def act(worker: Worker) -> None:
        for step in range(10):
            if step % 3 == worker.rank:
                worker.session.links[step % 2].close()
            push_filled(worker, -127.0)

    def counting(model: torch.nn.Module) -> torch.optim.Optimizer:
        for p in model.parameters():
            torch.nn.init.zeros_(p)
        return torch.optim.SGD(model.parameters(), lr=1.0)

    with serving(tmp_path, shards=2, mode="async", compression=asked("int8", "bf16")) as shards:
        all_well(workers_of(shards, make=counting), act)
    assert {number for tensor in load_file(shards.folder / "final.safetensors").values() for number in tensor.flatten().tolist()} == {
        2540.0
    }


def test_a_large_residual_goes_at_cuts_only_and_a_rewind_puts_it_back(tmp_path: Path) -> None:
    """The record is too large for every clock: rank 1's death sends all back to the checkpoint, and no bit changes."""
    every = replace(NEVER, every_steps=3, keep=100)
    ended: dict[int, str] = {}

    def act(worker: Worker) -> None:
        for step in range(worker.session.clock, 8):
            if step == 1:
                until_checkpoints(worker, shards, 1)  # it is named two steps ahead
            worker.edge(step)
            if worker.rank == 1 and step == 5 and worker.job.place.number == 1:
                assert eventually(lambda: any(int(p.stem[-12:]) >= 3 for p in shards.folder.glob("manifest-*.json")))
                worker.die()
                return
            train_step(worker, step)

    def life(rank: int) -> None:
        torch.set_num_threads(1)
        for start in (1, 2, 3):
            model = wide()
            worker = Worker(shards, rank, model, sgd(model), start=start)
            try:
                worker.attach()
                act(worker)
                if worker.session.clock < 8:
                    continue
                assert worker.leave() == 0
                ended[rank] = tensors_sha256(model.parameters())
                return
            except Rewound:
                worker.die()

    with serving(tmp_path, shards=2, compression=asked("int8"), checkpoint=every) as shards:
        lives = [threading.Thread(target=life, args=(rank,), daemon=True) for rank in range(2)]
        for thread in lives:
            thread.start()
        for thread in lives:
            thread.join(SECONDS)
    model, wire = wide(), Wire("int8", RATIO, seed=5)
    reference(model, "sgd", [{"lr": 0.05, "momentum": 0.9}], lambda s: [batch(s, 0), batch(s, 1)], loss_of, 8, wire=wire)
    assert sum(left.numel() for left in wire.left.values()) * 4 > 2 * (64 << 10)
    assert ended == dict.fromkeys((0, 1), tensors_sha256(model.parameters()))


def wide() -> torch.nn.Module:
    return build(160)


def test_what_could_not_be_saved_is_refused_by_its_size(tmp_path: Path, last_words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "LIMIT", 1000)
    with serving(tmp_path, compression=asked("int8")) as shards, pytest.raises(Exception, match="at most 1000 fit; take bf16"):
        workers_of(shards)
    with serving(tmp_path, compression=asked("bf16")) as shards:
        all_well(workers_of(shards), steps(2))


def test_a_codec_that_was_not_agreed_costs_the_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also bodies that no encoder writes: refused with a sentence, the worker dials again, nothing of them counts."""
    plain, _ = oracle("topk", 8)

    def act(worker: Worker) -> None:
        for step in range(8):
            if worker.rank == 0 and step in bad:
                number, body = bad[step]
                link, session = worker.session.links[0], worker.session
                block = next(b for b in session.layout.blocks if session.owner[b.index] == 0 and b.length > 100)
                head = session.header(Kind.PUSH, block=block.index, clock=session.clock, info=session.exchange._info, attempt=link.attempt)
                raw = body(block.length)
                link.lanes[0].stream.write(head._replace(codec=number).sized(raw), raw)
                eventually(lambda step=step: len(sentences) > list(bad).index(step))  # type: ignore[misc]
            train_step(worker, step)

    bad: dict[int, tuple[int, Callable[[int], bytes]]] = {
        1: (3, lambda length: bytes(length + 4 * -(-length // 256))),
        2: (9, lambda length: bytes(8)),
        3: (4, lambda length: bytes(8 * length)),
        4: (4, lambda length: length.to_bytes(4, "little") + bytes(4)),
        5: (4, lambda length: bytes(7)),
    }
    sentences: list[str] = []
    refuse = Server.refuse

    def heard(server: Server, stream: Stream, error: Exception) -> None:
        sentences.append(str(error))
        refuse(server, stream, error)

    monkeypatch.setattr(Server, "refuse", heard)
    with serving(tmp_path, shards=2, compression=asked("topk")) as shards:
        workers = workers_of(shards)
        all_well(workers, act)
        assert shards.servers[0].bad_connections >= 5
    assert same(workers[0].model, plain)
    words = " | ".join(sentences)
    for sentence in ("codec 3 was not agreed in hello; none, topk were", "codec 9 was not agreed", "expected a multiple of 8", "places"):
        assert sentence in words


def test_auto_encodes_nothing_between_processes_of_one_address(tmp_path: Path) -> None:
    with serving(tmp_path, shards=2, compression=asked("auto", "auto")) as shards:
        workers = workers_of(shards)
        all_well(workers, steps(6))
        assert status(shards.servers[0])["coordinator"]["codecs"] is None
    assert same(workers[0].model, oracle("none", 6)[0])


@pytest.mark.parametrize(
    ("megabytes", "push", "pull"),
    # Beside other work 200 MB/s are measured as less.
    [(4, "topk", "bf16"), pytest.param(200, "int8", "bf16", marks=[pytest.mark.soak, pytest.mark.serial])],
)
def test_auto_takes_what_the_measured_link_is_good_for(tmp_path: Path, megabytes: int, push: str, pull: str) -> None:
    """A link of 0.03 and of 1.6 Gb/s, between two addresses; the choice goes with the record."""

    class Far(Shards):
        def place(self, rank: int, start: int = 1) -> ProcessContext:
            near = super().place(rank, start)
            return replace(near, config=replace(near.config, shards=(ShardAddress(link.host, link.port, 0),)))

    link: SlowLink

    def act(worker: Worker) -> None:
        for _ in range(26):
            push_filled(worker, 1.0)

    with serving(tmp_path, workers=1, shards=1, compression=asked("auto", "auto")) as shards:
        shards.__class__ = Far
        rate = megabytes * 1e6
        link = SlowLink(shards.address(0), Bucket(rate), Bucket(rate), apart=True)
        model = torch.nn.Linear(300, 300)
        worker = Worker(shards, 0, model, sgd(model))
        all_well([worker], act)
        assert status(shards.servers[0])["coordinator"]["codecs"] == f"push {push}, pull {pull}"
        link.close()
    saved = worker.session.exchange.compression.state()
    assert (saved["push"], saved["pull"], bool(saved["left"])) == ([push], [pull], True)


def worker_of(shards: Shards, start: int) -> Worker:
    model = build()
    return Worker(shards, 0, model, torch.optim.SGD(model.parameters(), lr=0.05), start)


def step(worker: Worker) -> None:
    """With an edge before it, as `ps.shard` makes it."""
    worker.edge(worker.session.clock)
    train_step(worker, worker.session.clock, 0)


def manifests(shards: Shards) -> int:
    return len(list(shards.folder.glob("manifest-*.json")))


@pytest.mark.parametrize("later", [0, 3])
def test_a_residual_is_put_back_with_the_newest_record_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: int) -> None:
    """`later` steps follow the record, which is made at a checkpoint."""
    monkeypatch.setattr(session, "SMALL_RECORD", 0)
    with serving(tmp_path, workers=1, shards=2, mode="async", compression=CompressionConfig("topk", ratio=0.1)) as shards:
        worker = worker_of(shards, 1)
        worker.attach()
        for _ in range(3):
            step(worker)
        before = manifests(shards)
        worker.session.checkpoint()
        while manifests(shards) == before:
            worker.edge(worker.session.clock)
        for _ in range(later):
            step(worker)
        left_out = worker.session.exchange.compression.state()["left"]
        assert any(bool(tensor.any()) for tensor in left_out.values())
        clock = worker.session.clock
        worker.die()
        again = worker_of(shards, 2)
        again.attach()
        assert eventually(lambda: again.session.joined)
        assert again.session.clock == clock and again.session.record is not None
        put_back = again.session.exchange.compression.state()["left"]
        if later:
            assert put_back == {}
        else:
            assert put_back.keys() == left_out.keys() and all(torch.equal(put_back[block], left_out[block]) for block in left_out)
        again.die()


STEPS, LIMIT, LR = 4, 2.0, 0.1


def model() -> nn.Module:
    """Two tensors, on two shards."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 8, bias=False))


def poisoned(value: float) -> Callable[[Worker], None]:
    def act(worker: Worker) -> None:
        for _ in range(STEPS):
            push_filled(worker, value if worker.rank == 1 else 1e-3)

    return act


@pytest.mark.parametrize(
    ("mode", "value", "transport"), each_pair(["sync", "async", "bounded"], [1e6, -1e30, float("nan")], ["tcp", "auto"])
)
def test_one_worker_moves_the_weights_no_further_than_its_bound(tmp_path: Path, mode: str, value: float, transport: str) -> None:
    more: dict[str, Any] = {"staleness": 1} if mode == "bounded" else {}
    with serving(tmp_path, workers=2, shards=2, mode=mode, transport=transport, max_push_norm=LIMIT, **more) as shards:
        workers = [Worker(shards, rank, made := model(), torch.optim.SGD(made.parameters(), lr=LR)) for rank in range(2)]
        begun = [p.detach().clone() for p in workers[0].model.parameters()]
        all_well(workers, poisoned(value))
        told = [status(server) for server in shards.servers]
        final = [cell.state.weights.clone() for server in shards.servers for cell in server.store.cells.values() if cell.state is not None]
    own = STEPS * LR * 1e-3 * (64 * 32) ** 0.5
    whole = torch.cat([p.reshape(-1) for p in begun]), torch.cat([weights.reshape(-1) for weights in final])
    assert all(bool(torch.isfinite(weights).all()) for weights in final)
    assert abs(float(whole[0].norm()) - float(whole[1].norm())) <= STEPS * LR * LIMIT * 2**0.5 + 2 * own
    norm = None if value != value else abs(value) * (64 * 32) ** 0.5
    for body in told:
        found = body["largePushes"]
        assert (found["pushes"], found["worker"]) == (STEPS, 1)
    sentence = told[0]["coordinator"]["largePush"]
    assert sentence.startswith("worker 1's push of block ") and "training.maxPushNorm 2" in sentence
    assert ("held NaN or inf" in sentence) == (norm is None)


def test_pushes_within_the_limit_are_not_touched(tmp_path: Path) -> None:
    ends = []
    for name, more in (("free", {}), ("bounded", {"max_push_norm": 1e3})):
        with serving(tmp_path / name, workers=2, shards=2, **more) as shards:
            workers = [Worker(shards, rank, made := model(), torch.optim.SGD(made.parameters(), lr=LR)) for rank in range(2)]
            all_well(workers, poisoned(1.0))
            assert all(status(server)["largePushes"] is None for server in shards.servers)
            ends.append([p.detach().clone() for p in workers[0].model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_rows_of_a_table_are_bounded_too(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=1, mode="async", max_push_norm=LIMIT) as shards:
        embedding = psjob.Embedding(100, 4)
        net = nn.Sequential(embedding)
        worker = Worker(shards, 0, net, torch.optim.SGD(net.parameters(), lr=LR))

        def act(worker: Worker) -> None:
            before = embedding(torch.tensor([3, 5])).detach().clone()
            (embedding(torch.tensor([3, 5])) * 1e6).sum().backward()
            worker.optimizer.step()
            after = embedding(torch.tensor([3, 5])).detach()
            assert 0 < float((after - before).norm()) <= LR * LIMIT * 1.001

        all_well([worker], act)
        assert status(shards.servers[0])["largePushes"]["of"].startswith("table ")
