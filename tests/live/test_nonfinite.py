"""NaN and inf in a gradient: what training.nonFinite says becomes of the step, the same on all blocks, shards and workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from psjob.layout.blocks import Layout, TensorSpec
from psjob.modes import Push
from psjob.shard.pending import Gradient, PendingPush, PushMetadata
from psjob.shard.push_metrics import PARTS, WHOLE, NonFinitePushes, first_bad, looked_at
from psjob.shard.status_server import status
from tests.live.live_shards import Shards, Worker, all_well, serving

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
