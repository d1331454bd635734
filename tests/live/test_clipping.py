"""One norm over the gradients of two optimizers of a model: the numbers of one process, and steps that are left out.

- Clipping by the norm of a gradient that is larger than a worker's credit: no block is answered before all have come.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from psjob import contract
from psjob.api.attach import take_over
from psjob.api.attachable import Pair
from psjob.api.clipping import joint
from psjob.api.training_job import TrainingJob
from psjob.worker import exchange
from psjob.worker.exchange import GradientClip
from tests.live.live_shards import Shards, Worker, all_well, serving

pytestmark = pytest.mark.usefixtures("last_words")


LIMIT = 0.05


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))


def two(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, others = ([p for p in model.parameters() if (p.ndim == 2) == wanted] for wanted in (True, False))
    return [torch.optim.SGD(matrices, lr=0.5, momentum=0.9), torch.optim.SGD(others, lr=0.2, momentum=0.5)]


class Two(Worker):
    """Of a model with two optimizers."""

    def __init__(self, shards: Shards, rank: int) -> None:
        self.rank, self.model = rank, build()
        pairs = tuple(Pair("", self.model, optimizer) for optimizer in two(self.model))
        self.job = TrainingJob(shards.place(rank), pairs, {}, False)
        self.session = self.job.session
        shards.guests.append(self)

    def attach(self) -> None:
        self.job.join()
        for pair in self.job.pairs:
            take_over(self.job, pair)

    def backward(self, number: int) -> None:
        """Of a step whose gradients are this rank's."""
        for pair in self.job.pairs:
            pair.optimizer.zero_grad()
        loss(self.model, number, self.rank).backward()
        self.job.clipping.ask(joint(self.job.pairs, list(self.model.parameters())), GradientClip(norm=LIMIT))


def loss(model: nn.Module, number: int, rank: int) -> torch.Tensor:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(2 * number + rank))
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def alone(steps: int) -> nn.Module:
    model = build()
    optimizers = two(model)
    for number in range(steps):
        model.zero_grad()
        ((loss(model, number, 0) + loss(model, number, 1)) / 2).backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), LIMIT) > LIMIT
        for optimizer in optimizers:
            optimizer.step()
    return model


@pytest.mark.parametrize("update_at", ["server", "worker"])
def test_one_norm_clips_the_gradients_of_two_optimizers(tmp_path: Path, update_at: str) -> None:
    with serving(tmp_path, update_at=update_at) as shards:
        workers = [Two(shards, rank) for rank in range(2)]

        def act(worker: Worker) -> None:
            assert isinstance(worker, Two)
            worker.attach()
            for number in range(4):
                worker.edge(number)
                worker.backward(number)
                for pair in worker.job.pairs:
                    pair.optimizer.step()

        all_well(workers, act)
        for worker in workers:
            for p, wanted in zip(worker.model.parameters(), alone(4).parameters(), strict=True):
                assert torch.allclose(p, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("left out", "SGD was clipped by one norm with another optimizer, which made its step, and SGD made none"),
        ("cleared", "was changed or cleared between the step of another optimizer and its own"),
        ("end", "clip each by its own parameters"),
    ],
)
def test_steps_that_do_not_follow_are_refused(tmp_path: Path, spoil: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path, workers=1, update_at="worker") as shards:
        worker = Two(shards, 0)
        worker.attach()
        first, second = (pair.optimizer for pair in worker.job.pairs)
        worker.edge(0)
        worker.backward(0)
        first.step()
        with pytest.raises(SystemExit) as ended:
            if spoil == "left out":
                first.step()
            elif spoil == "cleared":
                second.zero_grad()
                second.step()
            else:
                worker.job.leave()
        assert ended.value.code == contract.EXIT_REFUSED
        worker.die()
        assert said in capfd.readouterr().err


@pytest.mark.parametrize("update_at", ["server", "worker"])
@pytest.mark.parametrize("limits", [(LIMIT, 1.0), (1.0, LIMIT)])
def test_gradients_that_are_clipped_twice_have_the_smaller_norm(tmp_path: Path, update_at: str, limits: tuple[float, float]) -> None:
    with serving(tmp_path, workers=1, update_at=update_at) as shards:
        model = build()
        worker = Worker(shards, 0, model, torch.optim.SGD(model.parameters(), lr=1.0))
        plain = build()
        optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)

        def clipped(which: nn.Module, norm: float) -> None:
            nn.utils.clip_grad_norm_(which.parameters(), norm)

        def act(worker: Worker) -> None:
            for number in range(3):
                worker.edge(number)
                plain.zero_grad()
                worker.optimizer.zero_grad()
                loss(plain, number, 0).backward()
                loss(model, number, 0).backward()
                if number == 1:  # gradients that no step is made of are no matter of the next one
                    worker.job.clipping._clip(list(model.parameters()), "clip", GradientClip(norm=LIMIT / 10))
                    worker.optimizer.zero_grad()
                    loss(model, number, 0).backward()
                for limit in limits:
                    clipped(plain, limit)
                    worker.job.clipping._clip(list(model.parameters()), "clip", GradientClip(norm=limit))
                worker.optimizer.step()
                optimizer.step()

        all_well([worker], act)
        for p, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(p, wanted, rtol=1e-5, atol=1e-6)


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
