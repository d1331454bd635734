"""Staleness and gap of pushes, and the warning about the learning rate: on the simulator's schedule, and on real shards.

- The part of its time in which a worker's script waits for others, from the wait to the status port.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psjob import rules
from psjob.modes import Async, Batch, Push
from psjob.rules.base import check_hyperparameters
from psjob.rules.stability import Guard, largest_stable_rate
from psjob.shard.pending import Lent, PendingPush, PushMetadata
from psjob.shard.push_metrics import ELEMENTS, FIRST, TOGETHER, BlockStaleness, Histogram, Sample, StalenessMetrics, compared
from psjob.shard.status_server import status
from psjob.simulate.engine import WorkerSpeeds, simulate
from psjob.simulate.training import SIZE, Digits, SimulatedTraining
from psjob.wire.frame import Header, Kind
from psjob.worker.state import RECENT, Idle, waited_share
from tests.live.live_shards import SECONDS, Worker, all_well, eventually, serving
from tests.live.training import batch, build, loss_of
from tests.support.soaking import rotating
from tests.tensors.desk import Desk

pytestmark = pytest.mark.usefixtures("last_words")

WHOLE = Sample(1, SIZE, SIZE)
SAMPLE = Sample.of(SIZE, ELEMENTS)


class Looked(SimulatedTraining):
    """Trains on the simulated schedule, and lets a shard's staleness see what a shard would."""

    def __init__(self, lr: float, sample: Sample = SAMPLE, seed: int = 0) -> None:
        rule = rules.named("plain")
        self.given = check_hyperparameters(rule, {"lr": lr, "weight_decay": 1e-4})
        self.guard = Guard("plain")
        self.staleness = StalenessMetrics(1, self.guard)
        self.block = BlockStaleness(self.staleness, sample)
        self.version = 0
        self.gaps: list[tuple[int, float]] = []
        """Of every push, with the version that it was computed on."""
        super().__init__(Digits(seed), rule, lambda batches: self.given, "torch")

    def begin(self, worker: int) -> None:
        super().begin(worker)
        self.block.answered(worker, self.state.weights, self.version)

    def decide(self, batch: Batch, version: int) -> list[tuple[float, float]]:
        info = PushMetadata((self.given,), frozenset())
        taken = [PendingPush(push, Lent(self._sent[push.worker, push.clock].grad), False, info) for push in batch.kept]
        self.block.counted(taken, self.state.weights, version, 0)
        notes = super().decide(batch, version)
        self.gaps += [(push.base or 0, gap) for (gap, _), push in zip(notes, batch.kept, strict=True)]
        self.version = version + 1
        return notes

    def compared(self) -> list[float]:
        return [gap for base, gap in self.gaps if compared(base)]


def looked(lr: float, workers: int, epochs: int = 8, sample: Sample = SAMPLE, seed: int = 0) -> Looked:
    work = Looked(lr, sample, seed)
    simulate(Async(), workers, WorkerSpeeds(), epochs * Digits.updates_per_epoch, 1000 + seed, work)
    return work


@given(st.lists(st.floats(min_value=0) | st.integers(0, 2000), max_size=50))
def test_a_bucket_holds_what_is_at_most_its_edge(values: list[float]) -> None:
    histogram = Histogram((0, 1, 4, 16))
    for value in values:
        histogram.see(value)
    finite = [value for value in values if math.isfinite(value)]
    told = histogram.told()
    assert told["buckets"] == [[edge, sum(value <= edge for value in finite)] for edge in (0, 1, 4, 16)]
    assert told["count"] == len(finite) and told["max"] == max(finite, default=0)
    assert told["sum"] == pytest.approx(sum(finite))


@given(st.integers(1, 5000), st.integers(1, 2000))
def test_a_sample_is_inside_of_its_block_and_meets_nothing_twice(elements: int, wanted: int) -> None:
    hyperparameters = torch.arange(elements + 7, dtype=torch.float32)[7:]
    taken = Sample.of(elements, wanted).of_block(hyperparameters).flatten()
    assert set(taken.tolist()) <= set(hyperparameters.tolist()) and len(set(taken.tolist())) == len(taken) > 0
    assert len(taken) <= max(wanted, 8)


