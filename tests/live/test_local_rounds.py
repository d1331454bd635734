"""Local SGD with an outer rule against real shards in this process: the rounds of DiLoCo, to the last bit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import psjob as ps
from psjob import rules
from psjob.api import attach as attaching
from psjob.checkpoint.final import tensors_sha256
from psjob.modes import Batch
from psjob.process.config import LocalConfig
from psjob.process.errors import Refused
from psjob.protocol.coordinator import updates
from psjob.protocol.coordinator.decisions import DecisionOrder
from psjob.protocol.coordinator.state import CoordinatorState, DecisionState
from psjob.rules.base import UpdateFacts
from psjob.worker import session
from psjob.worker.session import SMALL_RECORD
from tests.live.live_shards import SECONDS, Worker, all_well, eventually, serving
from tests.live.training import OPTIMIZERS, batch, build, loss_of, plain, steps, train_step
from tests.support.covering import each_value
from tests.support.reference import local_reference
from tests.support.soaking import rotating

pytestmark = pytest.mark.usefixtures("last_words")
OUTER = LocalConfig(inner_steps=4)


def bits(model: nn.Module) -> str:
    return tensors_sha256(model.parameters())


@pytest.mark.parametrize(("name", "transport"), each_value(["adamw", "rmsprop", "groups"], ["auto", "tcp"]))
def test_rounds_are_diloco_to_the_last_bit(tmp_path: Path, name: str, transport: str) -> None:
    """Three rounds of four steps and one of two, with rules of torch's own and without one; the shards count rounds."""
    make = OPTIMIZERS[name]
    with serving(tmp_path, workers=3, shards=2, mode="local", local=OUTER, transport=transport) as shards:
        workers = [Worker(shards, rank, model, make(model)) for rank, model in enumerate(build() for _ in range(3))]
        inside: dict[int, dict[str, Any]] = {}

        def act(worker: Worker) -> None:
            steps(14)(worker)
            inside[worker.rank] = worker.optimizer.state_dict()

        all_well(workers, act)
        assert shards.wait_ended() == [0, 0]
        assert [server.store.counters.applied for server in shards.servers] == [3 * 4] * 2
        expected = local_reference(build, make, batch, loss_of, workers=3, steps=14, outer=OUTER)
        assert {bits(worker.model) for worker in workers} == {bits(expected.model)}
        for rank, optimizer in enumerate(expected.optimizers):
            theirs = optimizer.state_dict()
            assert inside[rank]["param_groups"] == theirs["param_groups"] and inside[rank]["state"].keys() == theirs["state"].keys()


def test_one_step_a_round_with_a_plain_mean_is_sync_sgd(tmp_path: Path) -> None:
    """weights - mean(weights - (weights - lr g)) is weights - lr mean(g), up to the rounding of the differences."""
    with serving(tmp_path, mode="local", local=LocalConfig(inner_steps=1, lr=1.0, momentum=0.0)) as shards:
        workers = [Worker(shards, rank, model, OPTIMIZERS["sgd"](model)) for rank, model in enumerate(build() for _ in range(2))]
        all_well(workers, steps(12))
        model, _ = plain(OPTIMIZERS["sgd"], 12, 2)
        for mine, theirs in zip(workers[0].model.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_a_step_that_a_scaler_skips_is_a_step_of_the_round(tmp_path: Path) -> None:
    """Rank 1 finds inf once: it continues alone, and its rounds end where the other's do."""
    scales: dict[int, float] = {}

    def act(worker: Worker) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        for step in range(8):
            worker.optimizer.zero_grad()
            scaler.scale(loss_of(worker.model, batch(step, worker.rank))).backward()
            if (step, worker.rank) == (2, 1):
                worker.model[0].weight.grad[0, 0] = float("inf")
            scaler.step(worker.optimizer)
            scaler.update()
        scales[worker.rank] = scaler.get_scale()

    with serving(tmp_path, mode="local", local=OUTER) as shards:
        workers = [Worker(shards, rank, model, OPTIMIZERS["adamw"](model)) for rank, model in enumerate(build() for _ in range(2))]
        all_well(workers, act)
    assert scales == {0: 1024.0, 1: 512.0}
    skipped: Callable[[int, int], Any] = lambda step, rank: None if (step, rank) == (2, 1) else batch(step, rank)  # noqa: E731
    expected = local_reference(build, OPTIMIZERS["adamw"], skipped, loss_of, workers=2, steps=8, outer=OUTER)
    assert {bits(worker.model) for worker in workers} == {bits(expected.model)}


@pytest.mark.parametrize(("steps", "rounds"), [(0, 0), (1, 1), (120, 30), (122, 31)])
def test_a_script_tells_its_total_in_steps_and_the_job_in_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, rounds: int
) -> None:
    with serving(tmp_path, workers=1, shards=1, mode="local", local=OUTER) as shards:
        coordinator = shards.servers[0].coordinator
        assert coordinator is not None

        def act(worker: Worker) -> None:
            monkeypatch.setattr(attaching, "current", worker.job)
            ps.report(total=steps, loss=2.5)
            assert eventually(lambda: "loss" in coordinator.machine.state.progress.metrics)
            monkeypatch.setattr(attaching, "current", None)

        model = build()
        all_well([Worker(shards, 0, model, OPTIMIZERS["sgd"](model))], act)
        assert coordinator.machine.state.progress.total == rounds


