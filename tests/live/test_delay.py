"""Workers that compute while their pushes are under way: the same bits as delayed updates of plain torch, by every road."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from psjob.api import attach as attaching
from psjob.api.data import ShardedLoader
from psjob.api.slices import Slices
from psjob.shard.block import ParameterBlock
from psjob.shard.checks import check_pull
from psjob.shard.server import Server
from psjob.shard.store import Store
from psjob.wire.frame import Flag, Header, Kind, WireError
from psjob.worker.delay import Delayed, Turn
from tests.live import embeddings
from tests.live.live_shards import (
    NEVER,
    SECONDS,
    Rewound,
    Shards,
    Worker,
    all_well,
    aside,
    at_once,
    coordinator,
    eventually,
    serving,
    severed,
)
from tests.live.slow_device import SlowDelayedStaging
from tests.live.training import OPTIMIZERS, batch, build, counting, final, loss_of, numbers, one_inf, step, train_step
from tests.support.soaking import rotating

STEPS = 6


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def delayed(name: str, workers: int, clip: float | None = None) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Torch alone: the weights with which each step is computed, and the last ones. A step sees all updates but the newest one."""
    newest, used = build(), build()
    optimizer = OPTIMIZERS[name](newest)
    seen = []
    for clock in range(STEPS):
        seen.append([p.detach().clone() for p in used.parameters()])
        total: list[torch.Tensor] = []
        for rank in range(workers):
            used.zero_grad()
            loss_of(used, batch(clock, rank)).backward()
            grads = [p.grad.clone() for p in used.parameters() if p.grad is not None]
            total = grads if not total else [a + b for a, b in zip(total, grads, strict=True)]
        used.load_state_dict(copy.deepcopy(newest.state_dict()))
        for p, grad in zip(newest.parameters(), total, strict=True):
            p.grad = grad * (1.0 / workers)
        if clip is not None:
            nn.utils.clip_grad_norm_(newest.parameters(), clip)
        optimizer.step()
    return seen, [p.detach().clone() for p in newest.parameters()]


def train(folder: Path, name: str, workers: int, **more: Any) -> list[tuple[list[list[torch.Tensor]], list[torch.Tensor]]]:
    """By rank: the weights with which each step was computed, and the last ones."""
    found: list[Any] = [None] * workers

    def act(worker: Worker) -> None:
        assert isinstance(worker.session.exchange, Delayed)
        seen = []
        for clock in range(STEPS):
            seen.append([p.detach().clone() for p in worker.model.parameters()])
            train_step(worker, clock)
            assert worker.session.exchange.behind == 1
        worker.job.wait()
        found[worker.rank] = seen, [p.detach().clone() for p in worker.model.parameters()]

    with serving(folder, workers=workers, shards=2, delay=1, **more) as shards:
        made = [build() for _ in range(workers)]
        all_well([Worker(shards, rank, model, OPTIMIZERS[name](model)) for rank, model in enumerate(made)], act)
    return found


def check_same(one: Any, other: Any, within: float = 0.0) -> None:
    flat = [[*(tensor for step in seen for tensor in step), *last] for seen, last in (one, other)]
    for a, b in zip(*flat, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=within)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("name", ["sgd", "adamw", rotating("nesterov"), rotating("adagrad")])
def test_sync_is_computed_on_the_weights_before_the_newest_update(tmp_path: Path, name: str, transport: str) -> None:
    wanted, found = delayed(name, 2), train(tmp_path, name, 2, transport=transport)
    check_same(found[0], wanted, 0.0 if name == "sgd" else 1e-6)
    check_same(found[0], found[1])


def reusing_step(worker: Worker, clock: int | None) -> None:
    """A step whose gradients are zeroed in place: on the batch of `clock`, or one that adds 1 to each number."""
    if clock is None:
        (0.0 * worker.model(torch.ones(1, 40)).sum() - sum(p.sum() for p in worker.model.parameters())).backward()
    else:
        loss_of(worker.model, batch(clock, 0)).backward()
    worker.optimizer.step()
    worker.optimizer.zero_grad(set_to_none=False)


