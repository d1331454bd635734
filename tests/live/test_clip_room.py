"""Clipping by the norm of a gradient that is larger than a worker's credit: no block is answered before all have come."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from psjob.worker import exchange
from tests.live.live_shards import Worker, all_well, serving

ROWS, COLUMNS = 64, 256


def trained(folder: Path, **config: object) -> list[torch.Tensor]:
    """The weights of two workers after three steps with gradients of ones."""
    with serving(folder, workers=2, shards=2, max_grad_norm=1.0, transport="tcp", **config) as shards:
        models = [nn.ParameterList([torch.zeros(ROWS, COLUMNS) for _ in range(8)]) for _ in range(2)]
        workers = [Worker(shards, rank, model, torch.optim.SGD(model.parameters(), lr=1.0)) for rank, model in enumerate(models)]

        def act(worker: Worker) -> None:
            for step in range(3):
                worker.edge(step)
                for p in worker.model.parameters():
                    p.grad = torch.ones_like(p)
                worker.optimizer.step()

        all_well(workers, act)
        return [p.detach() for p in models[0]]


def test_a_credit_below_the_gradient_does_not_stop_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "CREDIT", 4 * ROWS * COLUMNS)
    weights = trained(tmp_path)
    expected = -3 / (8 * ROWS * COLUMNS) ** 0.5
    for p in weights:
        assert torch.allclose(p, torch.full_like(p, expected), rtol=1e-5)
