"""Error feedback after an async worker's death: what an older record says was left out has been sent since, and is not sent twice.

- A worker that pushes far too much, among others: no step moves the weights by more than its bound, in every mode and on every road.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import psjob
from psjob.process.config import CompressionConfig
from psjob.shard.status_server import status
from psjob.worker import session
from tests.live.live_shards import Shards, Worker, all_well, eventually, serving
from tests.live.training import batch, build, loss_of
from tests.support.covering import each_pair


def worker_of(shards: Shards, start: int) -> Worker:
    model = build()
    return Worker(shards, 0, model, torch.optim.SGD(model.parameters(), lr=0.05), start)


def step(worker: Worker) -> None:
    """With an edge before it, as `ps.shard` makes it."""
    worker.edge(worker.session.clock)
    worker.optimizer.zero_grad()
    loss_of(worker.model, batch(worker.session.clock, 0)).backward()
    worker.optimizer.step()


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