def reusing_steps(trains: bool, worker: Worker) -> None:
    for clock in range(STEPS):
        reusing_step(worker, clock if trains else None)
    worker.job.wait()


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize(("mode", "delay"), [("sync", 1), ("async", 1), ("async", 3)])
def test_copies_that_take_long_change_no_bit(tmp_path: Path, mode: str, delay: int, transport: str) -> None:
    """No gradient is pushed or changed before it is copied, and no answer is overwritten before it is in the model."""

    with serving(tmp_path, workers=1, shards=2, mode=mode, delay=delay, transport=transport) as shards:
        model = build()
        worker = Worker(shards, 0, model, OPTIMIZERS["sgd"](model)) if mode == "sync" else counting(shards, 0)
        worker.job.weight_guard._lands_later = True  # it reads the model, and nothing holds it up here as a GPU's stream does
        staging = SlowDelayedStaging(worker.session.layout, 0.03, delay)
        staging.at_once = True
        worker.session.use(Delayed(worker.session.rows, staging))

        def compute(*_given: object) -> None:
            staging.at_once = False  # as it was until the worker had joined
            staging.compute_waits()

        for module in worker.model.modules():
            module.register_forward_pre_hook(compute)
        try:
            all_well([worker], partial(reusing_steps, mode == "sync"))
            staging.compute_waits()
        finally:
            staging.end()
        if mode == "sync":
            check_same(([], list(worker.model.parameters())), ([], delayed("sgd", 1)[1]))
        else:
            assert numbers(worker.model) == final(shards) == {float(STEPS)}


def test_a_delayed_gradient_is_clipped_by_the_norm_of_its_own_step(tmp_path: Path) -> None:
    found = train(tmp_path, "sgd", 2, max_grad_norm=0.1)
    check_same(found[0], delayed("sgd", 2, clip=0.1), 1e-6)
    check_same(found[0], found[1])


def test_a_delayed_step_that_found_inf_is_left_out_on_all_workers(tmp_path: Path) -> None:
    scales: dict[int, float] = {}
    with serving(tmp_path, workers=2, shards=2, delay=1) as shards:
        workers = [Worker(shards, rank, model, OPTIMIZERS["sgd"](model)) for rank, model in enumerate([build(), build()])]
        all_well(workers, one_inf(scales))
        seen = [[p.detach().clone() for p in worker.model.parameters()] for worker in workers]
        assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
        assert shards.servers[0].store.span() == (6, 6)
    assert all(torch.isfinite(tensor).all() for tensor in seen[0])


def test_the_weights_are_the_newest_where_the_script_waits_or_saves_them(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=2, delay=1) as shards:
        worker = counting(shards, 0)
        worker.attach()
        step(worker, 3)
        assert numbers(worker.model) == {2.0}
        assert {float(n) for tensor in worker.model.state_dict().values() for n in tensor.flatten()} == {3.0}
        assert worker.session.exchange.behind == 0 and numbers(worker.model) == {3.0}
        step(worker, 2)
        assert numbers(worker.model) == {4.0}
        worker.job.wait()
        assert numbers(worker.model) == {5.0}
        step(worker)
        assert worker.leave() == 0 and final(shards) == numbers(worker.model) == {6.0}


MODES = [("async", {}, 1), ("async", {}, 3), ("bounded", {"staleness": 5}, 1), ("bounded", {"staleness": 5}, 4)]


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize(("mode", "more", "delay"), MODES, ids=[f"{mode}-{delay}" for mode, _, delay in MODES])
def test_every_push_counts_once_with_several_under_way(tmp_path: Path, mode: str, more: Any, delay: int, transport: str) -> None:
    count, most = 25, [0, 0]

    def act(worker: Worker) -> None:
        jitter = random.Random(worker.rank)
        for _ in range(count):
            time.sleep(jitter.random() * 0.004)
            step(worker)
            most[worker.rank] = max(most[worker.rank], worker.session.exchange.behind)

    with serving(tmp_path, workers=2, shards=2, mode=mode, delay=delay, transport=transport, **more) as shards:
        all_well([counting(shards, rank) for rank in range(2)], act)
        assert final(shards) == {2.0 * count}
        told = [server.store.counters for server in shards.servers]
        assert [one.applied for one in told] == [2 * count] * 2 and not any(one.lost or one.duplicates for one in told)
    assert max(most) <= delay