@pytest.mark.parametrize(("workers", "mean"), [rotating(8, 6.99), (16, 14.95)])
def test_staleness_and_gap_of_every_push_are_those_of_the_schedule(workers: int, mean: float) -> None:
    """Row C2; a sample of all elements is the gap itself, and the usual sample comes near it."""
    work, sampled = looked(0.05, workers, 60, WHOLE), looked(0.05, workers, 8)
    told = work.staleness.told()
    assert told["staleness"]["sum"] / told["staleness"]["count"] == pytest.approx(mean, abs=0.06)
    assert told["staleness"]["count"] == len(work.gaps) == 60 * Digits.updates_per_epoch
    assert told["gap"]["sum"] == pytest.approx(sum(work.compared()), rel=1e-4)
    assert told["gap"]["count"] == len(work.compared()) < len(work.gaps) / 4
    work.gaps = work.gaps[FIRST + workers :]
    assert statistics.mean(work.compared()) == pytest.approx(statistics.mean(gap for _, gap in work.gaps), rel=0.1)
    assert sampled.staleness.told()["gap"]["sum"] == pytest.approx(sum(sampled.compared()), rel=0.2)


def test_an_eighth_is_compared_whatever_the_turns_of_the_workers() -> None:
    assert all(compared(version) for version in range(FIRST))
    chosen = [version for version in range(FIRST, 500_000) if compared(version)]
    assert len(chosen) == pytest.approx(500_000 / 8, rel=0.02)
    assert max(after - version for version, after in itertools.pairwise(chosen)) < 128 * TOGETHER
    for workers in (2, 3, 8, 13, 16, 61, 64, 89, 128, 144, 233, 256):
        shares = Counter(version % workers for version in chosen)
        assert len(shares) == workers and max(shares.values()) < 1.5 * min(shares.values()), "a slow worker would count too much"


@pytest.mark.parametrize("staleness", [0, 1, 3, 7, 15, 255])
def test_without_momentum_the_bound_is_the_formula(staleness: int) -> None:
    assert largest_stable_rate(staleness, {"lr": 1.0}) == pytest.approx(2 * math.sin(math.pi / (2 * (2 * staleness + 1))))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("staleness", [0, 1, 4, 20])
def test_steps_like_torchs_sgd_are_stable_below_the_bound_and_not_above(staleness: int, momentum: float, nesterov: bool) -> None:
    def grows(lr: float) -> bool:
        seen, v = [1.0] * (staleness + 1), 0.0
        for _ in range(120 * (staleness + 2)):
            grad = seen[-1 - staleness]
            v = momentum * v + grad
            seen.append(seen[-1] - lr * (grad + momentum * v if nesterov else v))
        half = len(seen) // 2
        return max(map(abs, seen[half:])) > max(map(abs, seen[:half]))

    largest = largest_stable_rate(staleness, {"momentum": momentum, "nesterov": nesterov})
    assert not grows(0.97 * largest) and grows(1.03 * largest)


def test_dampening_makes_room() -> None:
    assert largest_stable_rate(3, {"momentum": 0.9, "dampening": 0.5}) == pytest.approx(2 * largest_stable_rate(3, {"momentum": 0.9}))
    assert largest_stable_rate(3, {"dampening": 0.5}) == largest_stable_rate(3, {}), "torch dampens nothing without momentum"


@given(st.floats(0, 2), st.floats(0, 2), st.booleans(), st.lists(st.tuples(st.integers(0, 5000), st.floats(), st.floats()), max_size=60))
def test_no_number_of_a_script_or_a_push_breaks_the_guard(momentum: float, dampening: float, nesterov: bool, pushes: Any) -> None:
    """It is asked on the way of a push."""
    guard = Guard("sgd")
    hyperparameters = {"lr": 0.1, "momentum": momentum, "dampening": dampening, "nesterov": nesterov}
    for staleness, agreed, moved in pushes:
        words = guard.see(staleness, agreed, moved, hyperparameters)
        assert words is None or "nan" not in words


@pytest.mark.parametrize("workers", [rotating(16), 32])
def test_a_rate_that_spoils_digits_is_warned_of_and_one_that_does_not_is_not(workers: int) -> None:
    """Row C3: lr 1.0 comes to 41.7 / 15.4 % with 16 / 32 workers, lr 0.05 to 97.4 %."""
    high, low = looked(1.0, workers, seed=1), looked(0.05, workers, 30, seed=1)
    assert high.guard.warning is not None and "training may diverge. Lower lr" in high.guard.warning
    assert len(high.guard.warning) <= 200, "a condition on a cluster would cut it"
    assert low.guard.warning is None and low.score() > 0.95


