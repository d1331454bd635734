"""Blocks of a model on a GPU in this host's memory: copied out and in, lent to the shards, the same bits in every mode.

The device is the CPU too: the same code stages there, and copies at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from psjob import contract
from psjob.checkpoint.final import tensors_sha256
from psjob.layout.blocks import Layout, TensorSpec
from psjob.process.config import LocalConfig
from psjob.worker.exchange import Exchange, GradientClip
from psjob.worker.overlap import Overlap, tree_of
from psjob.worker.staging import Staging
from tests.live.live_shards import Shards, Worker, all_well, serving
from tests.live.slow_device import SlowAwaitedStaging, SlowStaging
from tests.live.training import OPTIMIZERS, batch, build, loss_of
from tests.support.hardware import DEVICES
from tests.support.soaking import rotating

every_device = pytest.mark.parametrize("device", DEVICES)
SHAPES = [(7, 9), (300,), (1000, 3), (), (5, 0), (64,)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def layout() -> Layout:
    return Layout.of([TensorSpec(f"t{i}", shape, "float32", i % 2) for i, shape in enumerate(SHAPES)], 4096)


def tensors(seed: int, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    made[0] = torch.randn(9, 7, generator=generator).t()
    return [tensor.to(device) for tensor in made]


def piece(of: torch.Tensor | None, layout: Layout, row: int, offset: int, length: int) -> torch.Tensor:
    return torch.zeros(length) if of is None else of.detach().cpu().reshape(-1)[offset : offset + length]


def expect(staging: Staging, of: Layout, sources: list[torch.Tensor | None]) -> None:
    for block in of.blocks:
        flat = staging.gradient(block.index)
        for p in block.pieces:
            found = flat[p.block_offset : p.block_offset + p.length]
            assert torch.equal(found, piece(sources[p.tensor], of, p.tensor, p.tensor_offset, p.length))


@every_device
def test_gradients_row_by_row_and_block_by_block(device: str) -> None:
    """Cut, transposed, empty and scalar tensors; None is zeros, also where something lay before."""
    of = layout()
    staging = Staging(of, torch.device(device))
    first: list[torch.Tensor | None] = list(tensors(1, device))
    for row, gradient in enumerate(first):
        staging.put(row, gradient)
    for block in of.blocks:
        staging.copied(block.index)
    expect(staging, of, first)
    second: list[torch.Tensor | None] = list(tensors(2, device))
    second[2] = second[5] = None
    for block in of.blocks:
        staging.gather(block.index, second)
    expect(staging, of, second)


@every_device
def test_a_stage_has_memory_for_its_own_blocks(device: str) -> None:
    table = [
        TensorSpec(f"t{i}", shape, "float32", 0, stages)
        for i, (shape, stages) in enumerate(zip(SHAPES, [(0,), (0, 1), (1,), (1,), (0,), (2,)], strict=True))
    ]
    of = Layout.of(table, 4096)
    staging, gradients = Staging(of, torch.device(device), lands=True, stage=1), list(tensors(1, device))
    own = {block.index for block in of.of_stage(1)}
    assert set(staging._gradients) == own != set(range(len(of.blocks)))
    targets: list[torch.Tensor | None] = [torch.full_like(tensor, 9.0) for tensor in gradients]
    for block in sorted(own):
        staging.gather(block, gradients)
        staging.weights(block).copy_(staging.gradient(block))
        staging.take(block, targets)
    staging.settle(own)
    for row, (target, gradient) in enumerate(zip(targets, gradients, strict=True)):
        assert target is not None
        assert torch.equal(target, gradient if 1 in table[row].stages else torch.full_like(gradient, 9.0))


@every_device
def test_only_one_block_of_a_cut_tensor(device: str) -> None:
    of = layout()
    staging = Staging(of, torch.device(device))
    old, new = tensors(1, device), tensors(2, device)
    for block in of.blocks:
        staging.gather(block.index, old)
    parts = [block.index for block, _ in of.pieces_of(2)]
    assert len(parts) > 1
    staging.put(2, new[2], only=parts[1])
    staging.copied(parts[1])
    for (block, p), source in zip(of.pieces_of(2), [old, new, *[old] * len(parts)], strict=False):
        flat = staging.gradient(block.index)
        assert torch.equal(flat, piece(source[2], of, 2, p.tensor_offset, p.length))


@every_device
def test_weights_land_behind_what_was_begun_before(device: str) -> None:
    """Twice by the same memory; a target of None is left out."""
    of = layout()
    staging = Staging(of, torch.device(device), lands=True)
    targets: list[torch.Tensor | None] = [torch.zeros(shape, device=device) for shape in SHAPES]
    for seed in (1, 2):
        wanted = tensors(seed, "cpu")
        staging.expect()
        for block in of.blocks:
            flat = staging.weights(block.index)
            for p in block.pieces:
                flat[p.block_offset : p.block_offset + p.length] = piece(wanted[p.tensor], of, p.tensor, p.tensor_offset, p.length)
            staging.take(block.index, targets if seed == 1 else [None, *targets[1:]])
        staging.settle(range(len(of.blocks)))
        for row, target in enumerate(targets):
            assert target is not None and torch.equal(target.cpu(), (tensors(1, "cpu") if row == 0 else wanted)[row])


SLOW = (0.002, 0.05)
"""Seconds that a copy into the model of each rank takes where they are slow."""


def use(worker: Worker, way: str, device: str) -> Staging | None:
    """Give the worker another data path than attach has chosen."""
    session, job = worker.session, worker.job
    staging: Staging | None = None
    if way in ("staged", "slow"):
        of, seconds = session.layout, SLOW[worker.rank]
        staging = SlowStaging(of, seconds) if way == "slow" else Staging(of, torch.device(device), lands=True)
        session.use(Exchange(session.rows, staging))
    elif way.endswith("overlap"):
        overlap = Overlap(session.rows, job.parameters, tree_of(job.model, job.parameters), torch.device(device), lands=True)
        if way == "slow overlap":
            staging = overlap.staging = overlap.exchange.memory = SlowAwaitedStaging(session.layout, SLOW[worker.rank])
            overlap.awaited = overlap.staging.awaited
            overlap._compares = False  # as on a GPU, where a look at each gradient would wait for its copy
            overlap.exchange.sharing = staging.share(session.layout, session.state.mode.steady)
        session.use(overlap.exchange, overlap)
        job.weight_guard._lands_later = True  # as in a job that was made with overlap
    return staging


class Ways(NamedTuple):
    """How the workers of a run train."""

    way: str
    """attach: as on the CPU; staged, overlap: as on a GPU; slow, slow overlap: as on one whose copies take long."""
    mode: str = "sync"
    update_at: str | None = None
    workers: int = 2
    transport: str = "auto"
    scaled: bool = False
    absent: bool = False
    """Rank 1 has no batch in every third step, and leaves before the last two."""
    more: Mapping[str, Any] = {}


def trained(folder: Path, ways: Ways, device: str, name: str = "sgd") -> dict[int, list[str]]:
    """By rank, SHA-256 of the weights after each step (not with overlap) and at the end."""
    folder.mkdir()
    seen: dict[int, list[str]] = {rank: [] for rank in range(ways.workers)}

    def look(worker: Worker) -> None:
        seen[worker.rank].append(tensors_sha256(p.detach().cpu() for p in worker.model.parameters()))

    slow: dict[int, SlowStaging] = {}

    def act(worker: Worker) -> None:
        scaler = torch.amp.GradScaler(device, init_scale=1024.0, enabled=ways.scaled)
        for step in range(4 if ways.absent and worker.rank == 1 else 6):
            if ways.absent and worker.rank == 1 and step % 3 == 2:
                worker.job._exchange(None, False, 1.0, None)
            else:
                x, y = batch(step, worker.rank)
                scaler.scale(loss_of(worker.model, (x.to(device), y.to(device)))).backward()
                scaler.step(worker.optimizer)
                scaler.update()
            worker.optimizer.zero_grad(set_to_none=False)
            if ways.way.endswith("overlap"):
                continue  # its weights land during the next forward pass
            if worker.rank in slow and not slow[worker.rank].at_once:
                slow[worker.rank].kernel(partial(look, worker))
            else:
                look(worker)
        shared = [link.shared for link in worker.session.links]
        lent = ways.transport == "auto" and (ways.mode in ("sync", "local") or not ways.way.endswith("overlap"))
        assert shared == [lent] * 2, shared

    with serving(
        folder, workers=ways.workers, shards=2, mode=ways.mode, update_at=ways.update_at, transport=ways.transport, **ways.more
    ) as shards:
        models = [build().to(device) for _ in range(ways.workers)]
        workers = [Worker(shards, rank, m, OPTIMIZERS[name](m)) for rank, m in enumerate(models)]
        for worker in workers:
            staging = use(worker, ways.way, device)
            if isinstance(staging, SlowStaging):
                slow[worker.rank] = staging
                worker.job.weight_guard._lands_later = True  # it reads the model, and nothing holds it up here as a GPU's stream does
                staging.at_once = ways.update_at == "worker" or ways.mode == "local"
                for module in worker.model.modules():
                    module.register_forward_pre_hook(partial(_wait, staging))
        try:
            all_well(workers, act)
        finally:
            for each in slow.values():
                each.end()
        for worker in workers:
            look(worker)
        return seen


def _wait(staging: SlowStaging, *_given: object) -> None:
    staging.compute_waits()


@every_device
@pytest.mark.parametrize("name", [rotating("adam"), "rmsprop"])
def test_every_data_path_gives_the_same_bits(tmp_path: Path, device: str, name: str) -> None:
    """Straight from the model's memory (on the CPU), staged, and staged with overlap; lent and sent."""
    ways = [Ways("attach"), *(Ways(way, transport=transport) for way in ("staged", "overlap") for transport in ("auto", "tcp"))]
    found = {f"{one.way} {one.transport}": trained(tmp_path / f"{one.way}-{one.transport}", one, device, name) for one in ways}
    assert all(steps[rank][-1] == found["attach auto"][0][-1] for steps in found.values() for rank in steps), found


