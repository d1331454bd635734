"""A push that takes longer than the silence that a worker bears: while bytes move, the stream is alive."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from psjob.worker import link
from tests.live.live_shards import Worker, all_well, serving
from tests.live.slow_line import Behind, SlowLine
from tests.soaking import soak

SIZE = 200_000
RATE = 160_000
SILENCE = 1.5


@pytest.mark.rotating
@pytest.mark.parametrize("streams", [soak(1), 3])
def test_a_large_push_on_a_slow_line_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams: int) -> None:
    """Of 800 KB each way, 5 s each; the streams are dialled once."""
    monkeypatch.setattr(link, "SILENCE_SECONDS", SILENCE)
    model = nn.Linear(SIZE, 1, bias=False)
    nn.init.zeros_(model.weight)

    def act(worker: Worker) -> None:
        for _ in range(2):
            worker.optimizer.zero_grad()
            worker.model(torch.ones(1, SIZE)).sum().backward()
            worker.optimizer.step()

    with serving(tmp_path, workers=1, shards=1, transport="tcp", streams=streams) as shards:
        line = SlowLine(shards.address(0), RATE)
        try:
            worker = Worker(Behind(shards, line), 0, model, torch.optim.SGD(model.parameters(), lr=1.0))  # type: ignore[arg-type]
            all_well([worker], act)
            assert torch.equal(model.weight, torch.full((1, SIZE), -2.0))
            assert line.connections == streams
            assert line.carried["up"] < 4 * SIZE * 4, "first values and two pushes go up, once each"
        finally:
            line.close()