def test_the_warning_comes_once_and_again_when_it_has_doubled() -> None:
    guard = Guard("sgd")
    largest = largest_stable_rate(4, {}) / 2.0
    rates = [0.9] * 200 + [1.1] * 200 + [2.1] * 200 + [2.3] * 200
    said = [(rate, guard.see(4, 2.0, 1.0, {"lr": rate * largest})) for rate in rates]
    assert [rate for rate, words in said if words] == [1.1, 2.3]
    assert guard.warning is not None and "is 2.3 times the" in guard.warning and "gradients 4 updates old" in guard.warning


def test_the_bound_is_that_of_the_staleness_of_nineteen_pushes_in_twenty() -> None:
    """Row C3: not the usual staleness, nor that of one push in fifty."""
    guard = Guard("plain")
    late = [2, 2, 2, 2, 2, 2, 2, 2, 2, 9] * 20
    late[100] = late[150] = 500
    largest = largest_stable_rate(9, {}) / 2.0
    assert not [words for staleness in late if (words := guard.see(staleness, 2.0, 1.0, {"lr": 0.9 * largest}))]
    said = [words for staleness in late[:40] if (words := guard.see(staleness, 2.0, 1.0, {"lr": 1.1 * largest}))]
    assert said and "gradients 9 updates old" in said[0]


def test_a_push_is_seen_when_its_last_block_is_and_as_late_as_its_latest() -> None:
    staleness = StalenessMetrics(2, None)
    blocks = [BlockStaleness(staleness, Sample.of(4, 8)) for _ in range(2)]
    weights, info = torch.zeros(4), PushMetadata(({"lr": 1.0},), frozenset())
    for block in blocks:
        block.answered(1, weights, 5)

    def count(block: int, base: int | None, n: int) -> None:
        blocks[block].counted([PendingPush(Push(1, 0, base), Lent(weights), False, info)], weights + 3, n, 0)

    count(0, 5, 7)
    assert staleness.told()["staleness"]["count"] == 0
    count(1, 5, 9)
    told = staleness.told()
    assert (told["staleness"]["count"], told["staleness"]["sum"], told["gap"]["sum"]) == (1, 4, 3.0)
    count(0, None, 9)  # of weights that a restore has undone
    assert staleness.told()["staleness"]["count"] == 1


def quadratic(steps: int, lr: float, workers: int) -> Any:
    """Every worker's gradient is its weights; all step at once, so that nearly all pushes are late."""
    barrier = threading.Barrier(workers)

    def act(worker: Worker) -> None:
        for _ in range(steps):
            for p in worker.model.parameters():
                p.grad = p.detach().clone()
            barrier.wait(SECONDS)
            worker.optimizer.step()

    models = [torch.nn.Linear(50, 50) for _ in range(workers)]
    return act, [(model, torch.optim.SGD(model.parameters(), lr=lr)) for model in models]


