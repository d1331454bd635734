"""A worker with a valid key that says what its config does not: shards go by the config."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from psjob.shard.checks import info_of
from psjob.shard.statusport import status
from psjob.wire.frame import WireError
from psjob.worker.clip import Clip
from psjob.worker.session import WorkerSession
from tests.live.live_shards import SECONDS, Shards, Worker, all_well, eventually, serving, together

LR, LIMIT, STEPS = 0.1, 0.5, 3


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 8, bias=False))


def pair_of_workers(shards: Shards) -> list[Worker]:
    made = [model(), model()]
    return [Worker(shards, rank, each, torch.optim.SGD(each.parameters(), lr=LR)) for rank, each in enumerate(made)]


def moved(worker: Worker) -> float:
    """By how much the weights have moved from the initial ones, all together."""
    changes = [(p.detach() - q.detach()).flatten() for p, q in zip(worker.model.parameters(), model().parameters(), strict=True)]
    return float(torch.cat(changes).norm())


def steps(gradient: Callable[[int], float], made: int = STEPS) -> Callable[[Worker], None]:
    def act(worker: Worker) -> None:
        for _ in range(made):
            for p in worker.model.parameters():
                p.grad = torch.full_like(p, gradient(worker.rank))
            worker.optimizer.step()

    return act


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("told", [Clip(), Clip(norm=1e9), Clip(value=1e9)], ids=["nothing", "a larger norm", "a value"])
def test_the_manifests_norm_holds_whatever_a_worker_says(tmp_path: Path, told: Clip, transport: str) -> None:
    with serving(tmp_path, max_grad_norm=LIMIT, transport=transport) as shards:
        workers = pair_of_workers(shards)
        workers[0].job.clipping.take = lambda pair: told  # type: ignore[method-assign]
        all_well(workers, steps(lambda rank: 1e6 if rank == 0 else 0.0))
    assert moved(workers[1]) == pytest.approx(LR * LIMIT * STEPS, rel=1e-3)


def test_a_smaller_norm_of_the_script_holds(tmp_path: Path) -> None:
    with serving(tmp_path, max_grad_norm=LIMIT) as shards:
        workers = pair_of_workers(shards)
        for worker in workers:
            worker.job.clipping.take = lambda pair: Clip(norm=LIMIT / 5)  # type: ignore[method-assign]
        all_well(workers, steps(lambda rank: 1e6))
    assert moved(workers[1]) == pytest.approx(LR * LIMIT / 5 * STEPS, rel=1e-3)


def test_elements_are_clamped_before_the_manifests_norm(tmp_path: Path) -> None:
    with serving(tmp_path, max_grad_norm=1e5) as shards:
        workers = pair_of_workers(shards)
        for worker in workers:
            worker.job.clipping.ask(worker.job.pairs, Clip(value=0.01))
        all_well(workers, steps(lambda rank: 1e6, made=1))
    for p, q in zip(workers[1].model.parameters(), model().parameters(), strict=True):
        torch.testing.assert_close(p, q - LR * 0.01)


def test_a_worker_counts_for_as_many_processes_as_it_may_have(tmp_path: Path) -> None:
    with serving(tmp_path, processes=2) as shards:
        body = {"hyperparameters": [], "none": []}
        assert info_of(shards.servers[0].store, 1, body | {"processes": 2}).processes == 2
        with pytest.raises(WireError, match="a push of 3 processes, and a worker of this job has 2 at most"):
            info_of(shards.servers[0].store, 1, body | {"processes": 3})


def looks_at_nothing(session: WorkerSession) -> None:
    session.exchange.finite.skips = lambda grads, rows, skip: skip  # type: ignore[method-assign]


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize(("mode", "update_at"), [("sync", None), ("sync", "worker"), ("async", None)])
def test_shards_leave_out_what_a_worker_lets_pass(tmp_path: Path, mode: str, transport: str, update_at: str | None) -> None:
    with serving(tmp_path, non_finite="skip", mode=mode, transport=transport, update_at=update_at) as shards:
        workers = pair_of_workers(shards)
        looks_at_nothing(workers[1].session)
        all_well(workers, steps(lambda rank: float("nan") if rank else 1.0))
        found = status(shards.servers[0])["nonFinite"]
        assert found == {"pushes": STEPS, "worker": 1, "step": 0, "tensor": found["tensor"]}
    for worker in workers:
        assert all(p.isfinite().all() for p in worker.model.parameters())
    if mode == "sync":
        assert moved(workers[0]) == 0.0
    else:
        assert moved(workers[0]) > 0.0


def test_shards_end_a_job_that_refuses_what_a_worker_lets_pass(tmp_path: Path) -> None:
    with serving(tmp_path, non_finite="refuse") as shards:
        workers = pair_of_workers(shards)
        looks_at_nothing(workers[1].session)
        act = steps(lambda rank: float("nan") if rank else 1.0)
        training = threading.Thread(target=together, args=(workers, act), daemon=True)
        training.start()
        ended = eventually(lambda: 77 in shards.codes.values())
        for worker in workers:
            worker.die()
        training.join(SECONDS)
        assert ended and any("worker 1's gradient of" in str(server.words.get("error")) for server in shards.servers)
        assert all(p.isfinite().all() for worker in workers for p in worker.model.parameters())
