"""A model of many small tensors: its table is longer than one frame of a hello."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from psjob.api.attachable import MOST_TOLD, aliases, table_of
from psjob.process.errors import Refused
from psjob.wire.frame import MAX_JSON, dump
from tests.live.live_shards import Worker, all_well, serving
from tests.soaking import rotating

NAME = "weight_of_a_rather_small_tensor"


class Many(nn.Module):
    """`count` parameters of two numbers each, the n-th of them n."""

    def __init__(self, count: int, name: str = NAME) -> None:
        super().__init__()
        for number in range(count):
            self.register_parameter(f"{name}_{number}", nn.Parameter(torch.full((2,), float(number))))


@pytest.mark.parametrize(("tensors", "name"), [(2_200, NAME * 16), rotating(12_000, NAME)], ids=["long names", "many tensors"])
def test_workers_with_a_table_of_many_frames_train(tmp_path: Path, tensors: int, name: str) -> None:
    models = [Many(tensors, name) for _ in range(2)]

    def act(worker: Worker) -> None:
        table = [spec.to_json() for spec in worker.session.layout.table]
        assert len(dump({"table": table})) > MAX_JSON
        for p in worker.model.parameters():
            p.grad = torch.ones_like(p)
        worker.optimizer.step()

    with serving(tmp_path, workers=2, shards=2) as shards:
        workers = [Worker(shards, rank, model, torch.optim.SGD(model.parameters(), lr=0.5)) for rank, model in enumerate(models)]
        all_well(workers, act)
    for model in models:
        assert [float(p[0]) for p in model.state_dict().values()] == [number - 0.5 for number in range(tensors)]


def test_a_table_that_no_hello_can_carry_is_refused_with_the_remedy() -> None:
    model = Many(60, "x" * (MOST_TOLD // 50))
    _, table = table_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(Refused, match=rf"of 60 parameters are \d+ bytes, at most {MOST_TOLD} can be sent .*shorter names"):
        aliases(model, table)
