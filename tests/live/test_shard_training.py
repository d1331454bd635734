"""Attached optimizers against real shards in this process: what torch does alone, many workers do together."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psjob.checkpoint.final import tensors_sha256
from tests.live.live_shards import Worker, all_well, serving, together
from tests.live.training import OPTIMIZERS, batch, build, loss_of, one_inf, plain, steps
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
        folder.mkdir()
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


def test_async_takes_every_push_once(tmp_path: Path) -> None:
    """SGD with a constant gradient: the order of pushes does not matter, so the sum is exact."""

    def act(worker: Worker) -> None:
        for _ in range(20):
            for p in worker.model.parameters():
                p.grad = torch.full_like(p, -1.0)
            worker.optimizer.step()

    with serving(tmp_path, workers=3, shards=2, mode="async") as shards:
        models = [nn.Linear(40, 40) for _ in range(3)]
        for p in models[0].parameters():
            torch.nn.init.zeros_(p)
        workers = [Worker(shards, rank, model, torch.optim.SGD(model.parameters(), lr=1.0)) for rank, model in enumerate(models)]
        all_well(workers, act)
        assert shards.wait_ended() == [0, 0]
        counters = [server.store.counters for server in shards.servers]
        assert [(c.applied, c.duplicates, c.lost) for c in counters] == [(60, 0, 0), (60, 0, 0)]
    from safetensors.torch import load_file

    final = load_file(tmp_path / "run-1" / "final.safetensors")
    assert all(torch.equal(tensor, torch.full_like(tensor, 60.0)) for tensor in final.values())


@pytest.mark.parametrize("transport", [rotating("auto"), "tcp"])
def test_a_broken_stream_is_mended_and_nothing_counts_twice(tmp_path: Path, transport: str) -> None:
    """Streams are cut under both workers again and again; the weights are those of the quiet run."""
    with serving(tmp_path, workers=2, shards=2, transport=transport) as shards:
        chance = random.Random(1)

        def act(worker: Worker) -> None:
            for step in range(30):
                if chance.random() < 0.5:
                    worker.session.links[chance.randrange(2)].close()
                worker.optimizer.zero_grad()
                loss_of(worker.model, batch(step, worker.rank)).backward()
                worker.optimizer.step()

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