@pytest.mark.parametrize("delay", [1, 3])
def test_a_push_names_the_version_that_it_was_computed_on(tmp_path: Path, delay: int) -> None:
    """Of one worker, whose weights say how many updates they hold."""
    computed, named = [], {}
    admit = Store.push

    def push(store: Store, header: Header, *given: Any) -> Any:
        named[header.clock] = header.version[1]
        return admit(store, header, *given)

    with serving(tmp_path, workers=1, shards=1, mode="async", delay=delay) as shards, mock.patch.object(Store, "push", push):
        worker = counting(shards, 0)
        worker.attach()
        for clock in range(8):
            computed += sorted(numbers(worker.model))
            step(worker)
            if clock == 4:
                worker.job.wait()
        assert worker.leave() == 0
    assert [float(named[clock]) for clock in range(8)] == computed
    assert computed[5] == 5.0 and computed[7] < 7.0


def held_back(server: Server) -> Callable[[], None]:
    """Answers of a shard wait from now on until that is called."""
    go = threading.Event()
    answer = ParameterBlock.answer

    def waits(cell: ParameterBlock, *given: Any) -> None:
        if cell not in server.store.cells.values() or go.is_set():
            answer(cell, *given)

    patch = mock.patch.object(ParameterBlock, "answer", waits)
    patch.start()

    def end() -> None:
        go.set()
        patch.stop()
        server.store.ask_again()

    return end


@pytest.mark.parametrize(("mode", "delay"), [("sync", 1), ("async", 1), ("async", 3)])
def test_so_many_steps_are_made_while_no_answer_comes(tmp_path: Path, mode: str, delay: int) -> None:
    with serving(tmp_path, workers=1, shards=2, mode=mode, delay=delay) as shards:
        worker = counting(shards, 0)
        worker.attach()
        step(worker, 2)
        worker.job.wait()
        end = held_back(shards.servers[1])
        made: list[float] = []

        def on() -> None:
            for _ in range(delay + 1):
                step(worker)
                made.append(time.monotonic())

        going = aside(on)
        assert eventually(lambda: len(made) == delay)
        time.sleep(0.1)
        assert len(made) == delay, "one more than may be under way"
        assert numbers(worker.model) == {2.0}
        end()
        going.join(SECONDS)
        assert len(made) == delay + 1 and worker.leave() == 0
        assert final(shards) == {3.0 + delay}


def large(shards: Shards, start: int = 1) -> Worker:
    """A counting worker whose record is too large to be handed in at each step."""
    model = nn.Linear(40, 40)
    model.register_buffer("statistics", torch.zeros(40_000))
    for p in model.parameters():
        nn.init.zeros_(p)
    return Worker(shards, 0, model, torch.optim.SGD(model.parameters(), lr=1.0), start=start)


@pytest.mark.parametrize("make", [lambda shards, start=1: counting(shards, 0, start), large], ids=["small", "large"])
@pytest.mark.parametrize("every", [1, 3])
def test_a_job_goes_on_from_a_checkpoint_with_both_versions(tmp_path: Path, make: Any, every: int) -> None:
    """The next step is computed on the weights of one update ago, as it would have been."""
    saved = replace(NEVER, every_steps=every, keep=100)
    with serving(tmp_path, workers=1, shards=2, delay=1, checkpoint=saved) as shards:
        first = make(shards)
        first.attach()
        clock = 0

        def committed() -> bool:
            nonlocal clock
            first.edge(clock)
            step(first)
            clock += 1
            return coordinator(shards).machine.state.progress.committed >= 2

        assert eventually(committed)
        first.die()
    with serving(tmp_path, workers=1, shards=2, delay=1, checkpoint=saved, attempt=2) as shards:
        again = make(shards, start=2)
        again.attach()
        at = again.session.clock
        assert 0 < at <= clock
        assert numbers(again.model) - {0.0} == ({float(at - 1)} if at > 1 else set())
        assert again.session.exchange.behind == 1
        again.edge(at)
        step(again)
        assert numbers(again.model) - {0.0} == {float(at)}
        assert again.leave() == 0 and final(shards) - {0.0} == {at + 1.0}


