"""Error feedback after an async worker's death: what an older record says was left out has been sent since, and is not sent twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from psjob.process.config import CompressionConfig
from psjob.worker import session
from tests.live.live_shards import Shards, Worker, eventually, serving
from tests.live.training import batch, build, loss_of


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