@every_device
def test_a_scaled_gradient_is_unscaled_on_its_way(tmp_path: Path, device: str) -> None:
    ways = [Ways(way, transport=transport, scaled=True) for way in ("attach", "staged", "overlap") for transport in ("auto", "tcp")]
    found = [trained(tmp_path / f"{one.way}-{one.transport}", one, device) for one in ways]
    assert found[:4] == found[:1] * 4
    assert all(seen[rank][-1] == found[0][rank][-1] for seen in found[4:] for rank in seen)


MODES = {
    "sync": Ways("", absent=True),
    "sync, scaled": Ways("", scaled=True),
    "sync, workers update": Ways("", update_at="worker"),
    "async": Ways("", "async", workers=1),
    "bounded": Ways("", "bounded", workers=1, more={"staleness": 2}),
    "local": Ways("", "local", more={"local": LocalConfig(inner_steps=2)}),
}
"""Modes in which the same pushes give the same bits."""


MODE_AND_WAY = [(mode, way) for mode in MODES for way in ("staged", "slow", "slow overlap") if (mode, way) != ("local", "slow overlap")]


@pytest.mark.parametrize(("mode", "way"), MODE_AND_WAY)
def test_a_model_whose_copies_take_long_has_the_same_bits(tmp_path: Path, mode: str, way: str) -> None:
    """No byte is announced before it is copied, none is overwritten before, and the end of the script waits for what lands."""
    ways = MODES[mode]
    plain = trained(tmp_path / "plain", ways._replace(way="attach"), "cpu")
    found = trained(tmp_path / "slow", ways._replace(way=way), "cpu")
    assert found == ({rank: seen[-1:] for rank, seen in plain.items()} if way.endswith("overlap") else plain)


