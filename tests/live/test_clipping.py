"""One norm over the gradients of two optimizers of a model: the numbers of one process, and steps that are left out.

- Clipping by the norm of a gradient that is larger than a worker's credit: no block is answered before all have come.
- NaN and inf in a gradient: what training.nonFinite says becomes of the step, the same on all blocks, shards and workers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from psjob import contract
from psjob.api.attach import take_over
from psjob.api.attachable import Pair
from psjob.api.clipping import joint
from psjob.api.training_job import TrainingJob
from psjob.layout.blocks import Layout, TensorSpec
from psjob.modes import Push
from psjob.shard.pending import Gradient, PendingPush, PushMetadata
from psjob.shard.push_metrics import PARTS, WHOLE, NonFinitePushes, first_bad, looked_at
from psjob.shard.status_server import status
from psjob.worker import exchange
from psjob.worker.exchange import GradientClip
from tests.live.live_shards import Shards, Worker, all_well, serving
from tests.live.training import push_filled

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
                push_filled(worker, 1.0)

        all_well(workers, act)
        return [p.detach() for p in models[0]]


def test_a_credit_below_the_gradient_does_not_stop_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "CREDIT", 4 * ROWS * COLUMNS)
    weights = trained(tmp_path)
    expected = -3 / (8 * ROWS * COLUMNS) ** 0.5
    for p in weights:
        assert torch.allclose(p, torch.full_like(p, expected), rtol=1e-5)


STEPS, BAD, BY = 5, 2, 1
"""Worker BY has a NaN in its gradient of step BAD."""


def model() -> nn.Module:
    """Two tensors in blocks of their own, on two shards."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 8, bias=False))


def sgd(made: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [p]} for p in made.parameters()], lr=0.1, momentum=0.5)


def training(value: float, overlap: bool = False) -> Callable[[Worker], None]:
    def act(worker: Worker) -> None:
        for step in range(STEPS):
            for number, p in enumerate(worker.model.parameters()):
                p.grad = torch.full_like(p, float(step + worker.rank + number))
                if step == BAD and worker.rank == BY and number == 1:
                    p.grad[3, 4] = value
            worker.optimizer.step()

    return act


def expected(skipped: bool) -> list[torch.Tensor]:
    made = model()
    optimizer = sgd(made)
    for step in range(STEPS):
        if step == BAD and skipped:
            continue
        for number, p in enumerate(made.parameters()):
            p.grad = (torch.full_like(p, float(step + number)) + torch.full_like(p, float(step + 1 + number))) * 0.5
        optimizer.step()
    return list(made.parameters())


def told(shards: Shards) -> list[object]:
    return [status(server)["nonFinite"] for server in shards.servers]


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("update_at", [None, "worker"])
def test_a_skipped_step_is_made_by_nobody(tmp_path: Path, transport: str, update_at: str | None) -> None:
    with serving(tmp_path, non_finite="skip", transport=transport, update_at=update_at) as shards:
        workers = [Worker(shards, rank, made, sgd(made)) for rank, made in enumerate([model(), model()])]
        all_well(workers, training(float("inf")))
        found = told(shards)
        assert found == [{"pushes": 1, "worker": BY, "step": BAD, "tensor": "1.weight"}] * 2
        sentence = status(shards.servers[0])["coordinator"]["nonFinite"]
        assert sentence == "worker 1's gradient of 1.weight held NaN or inf at step 2 and was left out (training.nonFinite is skip)"
    for worker in workers:
        for p, wanted in zip(worker.model.parameters(), expected(skipped=True), strict=True):
            assert torch.equal(p, wanted)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_what_passes_is_counted_with_its_worker(tmp_path: Path, transport: str, mode: str) -> None:
    with serving(tmp_path, transport=transport, mode=mode) as shards:
        workers = [Worker(shards, rank, made, sgd(made)) for rank, made in enumerate([model(), model()])]
        all_well(workers, training(float("nan")))
        found = told(shards)
        assert {"pushes": 1, "worker": BY, "step": BAD, "tensor": "1.weight"} in found and None in found
    weights = list(workers[BY].model.parameters())
    assert torch.isfinite(weights[0]).all(), "as in torch: a NaN stays where it was pushed"
    assert int((~torch.isfinite(weights[1])).sum()) == 1 and not torch.isfinite(weights[1][3, 4])


def test_a_refused_one_ends_the_job_with_its_name(tmp_path: Path, last_words: Path) -> None:
    with serving(tmp_path, workers=1, non_finite="refuse") as shards:
        made = model()
        worker = Worker(shards, 0, made, sgd(made))
        worker.attach()
        for p in made.parameters():
            p.grad = torch.ones_like(p)
        worker.optimizer.step()
        made[1].weight.grad[0, 0] = float("-inf")
        with pytest.raises(SystemExit) as ended:
            worker.optimizer.step()
        assert ended.value.code == 77
        assert "worker 0, step 1: the gradient of 1.weight holds NaN or inf, and training.nonFinite is refuse" in last_words.read_text()
        assert shards.servers[0].store.clocks() == {0: 1}, "nothing of it was pushed"
        worker.die()


def test_large_numbers_are_not_taken_for_inf() -> None:
    assert first_bad(torch.tensor([3e38, 3e38, 3e38])) is None
    assert first_bad(torch.tensor([60000.0] * 4, dtype=torch.float16)) is None
    assert first_bad(torch.tensor([1, 2])) is None
    assert first_bad(torch.tensor([[1.0, 2.0], [float("nan"), 3.0]])) == 2
    assert first_bad(torch.tensor([float("inf"), -float("inf")])) == 0


@pytest.mark.parametrize("elements", [WHOLE - 1, WHOLE + 1, WHOLE * PARTS + 5])
def test_each_number_is_looked_at_in_eight_updates(elements: int) -> None:
    seen = torch.zeros(elements)
    for update in range(100, 100 + PARTS):
        looked_at(seen, update).add_(1)
    assert int(seen.min()) >= 1 and int(seen.max()) == (PARTS if elements <= WHOLE else 1)


def test_the_first_push_of_a_sum_is_blamed_where_no_other_is() -> None:
    """Its memory holds the sum by then."""
    layout = Layout.of((TensorSpec("a", (64,), "float32"), TensorSpec("b", (64,), "float32")))
    block = layout.blocks[0]

    def arrived(worker: int, clock: int, bad: bool) -> PendingPush:
        grad = Gradient([], block.nbytes, block)
        grad.flat.zero_()
        if bad:
            grad.flat[70] = float("nan")
        return PendingPush(Push(worker, clock, None), grad, False, PushMetadata((), frozenset()))

    pushes = NonFinitePushes()
    pushes.names = ["a", "b"]
    for clock, who in ((0, 0), (1, 1)):
        batch = [arrived(rank, clock, rank == who) for rank in range(2)]
        first = batch[0].grad
        assert isinstance(first, Gradient)
        if who:
            first.flat[70] = float("nan")  # the sum
        pushes.blame(block, batch, first.flat)
    assert (pushes.count, pushes.first) == (2, (0, 0, "b"))
    pushes.note(1, 1, "b")
    assert pushes.count == 2, "a push counts once, however many blocks show it"
