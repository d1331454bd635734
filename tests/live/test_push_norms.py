"""A worker that pushes far too much, among others: no step moves the weights by more than its bound, in every mode and on every road."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import psjob
from psjob.shard.status_server import status
from tests.covering import each_pair
from tests.live.live_shards import Worker, all_well, serving

STEPS, LIMIT, LR = 4, 2.0, 0.1


def model() -> nn.Module:
    """Two tensors, on two shards."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 8, bias=False))


def poisoned(value: float) -> Callable[[Worker], None]:
    def act(worker: Worker) -> None:
        for _ in range(STEPS):
            for p in worker.model.parameters():
                p.grad = torch.full_like(p, value if worker.rank == 1 else 1e-3)
            worker.optimizer.step()

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
        (tmp_path / name).mkdir()
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