def one(live: Shards, way: str, update_at: str | None) -> Worker:
    """A worker on the CPU that exchanges in this way."""
    model = build()
    worker = Worker(live, 0, model, OPTIMIZERS["sgd"](model), overlap=way == "overlap")
    if way == "staged":
        use(worker, way, "cpu")
    worker.attach()
    if update_at != "local":
        loss_of(model, batch(0, 0)).backward()
        worker.optimizer.step()
        worker.optimizer.zero_grad()
    return worker


@pytest.mark.parametrize(
    ("mode", "way", "update_at"),
    [
        ("sync", "attach", None), ("sync", "attach", "worker"), ("async", "attach", None), ("local", "attach", None),
        ("sync", "staged", None), ("sync", "overlap", None),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("last_words")
def test_a_model_that_is_cast_after_attach_is_refused_in_every_road(
    tmp_path: Path, mode: str, way: str, update_at: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    """By the parameter's name, with what it was and is; no step is made of it."""
    more: dict[str, Any] = {"local": LocalConfig(inner_steps=2)} if mode == "local" else {}
    with serving(tmp_path, workers=1, shards=1, mode=mode, update_at=update_at, **more) as live:
        worker = one(live, way, update_at)
        made = worker.session.clock
        worker.model.double()
        x, y = batch(1, 0)
        loss_of(worker.model, (x.double(), y)).backward()
        with pytest.raises(SystemExit) as ended:
            worker.optimizer.step()
        told = capfd.readouterr().err
        assert ended.value.code == contract.EXIT_REFUSED
        assert "parameter 0.weight was float32 on cpu at attach, and is float64 on cpu now" in told
        assert "Move the model before attach" in told
        assert live.servers[0].store.clocks() in ({0: made}, {}), "nothing of it was pushed"
        worker.die()


def test_a_model_may_be_cast_after_its_last_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path, workers=1, shards=1) as live:
        worker = one(live, "staged", None)
        worker.model.half()
        assert worker.leave() == 0
        assert "is float16 on cpu now" in capfd.readouterr().err


@pytest.mark.parametrize("what", ["step", "clip", "forward with overlap", "batch"])
@pytest.mark.usefixtures("last_words")
def test_what_a_replay_would_leave_out_is_refused_in_a_capture(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A stand-in says that a stream is captured."""
    with serving(tmp_path, workers=1, shards=1) as live:
        worker = one(live, "overlap" if "overlap" in what else "staged", None)
        loss = loss_of(worker.model, batch(1, 0))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        loss.backward()
        with pytest.raises(SystemExit) as ended:
            if what == "step":
                worker.optimizer.step()
            elif what == "clip":
                worker.job.clipping._clip(worker.job.parameters, "clip_grad_norm_", GradientClip(norm=1.0))
            elif what == "batch":
                worker.edge(0)
            else:
                worker.model(batch(1, 0)[0])
        monkeypatch.undo()
        assert ended.value.code == contract.EXIT_REFUSED
        assert "was called while a CUDA graph is captured" in capfd.readouterr().err
        assert live.servers[0].store.clocks() == {0: 1}
        worker.die()


def test_gradients_that_replays_write_are_sent_whole_at_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With overlap: a gradient that leaves in backward, and is written again by a replay, would be an old one."""
    seen = []
    for early in (False, True):
        with serving(tmp_path / str(early), workers=1, shards=1) as live:
            worker = one(live, "overlap" if early else "attach", None)
            model = worker.model
            loss = loss_of(model, batch(1, 0))
            monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            loss.backward()
            monkeypatch.undo()
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.data.mul_(3.0)  # no version counts it, as none counts a replay
            worker.optimizer.step()
            assert worker.leave() == 0
            seen.append(tensors_sha256(model.parameters()))
    assert seen[0] == seen[1]