def test_wait_ends_a_round_for_who_reads_the_weights(tmp_path: Path) -> None:
    """Both hold the job's weights after it, and the next round is as long as any."""
    held: dict[int, list[str]] = {0: [], 1: []}

    def act(worker: Worker) -> None:
        rounds = worker.job.rounds
        assert rounds is not None
        for begin, end in ((0, 6), (6, 10)):
            for step in range(begin, end):
                train_step(worker, step)
                assert rounds.at_step == (step + 1 if begin == 0 else step + 3), "the round of two counts as a whole one"
            worker.job.wait()
            held[worker.rank].append(bits(worker.model))
            worker.job.wait()
        assert worker.session.clock == 3

    with serving(tmp_path, mode="local", local=OUTER) as shards:
        all_well([Worker(shards, rank, model, OPTIMIZERS["sgd"](model)) for rank, model in enumerate(build() for _ in range(2))], act)
    assert held[0] == held[1] and len(set(held[0])) == 2


@pytest.mark.parametrize(("quorum", "largest"), [(0, SMALL_RECORD), (2, SMALL_RECORD), (2, 0)])
def test_a_loop_of_its_own_goes_on_where_its_last_round_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quorum: int, largest: int
) -> None:
    """Rank 1 dies in its third round, after one of four steps and one of two; its successor makes those six without effect.

    With a quorum also where no record of its is at hand.
    """
    make, ends = OPTIMIZERS["sgd"], (0, 6, 14)
    monkeypatch.setattr(session, "SMALL_RECORD", largest)

    def train(worker: Worker, begin: int, end: int) -> None:
        for step in range(begin, end):
            train_step(worker, step)

    def whole(worker: Worker) -> None:
        for begin, end in pairwise(ends):
            train(worker, begin, end)
            worker.job.wait()

    with serving(tmp_path, mode="local", local=replace(OUTER, quorum=quorum)) as shards:
        coordinator = shards.servers[0].coordinator
        assert coordinator is not None
        workers = [Worker(shards, rank, model, make(model)) for rank, model in enumerate(build() for _ in range(2))]
        after: list[Worker] = []

        def act(worker: Worker) -> None:
            if worker.rank == 0:
                whole(worker)
                return
            train(worker, 0, 6)
            worker.job.wait()
            train(worker, 6, 9)
            assert eventually(lambda: not largest or 2 in coordinator.machine.state.members[1].records)
            worker.die()
            model = build()
            after.append(Worker(shards, 1, model, make(model), start=2))
            after[0].attach()
            assert (after[0].session.clock, after[0].job.replay, after[0].job.restored is None) == (2, 2, not largest)
            whole(after[0])
            worker.leave = after[0].leave  # type: ignore[method-assign]

        all_well(workers, act)
        assert workers[0].session.clock == after[0].session.clock == 4

    def cut_short(step: int, rank: int) -> Any:
        return None if step in (6, 7) else batch(step if step < 6 else step - 2, rank)

    expected = local_reference(build, make, cut_short, loss_of, workers=2, steps=16, outer=OUTER)
    assert bits(workers[0].model) == bits(after[0].model) == bits(expected.model)


