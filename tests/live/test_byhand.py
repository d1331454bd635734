"""A script that writes into its parameters between two steps, over both transports."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from psjob import contract
from tests.live.live_shards import Shards, Worker, all_well, serving

pytestmark = pytest.mark.usefixtures("last_words")


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))


def started(shards: Shards, model: nn.Module) -> Worker:
    return Worker(shards, 0, model, torch.optim.SGD(model.parameters(), lr=0.1), overlap=False)


def step(worker: Worker) -> None:
    worker.optimizer.zero_grad()
    worker.model(torch.ones(4, 64) * torch.arange(4.0)[:, None]).sum().backward()
    worker.optimizer.step()


@pytest.mark.parametrize("transport", ["tcp", "auto"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_it_is_refused_by_name(tmp_path: Path, transport: str, mode: str, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path, workers=1, mode=mode, transport=transport) as shards:
        worker = started(shards, build())

        worker.attach()
        step(worker)
        step(worker)
        worker.model.get_parameter("2.weight").data.clamp_(-0.001, 0.001)
        with pytest.raises(SystemExit) as ended:
            step(worker)
        assert ended.value.code == contract.EXIT_REFUSED
        worker.die()
        said = capfd.readouterr().err
        assert "parameter 2.weight was changed by hand after step 2 (a value was" in said
        assert "put them back before a step, or set training.updateAt: worker" in said


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_what_is_put_back_is_no_change(tmp_path: Path, transport: str) -> None:
    with serving(tmp_path, workers=1, transport=transport) as shards:
        model, plain = build(), build()
        worker = started(shards, model)

        def act(worker: Worker) -> None:
            average = copy.deepcopy(model)
            for number in range(4):
                step(worker)
                pairs = list(zip(model.parameters(), average.parameters(), strict=True))
                if number % 2:
                    for p, kept in pairs:
                        p.data, kept.data = kept.data, p.data
                    model(torch.ones(2, 64))
                    for p, kept in pairs:
                        p.data, kept.data = kept.data, p.data
                else:
                    there = copy.deepcopy(model.state_dict())
                    model.load_state_dict(average.state_dict())
                    model.load_state_dict(there)

        all_well([worker], act)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(4):
        reference.zero_grad()
        plain(torch.ones(4, 64) * torch.arange(4.0)[:, None]).sum().backward()
        reference.step()
    for p, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p, wanted, atol=1e-6)


def test_a_step_that_was_interrupted_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, workers=1) as shards:
        worker = started(shards, build())

        def act(worker: Worker) -> None:
            step(worker)
            push = type(worker.session.exchange).push

            def interrupted(*given: object, **named: object) -> None:
                push(*given, **named)  # type: ignore[arg-type]
                raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr(type(worker.session.exchange), "push", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    step(worker)
            step(worker)

        all_well([worker], act)


def test_after_the_last_step_it_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path, workers=1) as shards:
        worker = started(shards, build())

        def act(worker: Worker) -> None:
            step(worker)
            worker.model.get_parameter("0.weight").data.zero_()

        all_well([worker], act)
    assert "parameter 0.weight was changed by hand after the last step (a value was" in capfd.readouterr().err