def test_a_worker_that_comes_back_computes_on_the_weights_that_the_lost_one_had(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=2, delay=1) as shards:
        first = counting(shards, 0)
        first.attach()
        for turn in range(4):
            first.edge(turn)
            step(first)
        first.edge(4)
        first.session.exchange.finish()
        first.die()
        again = counting(shards, 0, start=2)
        again.attach()
        assert again.session.clock == 4 and numbers(again.model) == {3.0}
        again.edge(4)
        step(again)
        assert numbers(again.model) == {4.0} and again.leave() == 0
        assert final(shards) == {5.0} and shards.servers[0].store.counters.duplicates == 0


def test_a_push_that_was_on_its_way_as_its_worker_died_is_made_again(tmp_path: Path) -> None:
    """One shard has it, the other has not: the record of the step before is the one to continue from."""
    with serving(tmp_path, workers=1, shards=2, delay=1) as shards:
        first = counting(shards, 0)
        first.attach()
        for turn in range(3):
            first.edge(turn)
            step(first)
        first.edge(3)
        first.session.exchange.finish()
        with severed(first.session.links[1]):
            step(first)
            assert eventually(lambda: shards.servers[0].store.clocks()[0] == 4)
            first.edge(4)
            first.die()
        again = counting(shards, 0, start=2)
        again.attach()
        assert (again.session.clock, shards.servers[0].store.span()) == (0, (0, 0)), "no shard has what both would need: all go back"
        for turn in range(6):
            again.edge(turn)
            step(again)
        assert again.leave() == 0 and final(shards) == {6.0}


@pytest.mark.parametrize("moved", [False, True])
def test_a_push_of_the_lost_process_counts_in_place_of_the_next_ones(tmp_path: Path, moved: bool) -> None:
    """It had pushed the open clock, and the other worker does so while its successor computes that step again.

    If blocks have moved on before the successor asks for what they hold, it begins again.
    """
    with serving(tmp_path, workers=2, shards=2, delay=1) as shards:
        first, other = counting(shards, 0), counting(shards, 1)
        at_once(first.attach, other.attach)
        for turn in range(3):
            first.edge(turn)
            other.edge(turn)
            at_once(lambda: step(first), lambda: step(other))
        first.edge(3)
        other.edge(3)
        at_once(first.session.exchange.finish, other.session.exchange.finish)
        step(first)
        assert eventually(lambda: [server.store.clocks()[0] for server in shards.servers] == [4, 4])
        first.die()

        def move_on() -> None:
            step(other)
            assert eventually(lambda: all(server.store.span() == (4, 4) for server in shards.servers))

        again, handed = counting(shards, 0, start=2), []
        hand = Delayed._hand

        def hands(exchange: Delayed, turn: Turn) -> None:
            if handed and moved:
                move_on()
            handed.append(turn)
            hand(exchange, turn)

        with mock.patch.object(
            Delayed, "_hand", lambda exchange, turn: (hands if exchange is again.session.exchange else hand)(exchange, turn)
        ):
            again.attach()
        assert again.session.clock == 3 and numbers(again.model) == {2.0} and len(handed) == 2
        again.session.exchange.finish()
        again.edge(3)
        if moved:
            with pytest.raises(Rewound):
                step(again)
            return
        move_on()
        for turn in range(3, 6):
            again.edge(turn)
            step(again)
            assert numbers(again.model) == {float(turn)}
            if turn > 3:
                other.edge(turn)
                step(other)
        at_once(again.leave, other.leave)
        assert final(shards) == {6.0} and shards.servers[0].store.counters.duplicates > 0


