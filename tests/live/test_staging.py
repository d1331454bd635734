"""Copies between a model and the memory that blocks are sent from and received in; on a GPU too, where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psjob.checkpoint.final import tensors_sha256
from psjob.layout.blocks import Layout, TensorSpec
from psjob.worker.exchange import Exchange, Staging
from psjob.worker.overlap import Overlap, tree_of
from tests.live.live_shards import Worker, all_well, serving
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
    assert set(staging._gradients) == set(staging._weights) == own != set(range(len(of.blocks)))
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


def paths(worker: Worker, way: str, device: str) -> None:
    """Give the worker another data path than attach has chosen."""
    session, job = worker.session, worker.job
    if way == "staged":
        session.use(Exchange(session.rows, Staging(session.layout, torch.device(device), lands=True)))
    elif way == "overlap":
        overlap = Overlap(session.rows, job.parameters, tree_of(job.model, job.parameters), torch.device(device), lands=True)
        session.use(overlap.exchange, overlap)
        job.weight_guard._lands_later = True  # as in a job that was made with overlap


def run(folder: Path, name: str, way: str, device: str, scaled: bool) -> set[str]:
    folder.mkdir()

    def act(worker: Worker) -> None:
        scaler = torch.amp.GradScaler(device, init_scale=1024.0, enabled=scaled)
        for step in range(6):
            worker.optimizer.zero_grad()
            x, y = batch(step, worker.rank)
            scaler.scale(loss_of(worker.model, (x.to(device), y.to(device)))).backward()
            scaler.step(worker.optimizer)
            scaler.update()
        worker.job.wait()

    def model() -> nn.Module:
        return build().to(device)

    with serving(folder, workers=2, shards=2) as shards:
        models = [model() for _ in range(2)]
        workers = [Worker(shards, rank, m, OPTIMIZERS[name](m)) for rank, m in enumerate(models)]
        for worker in workers:
            paths(worker, way, device)
        all_well(workers, act)
        return {tensors_sha256(p.detach().cpu() for p in worker.model.parameters()) for worker in workers}


@every_device
@pytest.mark.parametrize("name", [rotating("adam"), "rmsprop"])
def test_every_data_path_gives_the_same_bits(tmp_path: Path, device: str, name: str) -> None:
    """Straight from the model's memory (where that is this host's), staged, and staged with overlap."""
    found: dict[str, Any] = {way: run(tmp_path / way, name, way, device, False) for way in ("attach", "staged", "overlap")}
    assert len(set.union(*found.values())) == 1, found


@every_device
def test_a_scaled_gradient_is_unscaled_on_its_way(tmp_path: Path, device: str) -> None:
    assert run(tmp_path / "direct", "sgd", "attach", device, True) == run(tmp_path / "staged", "sgd", "staged", device, True)
