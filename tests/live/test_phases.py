"""A model that is attached again with another optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from psjob import contract
from psjob.api import advice, attach
from psjob.api.recording import PlainState
from psjob.process.errors import Refused
from tests.live.live_shards import Worker, serving

pytestmark = pytest.mark.usefixtures("last_words")


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(6.0).view(2, 3)).square().sum().backward()
    optimizer.step()


def first_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def second_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop([{"params": model[1].parameters()}, {"params": model[0].parameters(), "lr": 1e-4}], lr=1e-3)  # type: ignore[index]


def test_the_second_optimizer_takes_the_place_of_the_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path, workers=1, update_at="worker") as shards:
        model, plain = build(), build()
        worker = Worker(shards, 0, model, first_of(model), overlap=False)
        worker.attach()
        for optimizer, alone in ((worker.optimizer, first_of(plain)), (second_of(model), second_of(plain))):
            if optimizer is not worker.optimizer:
                attach.check_phase(worker.job, optimizer, False, ())
                attach.begin_phase(worker.job, optimizer, {})
            for number in range(3):
                worker.edge(number)
                step(model, optimizer)
                step(plain, alone)
        for p, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, wanted)
        kept = worker.job.records.kept["optimizer (worker side)"]
        assert isinstance(kept, PlainState) and kept.state_dict()["class"] == "RMSprop"
        with pytest.raises(Refused, match="SGD of 4 parameters was attached when the record was taken, and RMSprop of 4 is now"):
            kept.load_state_dict({**first_of(model).state_dict(), "class": "SGD"})
        with pytest.raises(SystemExit) as ended:
            step(model, worker.optimizer)
        assert ended.value.code == contract.EXIT_REFUSED
        worker.die()
        assert "SGD makes a step, and RMSprop was attached in its place; step that one" in capfd.readouterr().err


def test_what_no_phase_can_be_is_refused(tmp_path: Path) -> None:
    for folder in ("worker", "async"):
        (tmp_path / folder).mkdir()
    with serving(tmp_path / "worker", workers=1, update_at="worker") as shards:
        model = build()
        worker = Worker(shards, 0, model, torch.optim.SGD(model[1].parameters(), lr=0.1), overlap=False)  # type: ignore[index]
        with pytest.raises(Refused, match=r"a parameter that the first optimizer does not have: 0\.weight\. Make both optimizers first"):
            attach.check_phase(worker.job, first_of(model), False, ())
        worker.die()
    with serving(tmp_path / "async", workers=1, mode="async") as shards:
        worker = Worker(shards, 0, model, first_of(model), overlap=False)
        with pytest.raises(Refused, match=r"continues with SGD\. Change the numbers of its param_groups"):
            attach.check_phase(worker.job, second_of(model), False, ())
        worker.die()


def test_a_second_optimizer_that_nobody_attached_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(advice, "tell_once", lambda kind, sentence: told.append(sentence))
    with serving(tmp_path, workers=1) as shards:
        model = build()
        worker = Worker(shards, 0, model, first_of(model), overlap=False)
        worker.attach()
        watch = worker.job.unattached.watch()
        worker.edge(0)
        step(model, worker.optimizer)
        assert not told
        step(model, second_of(model))
        watch.remove()
        worker.die()
        assert "RMSprop was not given to attach, and steps parameters that the attached SGD trains (1.weight …)" in told[0]
