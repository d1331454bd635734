"""Attached optimizers against real shards in this process: what torch does alone, many workers do together.

- Reductions on real shards in this process: what the pushes of a clock come to, and what is refused.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import psjob as ps
from psjob.checkpoint.final import tensors_sha256
from psjob.contract import EXIT_REFUSED
from psjob.process.config import CompressionConfig
from psjob.worker.exits import SessionEnd
from tests.live.live_shards import Worker, all_well, aside, serving, together
from tests.live.training import OPTIMIZERS, batch, build, loss_of, one_inf, plain, steps, train_step
from tests.support.reference import reference
from tests.support.soaking import rotating

pytestmark = pytest.mark.usefixtures("last_words")


@pytest.mark.parametrize("name", [name if name in ("adam", "groups", "rmsprop") else rotating(name) for name in sorted(OPTIMIZERS)])
def test_three_workers_and_two_shards_are_near_plain_torch(tmp_path: Path, name: str) -> None:
    """RMSprop and others without a rule step on the workers, on the reduced gradient."""
    make = OPTIMIZERS[name]
    with serving(tmp_path, workers=3, shards=2) as shards:
        workers = [Worker(shards, rank, model, make(model)) for rank, model in enumerate(build() for _ in range(3))]
        held: dict[int, dict[str, Any]] = {}

        def act(worker: Worker) -> None:
            steps(12)(worker)
            held[worker.rank] = worker.optimizer.state_dict()

        all_well(workers, act)
        assert shards.wait_ended() == [0, 0]
        model, optimizer = plain(make, 12, 3)
        for worker in workers:
            for mine, theirs in zip(worker.model.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
        same_state(held[0], optimizer.state_dict())


def same_state(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """state_dict of an attached optimizer is torch's: same keys, same numbers, state within rounding."""
    assert mine["param_groups"] == theirs["param_groups"]
    assert set(mine["state"]) == set(theirs["state"])
    for row, entry in theirs["state"].items():
        kept = {key: value for key, value in entry.items() if value is not None}
        assert {key for key, value in mine["state"][row].items() if value is not None} == set(kept)
        for key, value in kept.items():
            torch.testing.assert_close(mine["state"][row][key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("transport", ["auto", rotating("tcp")])
def test_the_order_of_arrival_changes_no_bit(tmp_path: Path, transport: str) -> None:
    """Sums run in rank order whoever comes first; also against the oracle."""
    hashes = set()
    for seed in range(4):
        folder = tmp_path / str(seed)
        with serving(folder, workers=4, shards=1 + seed % 3, transport=transport) as shards:
            workers = [Worker(shards, rank, model, OPTIMIZERS["nesterov"](model)) for rank, model in enumerate(build() for _ in range(4))]
            all_well(workers, lambda worker, seed=seed: steps(10, random.Random(10 * seed + worker.rank))(worker))  # type: ignore[misc]
            hashes |= {tensors_sha256(worker.model.parameters()) for worker in workers}
    model = build()
    hyperparameters = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}
    reference(model, "sgd", [hyperparameters], lambda step: [batch(step, rank) for rank in range(4)], loss_of, 10)
    assert hashes == {tensors_sha256(model.parameters())}


@pytest.mark.parametrize("name", ["adamw", "rmsprop"])
def test_a_parameter_without_a_gradient_anywhere_is_left_alone(tmp_path: Path, name: str) -> None:
    """None on all workers: no update, no decay, no step counted; None on some counts as zero. Whoever steps, shard or worker."""

    def act(worker: Worker) -> None:
        for step in range(5):
            worker.optimizer.zero_grad(set_to_none=True)
            loss_of(worker.model, batch(step, worker.rank)).backward()
            worker.model[0].bias.grad = None
            if worker.rank == 1:
                worker.model[4].bias.grad = None
            worker.optimizer.step()
        held[worker.rank] = worker.optimizer.state_dict()

    held: dict[int, dict[str, Any]] = {}
    with serving(tmp_path, workers=2, shards=2) as shards:
        workers = [Worker(shards, rank, model, OPTIMIZERS[name](model)) for rank, model in enumerate(build() for _ in range(2))]
        all_well(workers, act)
    assert torch.equal(workers[0].model[0].bias, build()[0].bias)
    assert not torch.equal(workers[0].model[4].bias, build()[4].bias)
    assert 1 not in held[0]["state"] and set(held[0]["state"]) == {0, 2, 3, 4, 5}


@pytest.mark.parametrize("name", ["nesterov", "rmsprop"])
def test_one_workers_inf_skips_the_step_for_all(tmp_path: Path, name: str) -> None:
    """A GradScaler on each worker; clocks stay together and every model is the same, as is torch's that never made the step."""
    scales: dict[int, float] = {}
    with serving(tmp_path, workers=2, shards=2) as shards:
        workers = [Worker(shards, rank, model, OPTIMIZERS[name](model)) for rank, model in enumerate(build() for _ in range(2))]
        all_well(workers, one_inf(scales))
    assert scales[1] == 512.0
    assert [worker.session.clock for worker in workers] == [6, 6]
    assert tensors_sha256(workers[0].model.parameters()) == tensors_sha256(workers[1].model.parameters())
    model = build()
    optimizer = OPTIMIZERS[name](model)
    for step in (0, 1, 3, 4, 5):
        optimizer.zero_grad()
        for rank in range(2):
            (loss_of(model, batch(step, rank)) / 2).backward()
        optimizer.step()
    for mine, theirs in zip(workers[0].model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


def test_a_worker_that_leaves_early_is_absent_from_then_on(tmp_path: Path) -> None:
    """The other continues alone: the divisor is 1 from the leaver's clock on."""
    with serving(tmp_path, workers=2, shards=2) as shards:
        workers = [Worker(shards, rank, model, OPTIMIZERS["sgd"](model)) for rank, model in enumerate(build() for _ in range(2))]
        all_well(workers, lambda worker: steps(4 if worker.rank else 9)(worker))
        assert shards.wait_ended() == [0, 0]
    model = build()
    reference(model, "sgd", [{"lr": 0.05}], lambda s: [batch(s, 0), batch(s, 1) if s < 4 else None], loss_of, 9)
    assert tensors_sha256(workers[0].model.parameters()) == tensors_sha256(model.parameters())


@pytest.mark.parametrize("transport", [rotating("auto"), "tcp"])
def test_a_broken_stream_is_mended_and_nothing_counts_twice(tmp_path: Path, transport: str) -> None:
    """Streams are cut under both workers again and again; the weights are those of the quiet run."""
    with serving(tmp_path, workers=2, shards=2, transport=transport) as shards:
        chance = random.Random(1)

        def act(worker: Worker) -> None:
            for step in range(30):
                if chance.random() < 0.5:
                    worker.session.links[chance.randrange(2)].close()
                train_step(worker, step)

        workers = [Worker(shards, rank, model, OPTIMIZERS["adam"](model)) for rank, model in enumerate(build() for _ in range(2))]
        all_well(workers, act)
        assert [server.store.counters.applied for server in shards.servers] == [60, 60]
    model = build()
    reference(model, "adam", [{"lr": 0.01}], lambda step: [batch(step, rank) for rank in range(2)], loss_of, 30)
    assert tensors_sha256(workers[0].model.parameters()) == tensors_sha256(model.parameters())


def test_another_model_on_one_rank_is_refused_by_its_first_tensor(tmp_path: Path, last_words: Path) -> None:
    with serving(tmp_path, workers=2, shards=1) as shards:
        first, other = build(), build(width=41)
        Worker(shards, 0, first, OPTIMIZERS["sgd"](first)).attach()
        (error,) = together([Worker(shards, 1, other, OPTIMIZERS["sgd"](other))], steps(1))
        assert isinstance(error, SystemExit) and error.code == 77
    assert "parameter 0 is 0.weight [41, 12]" in last_words.read_text() and "the job's is 0.weight [40, 12]" in last_words.read_text()


def test_a_graph_from_before_a_step_is_refused_as_torch_does(tmp_path: Path) -> None:
    """The weights it saved are not those of its forward any more."""

    def act(worker: Worker) -> None:
        loss = loss_of(worker.model, batch(0, 0))
        loss.backward(retain_graph=True)
        worker.optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    with serving(tmp_path, workers=1, shards=2) as shards:
        model = build(200)
        all_well([Worker(shards, 0, model, OPTIMIZERS["sgd"](model))], act)


WORKERS, STEPS, SIZE = 4, 6, 3000


def spread(pushes: list[torch.Tensor]) -> torch.Tensor:
    whole = torch.stack(pushes)
    return whole.amax(0) - whole.amin(0)


def breaks_later(pushes: list[torch.Tensor]) -> torch.Tensor:
    if len(pushes) > 1 and float(pushes[0][0]) == 3.0 and len(pushes[0]) > 4:
        sys.exit("these are odd pushes")
    return pushes[0] + 0


OWN = f"{__name__}:spread"
ORACLES: dict[str, Callable[[Any], Any]] = {
    "mean": lambda pushes: pushes.sum(0) * np.float32(1 / len(pushes)),
    "sum": lambda pushes: pushes.sum(0),
    "median": lambda pushes: np.median(pushes, axis=0),
    "trimmed_mean": lambda pushes: np.sort(pushes, axis=0)[len(pushes) // 4 : len(pushes) - len(pushes) // 4].mean(0, dtype=np.float32),
    OWN: lambda pushes: pushes.max(0) - pushes.min(0),
}


TRANSPORTS = ("auto", "tcp")
WAYS, NAMES = ("update on the worker", "bf16", "early leavers"), ("sum", OWN)


def divided(quick: Set[tuple[str, str]], first: Iterable[str], second: Iterable[str]) -> list[Any]:
    """All pairs; those that are not `quick` are left to `make soak`."""
    return [pytest.param(*pair) if pair in quick else rotating(*pair) for pair in itertools.product(first, second)]


def gradient(step: int, rank: int) -> Any:
    """Whole numbers, in which every sum is exact."""
    return np.random.default_rng([step, rank]).integers(-50, 50, SIZE).astype(np.float32)


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))


def workers_of(shards: Any, count: int = WORKERS, make: Any = torch.optim.SGD) -> list[Worker]:
    return [Worker(shards, rank, model, make(model.parameters(), lr=1.0)) for rank, model in enumerate(Vector() for _ in range(count))]


def pushing(last: Sequence[int] = (STEPS,) * WORKERS, seed: int | None = None) -> Callable[[Worker], None]:
    """Each rank pushes its gradients up to its last step."""

    def act(worker: Worker) -> None:
        chance = random.Random(f"{seed}-{worker.rank}")
        for step in range(last[worker.rank]):
            if seed is not None:
                time.sleep(chance.random() * 0.004)
            worker.model.weight.grad = torch.from_numpy(gradient(step, worker.rank))
            worker.optimizer.step()

    return act


def expected(name: str, last: Sequence[int] = (STEPS,) * WORKERS) -> Any:
    """Weights after plain gradient descent on what numpy makes of the pushes."""
    weights = np.zeros(SIZE, dtype=np.float32)
    for step in range(max(last)):
        weights -= ORACLES[name](np.stack([gradient(step, rank) for rank, until in enumerate(last) if step < until])).astype(np.float32)
    return weights


@pytest.mark.parametrize(
    ("name", "transport"), divided({(name, TRANSPORTS[at % 2]) for at, name in enumerate(ORACLES)}, ORACLES, TRANSPORTS)
)
def test_whole_numbers_come_to_the_same_bits_whoever_comes_first(tmp_path: Path, name: str, transport: str) -> None:
    with serving(tmp_path, workers=WORKERS, shards=2, reduction=name, transport=transport) as shards:
        workers = workers_of(shards)
        all_well(workers, pushing(seed=TRANSPORTS.index(transport)))
    assert all(np.array_equal(worker.model.weight.detach().numpy(), expected(name)) for worker in workers)


@pytest.mark.parametrize(("way", "name"), divided(set(zip(WAYS, NAMES * 2, strict=False)), WAYS, NAMES))
def test_reductions_hold_whatever_else_a_job_has(tmp_path: Path, way: str, name: str) -> None:
    last = (STEPS, 4, STEPS - 1, 4) if way == "early leavers" else (STEPS,) * WORKERS
    options: dict[str, Any] = {"compression": CompressionConfig(push="bf16")} if way == "bf16" else {}
    if way == "update on the worker":
        options["update_at"] = "worker"
    with serving(tmp_path, workers=WORKERS, shards=2, reduction=name, **options) as shards:
        workers = workers_of(shards)
        all_well(workers, pushing(last))
    assert np.array_equal(workers[0].model.weight.detach().numpy(), expected(name, last))


def test_rows_are_added_where_the_job_says_sum(tmp_path: Path) -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = ps.Embedding(9, 3, init="zeros", optimizer="sgd", lr=1.0)

    held: dict[tuple[str, int], torch.Tensor] = {}

    def act(worker: Worker) -> None:
        for _ in range(2):
            worker.optimizer.zero_grad()
            worker.model.rows(torch.arange(worker.rank, 6)).sum().backward()
            worker.optimizer.step()
        with torch.no_grad():
            held[(name, worker.rank)] = worker.model.rows(torch.arange(9))[:, 0]

    for name in ("mean", "sum"):
        (folder := tmp_path / name).mkdir()
        with serving(folder, workers=4, shards=2, reduction=name) as shards:
            models = [Rows() for _ in range(4)]
            all_well([Worker(shards, rank, m, torch.optim.SGD(m.parameters(), lr=1.0)) for rank, m in enumerate(models)], act)
    naming = torch.tensor([1.0, 2, 3, 4, 4, 4, 0, 0, 0])
    assert all(torch.equal(held[("sum", rank)], -2 * naming) and torch.equal(held[("mean", rank)], -2 * naming / 4) for rank in range(4))


def test_a_reduction_that_fails_ends_the_job_with_its_sentence(tmp_path: Path) -> None:
    with serving(tmp_path, workers=2, shards=1, reduction=f"{__name__}:breaks_later") as shards:
        workers = workers_of(shards, 2)
        for starting in [aside(worker.attach) for worker in workers]:
            starting.join(20)
        for step in (1.0, 3.0):
            for worker in workers:
                worker.model.weight.grad = torch.full((SIZE,), step)
            pushes = [aside(worker.optimizer.step) for worker in workers]
            if step == 1.0:
                assert [push.join(20) for push in pushes] == [None, None] and workers[0].session.clock == 1
        assert shards.wait_ended() == [EXIT_REFUSED]
        words = shards.servers[0].termination_message["error"]
        for worker, push in zip(workers, pushes, strict=True):
            worker.session._end(SessionEnd("lost"))
            push.join(20)
    assert (
        words.startswith("step 1 of block 0: ")
        and "breaks_later failed on 2 pushes of float32 [1024]: SystemExit: these are odd pushes" in words
    )


class Both(Vector):
    def __init__(self) -> None:
        super().__init__()
        self.rows = ps.Embedding(9, 3)


@pytest.mark.parametrize(
    ("options", "model", "words"),
    [
        ({"compression": CompressionConfig(push="topk")}, Vector, "most elements may be left out; take compression none, bf16"),
        ({}, Both, "does not go with rows of rows on the shards: .*; take mean or sum"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, last_words: Path, options: dict[str, Any], model: Any, words: str) -> None:
    from psjob.process.errors import Refused

    with serving(tmp_path, workers=1, shards=1, reduction="median", **options) as shards, pytest.raises(Refused, match=words):
        made = model()
        Worker(shards, 0, made, torch.optim.SGD(made.parameters(), lr=1.0))