def test_who_leaves_early_and_who_has_no_batch_change_nothing_for_the_others(tmp_path: Path) -> None:
    def act(worker: Worker) -> None:
        for turn in range(3 if worker.rank else 6):
            if worker.rank and turn == 1:
                worker.job.absent_step()
            else:
                step(worker)

    with serving(tmp_path, workers=2, shards=2, delay=1) as shards:
        all_well([counting(shards, rank) for rank in range(2)], act)
        assert final(shards) == {6.0}


def test_weights_of_one_update_ago_are_only_for_a_mode_that_keeps_them(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=1) as shards:
        worker = counting(shards, 0)
        worker.attach()
        cell = shards.servers[0].store.cell(0)
        header = worker.session.header(Kind.PULL, block=0, flags=Flag.BEFORE)
        with pytest.raises(WireError, match=r"asks for block 0 of one update ago, which is kept only in sync with training\.delay"):
            check_pull(shards.servers[0].store, header, cell)
        assert worker.leave() == 0


def test_a_step_that_is_left_out_is_a_version_too(tmp_path: Path) -> None:
    """After it the weights of one update ago are those of now, also for a worker that comes back."""
    with serving(tmp_path, workers=1, shards=2, delay=1) as shards:
        first = counting(shards, 0)
        first.attach()
        for turn in range(2):
            first.edge(turn)
            step(first)
        first.edge(2)
        first.job._exchange(None, True, 1.0, None)
        first.edge(3)
        first.session.exchange.finish()
        first.die()
        again = counting(shards, 0, start=2)
        again.attach()
        assert again.session.clock == 3 and numbers(again.model) == {2.0}
        again.edge(3)
        step(again)
        assert numbers(again.model) == {2.0} and again.leave() == 0 and final(shards) == {3.0}


def test_at_the_end_of_a_pass_all_has_landed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[float]] = []
    with serving(tmp_path, workers=1, shards=2, delay=1) as shards:
        worker = counting(shards, 0)
        worker.attach()
        monkeypatch.setattr(attaching, "current", worker.job)
        loader = DataLoader(TensorDataset(torch.ones(3, 1)), batch_size=1)
        sharded = ShardedLoader(loader, Slices(loader, 5, 0, 1), 1, None)
        for _ in range(2):
            for _batch in sharded:
                step(worker)
                seen.append(numbers(worker.model))
            seen.append(numbers(worker.model))
        assert worker.leave() == 0
    assert seen == [{0.0}, {1.0}, {2.0}, {3.0}, {3.0}, {4.0}, {5.0}, {6.0}]


def test_rows_are_of_the_newest_update_and_the_rest_of_the_one_before(tmp_path: Path) -> None:
    wanted = embeddings.Clicks()
    optimizer = embeddings.OPTIMIZERS["sgd"](wanted)
    used = copy.deepcopy(wanted.head.state_dict())
    for clock in range(STEPS):
        newest = copy.deepcopy(wanted.head.state_dict())
        wanted.head.load_state_dict(used)
        optimizer.zero_grad()
        (sum(embeddings.loss_of(wanted, clock, rank) for rank in range(2)) / 2).backward()
        wanted.head.load_state_dict(newest)
        optimizer.step()
        used = newest
    held: dict[int, list[torch.Tensor]] = {}

    def act(worker: Worker) -> None:
        embeddings.steps(STEPS)(worker)
        worker.job.wait()
        head = [p.detach().clone() for p in worker.model.head.parameters()]
        held[worker.rank] = [*embeddings.rows_of(worker.model), *head]

    with serving(tmp_path, workers=2, shards=2, delay=1) as shards:
        models = [embeddings.offloaded() for _ in range(2)]
        all_well([Worker(shards, rank, model, embeddings.OPTIMIZERS["sgd"](model)) for rank, model in enumerate(models)], act)
    last = [*embeddings.rows_of(wanted), *(p.detach() for p in wanted.head.parameters())]
    torch.testing.assert_close(held[0], last, rtol=0, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(held[0], held[1], strict=True))


