"""Linear scaling and warm-up of the learning rate: as numbers, on digits, and in real jobs against scripts that scale by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from psjob import rules
from psjob.api.rule_choice import LrScaling
from psjob.checkpoint.final import tensors_sha256
from psjob.modes import Sync
from psjob.process.config import CheckpointConfig
from psjob.process.errors import Refused
from psjob.rules.base import Hyperparameters
from psjob.simulate import digits64
from psjob.simulate.engine import WorkerSpeeds, simulate
from psjob.simulate.training import Digits, SimulatedTraining
from tests.live.embeddings import loss_of as click_loss
from tests.live.embeddings import offloaded
from tests.live.live_shards import Rewound, Worker, all_well, serving, together
from tests.live.training import batch, build, loss_of, train_step
from tests.support.soaking import rotating

pytestmark = pytest.mark.usefixtures("last_words")
WARMUP = 5


@pytest.mark.parametrize(
    ("scaling", "factors"),
    [
        (LrScaling(4, linear=True), {0: 4, 9: 4}),
        (LrScaling(4, linear=True, warmup=10), {0: 1, 5: 2.5, 10: 4, 99: 4}),
        (LrScaling(4, warmup=10), {0: 0.25, 5: 0.625, 10: 1, 99: 1}),
        (LrScaling(1, linear=True, warmup=10), {0: 1, 5: 1}),
        (LrScaling(4), {0: 1}),
    ],
)
def test_the_rate_rises_from_a_part_to_the_whole(scaling: LrScaling, factors: dict[int, float]) -> None:
    assert {clock: scaling.factor(clock) for clock in factors} == pytest.approx(factors)
    groups = [{"lr": 0.1, "momentum": 0.9}, {"lr": 0.2, "momentum": 0.0}]
    for clock, factor in factors.items():
        told = scaling.hyperparameters(groups, clock)
        assert [group["momentum"] for group in told] == [0.9, 0.0]
        assert [group["lr"] for group in told] == pytest.approx([0.1 * factor, 0.2 * factor])


def test_backup_workers_are_not_of_the_pushes_that_make_an_update(tmp_path: Path) -> None:
    """The mean is over those that are kept, so the rate is theirs."""
    with serving(tmp_path, workers=4, shards=1, backup_workers=1, lr_scaling="linear", warmup_steps=6) as shards:
        optimizer = torch.optim.SGD(build().parameters(), lr=0.05)
        assert LrScaling.of(shards.config, optimizer) == LrScaling(3, True, 6)


def accuracy(workers: int, linear: bool) -> float:
    """Digits in sync, as many batches as one worker makes in 60 epochs; the ramp is 5 epochs long."""
    scaling = LrScaling(workers, linear, 5 * Digits.updates_per_epoch // workers if linear else 0)
    rule = rules.named("nag")
    given = digits64.protocol_hyperparameters(rule, {})

    def hyperparameters(batches: int) -> Hyperparameters:
        drops = sum(batches >= epoch * Digits.updates_per_epoch for epoch in digits64.DROPS)
        return scaling.hyperparameters([{**given, "lr": digits64.LR * 0.1**drops}], batches // workers)[0]

    work = SimulatedTraining(Digits(0), rule, hyperparameters)
    with np.errstate(all="ignore"):
        simulate(Sync(), workers, WorkerSpeeds(), digits64.PUSHES, 1000, work)
    return 100 * work.score()


def test_scaling_keeps_the_accuracy_that_larger_batches_cost() -> None:
    """Row B4: unscaled 98.2, 96.2, 92.8 and 84.2 % with 1, 16, 32 and 64 workers; scaled 98.3, 98.2, 97.6 and 96.8."""
    alone = accuracy(1, False)
    assert alone > 97
    assert accuracy(64, False) < alone - 8
    assert accuracy(64, True) > alone - 2.5


@pytest.mark.rotating
@pytest.mark.parametrize(("workers", "lost"), [(16, 1), (32, 1.5)])
def test_scaling_keeps_the_accuracy_of_smaller_batches_too(workers: int, lost: float) -> None:
    alone = accuracy(1, True)
    assert alone == accuracy(1, False) and accuracy(workers, True) > alone - lost


def scheduled(worker: Worker, scheduler: Any, loss: Callable[[int], torch.Tensor], seen: list[float]) -> None:
    for step in range(12):
        worker.optimizer.zero_grad()
        loss(step).backward()
        worker.optimizer.step()
        scheduler.step()
        seen.append(worker.optimizer.param_groups[0]["lr"])


def by_hand(scaling: LrScaling) -> Callable[[int], float]:
    return lambda step: scaling.factor(step) * 0.8**step


MAKES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (build, lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9), {}),
    "overlap": (build, lambda m: torch.optim.Adam(m.parameters(), lr=0.01), {"overlap": True}),
    "at the workers": (build, lambda m: torch.optim.RMSprop(m.parameters(), lr=0.005), {}),
    "rows": (offloaded, lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05), {}),
}


@pytest.mark.parametrize(
    ("name", "linear"),
    [
        ("sgd", True), ("overlap", False), ("rows", True),
        rotating("sgd", False), rotating("overlap", True), rotating("at the workers", True), rotating("at the workers", False),
        rotating("rows", False),
    ],
)  # fmt: skip
def test_a_job_that_scales_is_bit_equal_to_a_script_that_does(tmp_path: Path, name: str, linear: bool) -> None:
    """Both have a scheduler, and the one whose job scales does not see it."""
    make, optimize, options = MAKES[name]
    scaling = LrScaling(3, linear, WARMUP)

    def train(folder: Path, own: bool) -> tuple[str, list[float]]:
        asked = {} if own else {"lr_scaling": "linear" if linear else "none", "warmup_steps": WARMUP}
        seen: list[float] = []
        with serving(folder, workers=3, shards=2, **asked) as shards:
            models = [make() for _ in range(3)]
            workers = [Worker(shards, rank, model, optimize(model), **options) for rank, model in enumerate(models)]

            def act(worker: Worker) -> None:
                factor = by_hand(scaling) if own else (lambda step: 0.8**step)
                scheduler = torch.optim.lr_scheduler.LambdaLR(worker.optimizer, factor)
                compute = click_loss if name == "rows" else (lambda m, step, rank: loss_of(m, batch(step, rank)))
                scheduled(worker, scheduler, lambda step: compute(worker.model, step, worker.rank), seen if worker.rank == 0 else [])

            all_well(workers, act)
            assert shards.wait_ended() == [0, 0]
        from safetensors.torch import load_file

        final = load_file(folder / "run-1" / "final.safetensors")
        return tensors_sha256([final[key] for key in sorted(final)]), seen

    mine, lr = train(tmp_path / "job", False)
    theirs, scaled = train(tmp_path / "hand", True)
    assert mine == theirs
    start = MAKES[name][1](make()).param_groups[0]["lr"]
    assert lr == pytest.approx([start * 0.8 ** (step + 1) for step in range(12)]) and lr != scaled


def test_a_worker_that_comes_back_has_the_rate_of_its_clock(tmp_path: Path) -> None:
    """It dies in the ramp; nothing of the ramp is in its record."""
    often = CheckpointConfig(interval_seconds=3600.0, every_steps=2, keep=3, disabled=False, resume_from=None)
    asked: list[Any] = []

    def train(folder: Path, dies: bool) -> str:
        with serving(folder, workers=1, shards=1, checkpoint=often, warmup_steps=8, lr_scaling="linear") as shards:
            model = build()
            worker = Worker(shards, 0, model, torch.optim.SGD(model.parameters(), lr=0.05))
            worker.job.lr = LrScaling(4, True, 8)

            def act(one: Worker) -> None:
                for step in range(12):
                    if dies and one is worker and step == 5:
                        one.die()
                        raise Rewound(1)
                    train_step(one, step, 0)

            (ended,) = together([worker], act)
            if dies:
                assert isinstance(ended, Rewound)
                again = build()
                second = Worker(shards, 0, again, torch.optim.SGD(again.parameters(), lr=0.05), start=2)
                second.job.lr = LrScaling(4, True, 8)
                all_well([second], act)
                worker = second
            asked.append(worker.session.clock)
            return str(tensors_sha256(worker.model.parameters()))

    assert train(tmp_path / "a", True) == train(tmp_path / "b", False)
    assert asked == [12, 12]


def test_an_optimizer_without_a_rate_is_refused_where_one_is_to_be_scaled(tmp_path: Path) -> None:
    class Odd(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"rate": 0.1})

        def step(self, closure: Any = None) -> None:
            """Nothing."""

    with serving(tmp_path, workers=1, shards=1, warmup_steps=3) as shards:
        model = build()
        with pytest.raises(Refused, match="warmupSteps change lr, and Odd has none in its parameter groups; leave both out"):
            Worker(shards, 0, model, Odd(model.parameters()))
