"""A worker with a valid key that says what its config does not: shards go by the config."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psjob import rules
from psjob.protocol.coordinator import events
from psjob.shard import coordinator_driver
from psjob.shard.checks import info_of, rule_problem
from psjob.shard.status_server import status
from psjob.wire.frame import Kind, WireError
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


def test_the_manifests_rule_and_its_numbers_hold_whatever_a_worker_says(tmp_path: Path) -> None:
    with serving(tmp_path, mode="async", update_rule="dc-asgd", rule_options={"lam": 0.5}, shards=1, workers=1) as shards:
        worker = pair_of_workers(shards)[0]
        together([worker], steps(lambda rank: 1.0, made=1))
        store = shards.servers[0].store
        group = {**rules.named("dc-asgd").hyperparameters, "lr": LR, "lam": 1e30}
        (taken,) = info_of(store, 0, {"hyperparameters": [group], "none": []}).hyperparameters
        assert taken["lam"] == 0.5 and taken["lr"] == LR


@pytest.mark.parametrize(
    ("config", "said", "problem"),
    [
        ({"mode": "async", "update_rule": "dc-asgd"}, "sgd", "the manifest says dc-asgd"),
        ({"mode": "async", "update_rule": "dc-asgd"}, "dc-asgd", None),
        ({"mode": "local"}, "sgd", "the manifest says outer-nesterov"),
        ({"update_at": "server"}, "reduce", "updateAt: server"),
        ({"update_at": "worker"}, "reduce", None),
        ({}, "adam", None),
    ],
)
def test_a_hello_names_the_manifests_rule(tmp_path: Path, config: dict[str, str], said: str, problem: str | None) -> None:
    with serving(tmp_path, shards=1, **config) as shards:
        found = rule_problem(shards.config, 0, said)
    assert found is None if problem is None else problem in str(found)


def test_a_push_is_based_on_no_weights_that_are_to_come(tmp_path: Path) -> None:
    """Its staleness would be below 0, and a push that is always newest is never dropped."""
    with serving(tmp_path, mode="threshold", shards=1, workers=1, transport="tcp") as shards:
        worker = pair_of_workers(shards)[0]
        seen: list[int | None] = []
        exchange = worker.session.exchange

        def act(worker: Worker) -> None:
            cells = shards.servers[0].store.cells.values()
            for cell in cells:
                apply = cell._apply
                cell._apply = lambda batch, lag, weights=None, apply=apply: (seen.append(lag), apply(batch, lag, weights))[1]  # type: ignore
            claimed = dict.fromkeys(exchange.versions, (1, 1 << 40))
            exchange.versions.update(claimed)
            steps(lambda rank: 1.0, made=1)(worker)

        all_well([worker], act)
    assert seen and all(lag == 0 for lag in seen)


@pytest.mark.parametrize("kind", [Kind.STEP_LOST, Kind.MEASURED])
def test_a_job_without_stages_hears_nothing_of_stages(tmp_path: Path, kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
    """A lost step of a stage sends all workers back to the last checkpoint."""
    with serving(tmp_path, shards=1) as shards:
        workers = pair_of_workers(shards)

        def act(worker: Worker) -> None:
            if worker.rank == 1:
                worker.session.links[0].send_json(worker.session.header(kind), {"rank": 0, "step": 0})
                assert eventually(lambda: shards.servers[0].bad_connections > 0)
            steps(lambda rank: 1.0)(worker)

        all_well(workers, act)
        assert f"sends {kind.name}, and this job has no stages" in caplog.text


def test_what_a_worker_reports_waits_at_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a flood of it would take the memory of shard 0: to send a word costs less than to hear it."""
    monkeypatch.setattr(coordinator_driver, "MOST_UNHEARD", 40)
    with serving(tmp_path, shards=1, transport="tcp") as shards:
        coordinator = shards.servers[0].coordinator
        assert coordinator is not None
        most, heard, feed = [0], [0], coordinator.feed

        def slowly(event: Any) -> None:
            most[0] = max(most[0], coordinator.pending.qsize())
            if isinstance(event, events.Reported):
                heard[0] += 1
                time.sleep(0.001)
            feed(event)

        monkeypatch.setattr(coordinator, "feed", slowly)

        def act(worker: Worker) -> None:
            for number in range(300 if worker.rank == 1 else 0):
                worker.session.links[0].send_json(worker.session.header(Kind.REPORT), {"flood": float(number)})
            steps(lambda rank: 1.0)(worker)

        all_well(pair_of_workers(shards), act)
        assert heard[0] == 300, "all of it is heard"
        assert 0 < most[0] < 60


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
        assert ended and any("worker 1's gradient of" in str(server.termination_message.get("error")) for server in shards.servers)
        assert all(p.isfinite().all() for worker in workers for p in worker.model.parameters())