def test_a_place_in_the_data_goes_on_from_the_record_of_a_round_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 dies in its third round; its record is of its second, which had two steps: no more are made without effect."""
    make = OPTIMIZERS["sgd"]

    def train(worker: Worker, begin: int, end: int) -> None:
        for step in range(begin, end):
            worker.edge(step)
            train_step(worker, step)

    def from_step(worker: Worker, begin: int) -> None:
        train(worker, begin, 6)
        worker.job.wait()
        train(worker, 6, 14)
        worker.job.wait()

    with serving(tmp_path, mode="local", local=replace(OUTER, quorum=2)) as shards:
        coordinator = shards.servers[0].coordinator
        assert coordinator is not None
        workers = [Worker(shards, rank, model, make(model)) for rank, model in enumerate(build() for _ in range(2))]

        def act(worker: Worker) -> None:
            if worker.rank == 0:
                from_step(worker, 0)
                return
            train(worker, 0, 5)
            assert eventually(lambda: 1 in coordinator.machine.state.members[1].records)
            monkeypatch.setattr(session, "SMALL_RECORD", 0)
            train(worker, 5, 6)
            worker.job.wait()
            train(worker, 6, 9)
            worker.die()
            model = build()
            after = Worker(shards, 1, model, make(model), start=2)
            after.attach()
            assert after.job.restored is not None
            cursor = after.job.restored.cursor
            assert cursor is not None and (cursor["begun"], cursor["asking"]) == (1, 0)
            assert [(one["number"], one["place"]) for one in cursor["open"]] == [(0, {"round": 4})]
            assert (after.session.clock, after.job.replay) == (2, 1)
            after.job.put_back()
            from_step(after, 4)
            worker.leave = after.leave  # type: ignore[method-assign]

        all_well(workers, act)

    def cut_short(step: int, rank: int) -> Any:
        return None if step in (6, 7) else batch(step if step < 6 else step - 2, rank)

    expected = local_reference(build, make, cut_short, loss_of, workers=2, steps=16, outer=OUTER)
    assert bits(workers[0].model) == bits(expected.model)


@pytest.mark.parametrize("kind", [{"local": replace(OUTER, quorum=1)}, {"local": OUTER, "update_rule": "delayed-nesterov"}])
def test_a_script_that_ended_its_last_round_early_comes_back_and_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any]
) -> None:
    """Its last push, of two steps, was taken; no record of it is at hand, and nothing is left to push."""
    monkeypatch.setattr(session, "SMALL_RECORD", 0)
    with serving(tmp_path, workers=1, shards=1, mode="local", **kind) as shards:
        model = build()
        worker = Worker(shards, 0, model, OPTIMIZERS["sgd"](model))

        def act(first: Worker) -> None:
            steps(6)(first)
            first.job.wait()
            first.die()
            again = build()
            after = Worker(shards, 0, again, OPTIMIZERS["sgd"](again), start=2)
            after.attach()
            assert (after.session.clock, after.job.replay) == (2, 2)
            steps(6)(after)
            first.leave = after.leave  # type: ignore[method-assign]

        all_well([worker], act)
        assert shards.wait_ended() == [0] and [server.store.counters.applied for server in shards.servers] == [2]


def test_rounds_of_delayed_nesterov_wait_for_nobody(tmp_path: Path) -> None:
    """Rank 0 makes all its rounds while rank 1 is inside its first, which counts when it comes, on weights five updates old."""
    began, ended = threading.Event(), threading.Event()

    def act(worker: Worker) -> None:
        if worker.rank == 0:
            assert began.wait(SECONDS), "rank 1 has taken the first weights"
            steps(20)(worker)
            ended.set()
            return
        began.set()
        steps(2)(worker)
        assert ended.wait(SECONDS)
        for step in (2, 3):
            train_step(worker, step)

    with serving(tmp_path, mode="local", local=OUTER, update_rule="delayed-nesterov", rule_options={"activation": 0.25}) as shards:
        all_well([Worker(shards, rank, model, OPTIMIZERS["adamw"](model)) for rank, model in enumerate(build() for _ in range(2))], act)
        assert shards.wait_ended() == [0, 0]
        assert [server.store.counters.applied for server in shards.servers] == [6, 6]
        final = load_file(shards.folder / "final.safetensors")
    rule, models = rules.named("delayed-nesterov"), [build(), build()]
    optimizers = [OPTIMIZERS["adamw"](model) for model in models]
    states = [rule.init(p.detach().clone().flatten()) for p in models[0].parameters()]
    for rank, rounds in ((0, 5), (1, 1)):
        for number in range(rounds):
            taken = [p.detach().clone() for p in models[rank].parameters()]
            for step in range(4 * number, 4 * number + 4):
                optimizers[rank].zero_grad()
                loss_of(models[rank], batch(step, rank)).backward()
                optimizers[rank].step()
            for p, before, state in zip(models[rank].parameters(), taken, states, strict=True):
                hyperparameters = {**rule.hyperparameters, "every": 2.0, "activation": 0.25}
                rule.apply(state, (before - p.detach()).flatten(), hyperparameters, UpdateFacts(worker=rank))
                p.data.copy_(state.weights.view_as(p))
    for (name, _), state in zip(models[0].named_parameters(), states, strict=True):
        torch.testing.assert_close(final[name].flatten(), state.weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize("grace", [rotating(0.0), 0.03])
def test_a_quorum_makes_the_round_and_what_is_late_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grace: float) -> None:
    """Plain SGD inside, so that a dropped round leaves nothing behind: the weights are those of only the kept rounds."""
    batches: list[Batch] = []
    carry_out = updates._order

    def note(state: CoordinatorState, decided: DecisionState, order: DecisionOrder | None) -> None:
        batches.extend(order.batches if order is not None else ())
        carry_out(state, decided, order)

    def act(worker: Worker) -> None:
        for step in range(32):
            time.sleep(0.03 if worker.rank == 2 else 0.002)
            worker.optimizer.zero_grad()
            loss_of(worker.model, batch(step, worker.rank)).backward()
            if worker.rank == 2 and step == 0:
                assert eventually(lambda: any(one.kept for one in batches)), "two make a quorum"
            worker.optimizer.step()

    monkeypatch.setattr(updates, "_order", note)
    with serving(tmp_path, workers=3, shards=2, mode="local", local=replace(OUTER, quorum=2, grace_seconds=grace)) as shards:
        all_well([Worker(shards, rank, model, OPTIMIZERS["sgd"](model)) for rank, model in enumerate(build() for _ in range(3))], act)
        assert shards.wait_ended() == [0, 0]
        final = load_file(shards.folder / "final.safetensors")
    kept = [{push.worker: push.clock for push in one.kept} for one in batches if one.kept]
    assert any(one.dropped for one in batches) and sum(len(one.kept) + len(one.dropped) for one in batches) == 3 * 8

    def counted(step: int, rank: int) -> Any:
        version, inner = divmod(step, OUTER.inner_steps)
        return None if rank not in kept[version] else batch(kept[version][rank] * OUTER.inner_steps + inner, rank)

    expected = local_reference(build, OPTIMIZERS["sgd"], counted, loss_of, workers=3, steps=len(kept) * OUTER.inner_steps, outer=OUTER)
    assert {name: torch.equal(final[name], p) for name, p in expected.model.named_parameters()} == dict.fromkeys(final, True)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"overlap": True}, "it sends the gradients of each step"),
        (
            {"update_rule": "delayed-nesterov", "rule_options": {"lam": 1}},
            "ruleOptions has lam, which updateRule delayed-nesterov does not",
        ),
        ({"update_rule": "delayed-nesterov", "rule_options": {"activation": 0.6}}, "activation is at most 1 / every, with every 2 not 0.6"),
        ({"dtype": torch.int64}, "int64"),
    ],
)
def test_what_local_rounds_do_not_go_with(tmp_path: Path, what: dict[str, Any], words: str) -> None:
    overlap, dtype = what.pop("overlap", False), what.pop("dtype", None)
    with serving(tmp_path, mode="local", **{"local": OUTER, **what}) as shards:
        model = build()
        if dtype is not None:
            model.register_parameter("counted", nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=False))
        with pytest.raises(Refused, match=words):
            Worker(shards, 0, model, torch.optim.SGD(model.parameters(), lr=0.1), overlap=overlap)