def test_optimizer_state_is_of_the_step_that_the_weights_are_of(tmp_path: Path) -> None:
    """It waits for the push under way, and no later step takes what came for a change by hand."""
    with serving(tmp_path, workers=1, shards=2, delay=1) as shards:
        model = build()
        worker = Worker(shards, 0, model, OPTIMIZERS["adamw"](model))
        worker.attach()
        worker.optimizer.state_dict()
        for clock in range(4):
            train_step(worker, clock)
            if clock == 2:
                state = worker.optimizer.state_dict()["state"]
                assert {int(entry["step"]) for entry in state.values()} == {3} and worker.session.exchange.behind == 0
        assert worker.leave() == 0


def test_who_asks_for_optimizer_state_before_its_first_step_begins_as_the_lost_one_was(tmp_path: Path) -> None:
    """Libraries do so as they wrap the optimizer."""
    with serving(tmp_path, workers=1, shards=2, delay=1) as shards:
        first = counting(shards, 0)
        first.attach()
        for turn in range(4):
            first.edge(turn)
            step(first)
        first.edge(4)
        first.session.exchange.finish()
        first.die()
        again = counting(shards, 0, start=2)
        again.attach()
        again.optimizer.state_dict()
        assert again.session.clock == 4 and numbers(again.model) == {3.0}
        again.edge(4)
        step(again)
        assert numbers(again.model) == {4.0} and again.leave() == 0 and final(shards) == {5.0}


def test_an_evaluation_is_of_the_newest_weights(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=1, delay=1) as shards:
        worker = counting(shards, 0)
        worker.attach()
        step(worker, 3)
        with torch.no_grad():
            assert float(worker.model(torch.zeros(1, 40))[0, 0]) == 3.0
        step(worker)
        assert numbers(worker.model) == {3.0}
        assert worker.leave() == 0 and final(shards) == {4.0}


def test_weights_that_are_changed_while_a_push_is_under_way_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path, workers=1, shards=1, delay=1) as shards:
        worker = counting(shards, 0)
        worker.attach()
        step(worker, 2)
        with torch.no_grad():
            worker.model.weight.fill_(9.0)
        with pytest.raises(SystemExit):
            worker.model.state_dict()
    assert "parameter weight was changed by hand" in (said := capsys.readouterr().err)
    assert "while a push was under way, whose answer takes its place. Call ps.wait() before weights are changed" in said


@pytest.mark.parametrize("delay", [1, 3])
def test_rates_that_change_each_step_are_known_to_a_shard_that_comes_back(tmp_path: Path, delay: int) -> None:
    """Its link is broken while the hyperparameters of several pushes have been told."""
    with serving(tmp_path, workers=1, shards=2, mode="async", delay=delay) as shards:
        worker = counting(shards, 0)
        worker.attach()
        step(worker)
        worker.job.wait()
        wanted = 1.0
        with severed(worker.session.links[1]):
            shards.servers[1].store.infos.clear()
            for number in range(delay):
                worker.optimizer.param_groups[0]["lr"] = rate = 2.0 + number
                step(worker)
                wanted += rate
        worker.job.wait()
        assert numbers(worker.model) == {wanted} and worker.leave() == 0 and final(shards) == {wanted}


def test_a_job_keeps_its_delay_through_a_checkpoint(tmp_path: Path) -> None:
    """Also where its mode is fixed, as by the reduction."""
    saved = replace(NEVER, every_steps=2, keep=100)
    with serving(tmp_path, workers=1, shards=1, delay=1, reduction="sum", checkpoint=saved) as shards:
        worker = counting(shards, 0)
        worker.attach()
        assert eventually(lambda: step(worker) or worker.edge() or coordinator(shards).machine.state.progress.committed >= 1)  # type: ignore[func-returns-value]
        worker.die()
    with serving(tmp_path, workers=1, shards=1, delay=1, reduction="sum", checkpoint=saved, attempt=2) as shards:
        again = counting(shards, 0, start=2)
        again.attach()
        assert coordinator(shards).machine.state.mode.delay == 1 == again.session.exchange.delay
