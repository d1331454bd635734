"""A worker's process that comes with an older number than one that was there: it ends, and says which number it met."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from psjob import contract
from tests.live.live_shards import Worker, serving


def worker(shards: object, start: int) -> Worker:
    model = torch.nn.Linear(2, 1)
    return Worker(shards, 0, model, torch.optim.SGD(model.parameters(), lr=0.1), start=start)  # type: ignore[arg-type]


@pytest.mark.parametrize("shards", [1, 2])
def test_an_older_process_says_which_start_it_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int) -> None:
    said = tmp_path / "termination-log"
    monkeypatch.setenv(contract.ENV_TERMINATION_LOG, str(said))
    with serving(tmp_path, workers=1, shards=shards) as served:
        newer = worker(served, 5)
        newer.attach()
        newer.die()
        with pytest.raises(SystemExit) as ended:
            worker(served, 2).attach()
    assert ended.value.code == contract.EXIT_FENCED
    message = json.loads(said.read_text())
    assert message["fenced"] == {"start": 5} and "a newer process of this rank is here" in message["ending"]
    assert message.keys() <= contract.ENDING_KEYS