def test_a_job_tells_how_late_its_pushes_are_and_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every push that counted is seen once, on each shard; with lr × curvature at 1 any staleness is too much."""
    act, made = quadratic(20, 1.0, 6)
    with serving(tmp_path, workers=6, shards=2, mode="async") as shards:
        all_well([Worker(shards, rank, *pair) for rank, pair in enumerate(made)], act)
        assert eventually(lambda: status(shards.servers[0])["coordinator"]["staleness"]["count"] == 240), "both shards' are added up"
        told = [status(server) for server in shards.servers]
    for word in ("staleness", "gap"):
        whole, parts = told[0]["coordinator"][word], [one[word] for one in told]
        assert whole["sum"] == pytest.approx(sum(part["sum"] for part in parts)) and whole["max"] == max(part["max"] for part in parts)
        counts = zip(*([count for _, count in part["buckets"]] for part in parts), strict=True)
        assert [count for _, count in whole["buckets"]] == [sum(both) for both in counts]
    for one in told:
        assert one["staleness"]["count"] == one["gap"]["count"] == one["counters"]["applied"] == 120
        assert 0 < one["staleness"]["sum"] / 120 < 12 and one["gap"]["sum"] > 0
        json.dumps(one, allow_nan=False)
    assert told[0]["coordinator"]["warning"] in caplog.text and "training may diverge" in told[0]["coordinator"]["warning"]


@pytest.mark.parametrize(("mode", "workers", "staleness"), [("sync", 2, None), ("async", 1, 0)])
def test_nothing_is_late_in_sync_nor_alone(tmp_path: Path, mode: str, workers: int, staleness: int | None) -> None:
    act, made = quadratic(10, 1.0, workers)
    with serving(tmp_path, workers=workers, shards=1, mode=mode) as shards:
        all_well([Worker(shards, rank, *pair) for rank, pair in enumerate(made)], act)
        told = status(shards.servers[0])
    assert told["coordinator"]["warning"] is None and (told["coordinator"]["staleness"] is None) == (staleness is None)
    sums = [told[name] and (told[name]["count"], told[name]["max"]) for name in ("staleness", "gap")]
    assert sums == ([None, None] if staleness is None else list(itertools.repeat((10, 0), 2)))


def test_it_counts_from_the_end_of_the_first_step() -> None:
    idle = Idle()
    idle.waited = 5.0
    for clock, now in ((7, 10.0), (7, 11.0)):
        idle.at(clock, now)
    assert idle.told == (0, 0), "no step was made since the worker came"
    idle.at(8, 20.0)
    assert idle.told == (0, 0)
    idle.waited += 1.0
    assert idle.told == (0, 0), "it is told at an edge"
    idle.at(9, 24.0)
    assert idle.told == (4000, 2500)
    idle.waited += 9.0
    idle.at(10, 30.0)
    assert idle.told == (10_000, 10_000)


def test_the_recent_share_is_of_the_last_steps_and_of_a_wait_under_way() -> None:
    idle = Idle()
    idle.at(0, 0.0)
    assert idle.recent(5.0, 5.0) is None, "until the first step has ended workers wait for each other's imports"
    idle.waited = 50.0
    idle.at(1, 60.0)
    assert idle.recent(60.0) is None
    assert idle.recent(70.0, 8.0) == 0.8, "a wait counts before it ends"
    for step in range(2, 2 + RECENT):
        idle.waited += 0.25
        idle.at(step, 59.0 + step)
    assert idle.recent(60.0 + RECENT) == 0.25
    for step in range(2 + RECENT, 2 + 2 * RECENT):
        idle.waited += 0.75
        idle.at(step, 59.0 + step)
    assert idle.recent(60.0 + 2 * RECENT) == 0.75, "what is older does not count"
    assert idle.told[1] == 5000


@pytest.mark.parametrize(("waited", "counted", "part"), [(0, 0, 0), (1, 0, 0), (1, 4, 0.25), (5, 4, 1), (-1, 4, 0)])
def test_a_share_is_between_0_and_1(waited: float, counted: float, part: float) -> None:
    assert waited_share(waited, counted) == part


def test_a_record_tells_it_and_one_that_knows_nothing_leaves_it(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    clerks = desk.begun()

    def told() -> list[object]:
        return [worker["idle"] for worker in desk.c.members.status()]

    assert told() == [None, None]
    desk.say(clerks[1], Header(Kind.RECORD, clock=1, part=4000, request=2500), {}, b"")
    assert told() == [None, 0.25]
    desk.say(clerks[1], Header(Kind.RECORD, clock=1), {}, b"")
    desk.say(clerks[0], Header(Kind.RECORD, clock=1, part=1, request=2**32 - 1), {}, b"")
    assert told() == [1.0, 0.25]


def test_a_worker_whose_stream_has_ended_has_joined_and_is_not_here(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    clerks = desk.begun()

    def told() -> list[tuple[object, object]]:
        return [(worker["state"], worker["here"]) for worker in desk.c.members.status()]

    assert told() == [("joined", True)] * 2
    clerks[1].gone()
    desk.settle()
    assert told() == [("joined", True), ("joined", False)]


def test_in_sync_who_is_quick_waits_for_who_is_slow(tmp_path: Path) -> None:
    with serving(tmp_path, workers=2) as shards:
        models = [build() for _ in range(2)]
        workers = [Worker(shards, rank, model, torch.optim.SGD(model.parameters(), lr=0.1)) for rank, model in enumerate(models)]

        def act(worker: Worker) -> None:
            for step in range(12):
                worker.optimizer.zero_grad()
                loss_of(worker.model, batch(step, worker.rank)).backward()
                time.sleep(0.0 if worker.rank else 0.12)
                worker.optimizer.step()

        all_well(workers, act)
        slow, quick = (worker["idle"] for worker in status(shards.servers[0])["coordinator"]["workers"])
    assert 0 <= slow < 0.5 < quick <= 1
