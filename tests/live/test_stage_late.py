"""Stages that do not flush, on real shards: old weights from a list, in one process, give the same numbers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psjob.api.staged import StageVersions
from psjob.layout import structures
from psjob.modes.stages import Stages
from psjob.pipeline import predict, schedule
from psjob.pipeline.cuts import split
from psjob.pipeline.stage import ChangedInPlace
from psjob.shard.block import ParameterBlock
from psjob.worker import stagelinks
from tests.covering import each_value
from tests.live import stage_workers
from tests.live.live_shards import SECONDS, eventually, serving
from tests.live.stage_workers import CUTS, SEED, WIDE, Cluster, Kills, StageWorker, batch, untied
from tests.soaking import rotating
from tests.support import pipeline_reference as reference
from tests.support.pipeline_reference import Outcome

STEPS = 12
WORDS: dict[str, dict[str, str]] = {
    "2bw": {"schedule": "2bw"},
    "pipedream": {"schedule": "pipedream"},
    "vertical": {"schedule": "pipedream", "stage_weights": "vertical"},
    "latest": {"schedule": "pipedream", "stage_weights": "latest"},
    "recompute": {"schedule": "pipedream", "stage_weights": "recompute"},
    "predict": {"schedule": "pipedream", "predict": "nesterov"},
    "ftpipe": {"schedule": "pipedream", "stage_weights": "recompute", "predict": "nesterov"},
}


@pytest.fixture(autouse=True)
def no_tied_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_workers, "model", untied)


def way_of(name: str) -> schedule.TrainingWay:
    words = WORDS[name]
    return schedule.way_of(words["schedule"], words.get("stage_weights", "stash"), words.get("predict", "none"))


def expected(name: str, stages: int, microbatches: int, replicas: tuple[int, ...] = (), rate: reference.Rate | None = None) -> Outcome:
    net = stage_workers.model()
    parts = split(net, CUTS[stages])

    def optimizer(parameters: list[nn.Parameter], _delay: int) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)

    return reference.train(
        net, nn.functional.mse_loss, [batch(number) for number in range(STEPS)], parts=parts, way=way_of(name),
        microbatches=microbatches, optimizer=optimizer, seed=SEED, replicas=replicas, rate=rate,
    )  # fmt: skip


def delays_of(worker: StageWorker) -> Counter[int]:
    return Counter(dict(worker.pipe.delays))


def too_few(name: str, size: tuple[int, int], count: int) -> bool:
    """2bw needs a micro-batch a stage."""
    return name == "2bw" and size[1] < size[0]


LARGE = [(name, (4, 4), count) for name in sorted(WORDS, key="pipedream".__eq__) for count in (1, 3)]
"""Of four stages and as many micro-batches, pipedream last."""


@pytest.mark.parametrize(
    ("name", "size", "count"),
    [*each_value(WORDS, [(2, 2), (4, 1)], [1, 3], skip=too_few), pytest.param(*LARGE[-1], id="large"),
     *(rotating(*row, id=f"large{number}") for number, row in enumerate(LARGE[:-1]))],
)  # fmt: skip
def test_late_gradients_are_those_of_old_weights_in_one_process(tmp_path: Path, name: str, size: tuple[int, int], count: int) -> None:
    """`size` is of stages and micro-batches."""
    stages, microbatches = size
    with serving(tmp_path, workers=stages, shards=count, stages=Stages((1,) * stages), **WORDS[name]) as shards:
        cluster = Cluster(shards, microbatches)
        cluster.run(STEPS)
        assert not cluster.rewound
    plain = expected(name, stages, microbatches)
    predicted = way_of(name).predicts
    for rank, worker in cluster.ended.items():
        assert delays_of(worker) == plain.delays[rank]
        for key, tensor in worker.own.items():
            wanted = plain.weights[key] if key in plain.weights else plain.buffers[key]
            # A prediction is made of the difference of two versions here, and of the optimizer's state there.
            torch.testing.assert_close(tensor, wanted, atol=1e-5 if predicted else 0.0, rtol=1e-4 if predicted else 0.0)


@pytest.mark.parametrize(
    ("name", "replicas"), each_value(["2bw", "pipedream", "vertical", "latest", "ftpipe"], [(2, 1), (2, 1, 1), (2, 2, 2), (3, 1)])
)
def test_replicas_sum_before_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, replicas: tuple[int, ...]) -> None:
    """Each has one micro-batch of an update. Their sums are of each replica's micro-batches first, so the last bits may be others."""

    def without_statistics() -> nn.Module:
        net = untied()
        assert isinstance(net, nn.Sequential)
        net[4] = nn.Identity()  # each replica would have its own
        return net

    monkeypatch.setattr(stage_workers, "model", without_statistics)
    microbatches = replicas[0] if name != "2bw" else replicas[0] * len(replicas)
    with serving(tmp_path, workers=sum(replicas), shards=2, stages=Stages(replicas), **WORDS[name]) as shards:
        cluster = Cluster(shards, microbatches)
        cluster.run(STEPS)
        assert not cluster.rewound
    plain = expected(name, len(replicas), microbatches, replicas)
    for rank, worker in cluster.ended.items():
        stage = Stages(replicas).of(rank)
        assert stage is not None and delays_of(worker) == plain.delays[stage]
        if name not in ("2bw", "vertical"):
            rest = sum(replicas[stage:])
            assert max(delays_of(worker)) == -(-((rest - 1) // replicas[stage]) * replicas[stage] // microbatches)
        for key, tensor in worker.own.items():
            torch.testing.assert_close(tensor, plain.weights[key], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["pipedream", rotating("vertical"), rotating("latest")])
def test_a_late_stage_begins_with_a_small_rate(tmp_path: Path, name: str) -> None:
    """lr / τ^(1 - t/8) at update t: PipeMare's T1, to the bit."""
    with serving(tmp_path, workers=4, shards=2, stages=Stages((1,) * 4), **WORDS[name], anneal_steps=8) as shards:
        cluster = Cluster(shards, 1)
        cluster.run(STEPS)
        assert not cluster.rewound
    plain = expected(name, 4, 1, rate=lambda delay, step: predict.lr_by_delay(0.05, delay, step, 8))
    at_once = expected(name, 4, 1)
    for worker in cluster.ended.values():
        for key, tensor in worker.own.items():
            assert torch.equal(tensor, plain.weights[key] if key in plain.weights else plain.buffers[key]), key
    assert not torch.equal(plain.weights["0.weight"], at_once.weights["0.weight"])


def test_a_stage_without_stash_has_one_memory(tmp_path: Path) -> None:
    """Of all the versions that its forwards take."""
    seen: dict[int, set[int]] = {}

    def before(worker: StageWorker, what: str, step: int, micro: int) -> None:
        if what == "push" and step:
            seen.setdefault(worker.rank, set()).update(worker.own[name].data_ptr() for name in worker.pipe.run.part.parameters)

    with serving(tmp_path, workers=2, shards=1, stages=Stages((1, 1)), **WORDS["latest"]) as shards:
        cluster = Cluster(shards, 2, before)
        cluster.run(STEPS)
    for rank, worker in cluster.ended.items():
        assert len(seen[rank]) == len(worker.pipe.run.part.parameters)


def test_a_stage_computes_while_its_push_is_under_way(tmp_path: Path) -> None:
    """The shard answers no push of step 4 of the first stage before this has given what it makes next."""
    given: list[tuple[int, int]] = []
    held: list[ParameterBlock] = []

    def before(worker: StageWorker, what: str, step: int, micro: int) -> None:
        if worker.rank == 0 and (what, step) == ("push", 4):
            held.extend(shards.servers[0].store.cells.values())
            for cell in held:
                assert cell.lock.acquire(timeout=SECONDS)
            given.append((-1, -1))
        elif worker.rank == 0 and what == "give ACTIVATION" and given == [(-1, -1)]:
            given.append((step, micro))
            for cell in held:
                cell.lock.release()

    with serving(tmp_path, workers=2, shards=1, stages=Stages((1, 1)), **WORDS["2bw"]) as shards:
        Cluster(shards, 4, before).run(STEPS)
    assert held and given == [(-1, -1), (5, 1)]


STRANGE: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "no version": (
        "vertical",
        lambda given: given[:2] if type(given[2]) is int else given,
        "worker 0 (stage 0) gave for micro-batch 0 of ",
    ),
    "a word as version": ("vertical", lambda given: (*given[:2], "1") if type(given[2]) is int else given, "is no activation of a stage"),
    "a version below 0": ("vertical", lambda given: (*given[:2], -1) if type(given[2]) is int else given, "is no activation of a stage"),
    "a number": ("latest", lambda given: 5 if len(given) == 2 else given, "is no activation of a stage"),
    "no loss": (
        "latest",
        lambda given: given[:2] if len(given) == 3 else given,
        "worker 1 (stage 1) gave for micro-batch 0 of step 0 is no",
    ),
}


@pytest.mark.parametrize("name", list(STRANGE))
def test_what_a_neighbour_makes_up_is_refused_by_name(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the key of the link, and a structure of tensors that is none of a stage."""
    words, made_up, says = STRANGE[name]
    write = structures.write
    monkeypatch.setattr(stagelinks.structures, "write", lambda given: write(made_up(given)))
    with serving(tmp_path, workers=2, shards=1, stages=Stages((1, 1)), **WORDS[words]) as shards:
        cluster = Cluster(shards, 2)
        with pytest.raises((AssertionError, SystemExit)):  # the other stage waits
            cluster.run(STEPS)
        assert eventually(lambda: len(cluster.problems) > 0)
        for worker in list(shards.guests):
            worker.die()
    assert all(isinstance(problem, SystemExit) for problem in cluster.problems), cluster.problems
    assert says in capfd.readouterr().err


def test_gradients_are_given_back_when_their_push_is_answered(tmp_path: Path) -> None:
    """Else each stage would hold a gradient as large as its weights while it computes."""
    held: list[int] = []

    def before(worker: StageWorker, what: str, step: int, micro: int) -> None:
        if what.startswith("take") and step > 4:
            exchange = worker.session.exchange
            waits = any(link.outstanding for link in worker.session.links)
            held.append(0 if waits else sum(one is not None for one in exchange.sources))

    with serving(tmp_path, workers=2, shards=1, stages=Stages((1, 1)), **WORDS["latest"]) as shards:
        Cluster(shards, 2, before).run(STEPS)
    assert held and not any(held), held


def test_two_stages_may_share_a_weight_where_both_are_as_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tied() -> nn.Module:
        net = untied()
        assert isinstance(net, nn.Sequential)
        first, last = net[0], net[7]
        assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
        last.weight = first.weight
        return net

    monkeypatch.setattr(stage_workers, "model", tied)
    with serving(tmp_path, workers=2, shards=2, stages=Stages((1, 1)), **WORDS["2bw"]) as shards:
        cluster = Cluster(shards, 2)
        cluster.run(STEPS)
    plain = expected("2bw", 2, 2)
    for worker in cluster.ended.values():
        for key, tensor in worker.own.items():
            assert torch.equal(tensor, plain.weights[key] if key in plain.weights else plain.buffers[key]), key
    other = tmp_path / "other"
    other.mkdir()
    with (
        serving(other, workers=2, shards=1, stages=Stages((1, 1)), **WORDS["pipedream"]) as shards,
        pytest.raises(
            ValueError,
            match=r"0\.weight is shared by stages 0, 1, whose delays are 1, 0 updates; take schedule: flush or 2bw, or weights: vertical",
        ),
    ):
        StageWorker(shards, 0, 1, 1)


def test_weights_that_land_in_an_open_version_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a pull writes into the parameters, or a shard changes memory that it lends: gradients would be wrong in silence."""

    def in_place(versions: StageVersions) -> list[torch.Tensor]:
        return [p.data for p in versions._job.parameters]

    monkeypatch.setattr(StageVersions, "fresh", in_place)
    with serving(tmp_path, workers=2, shards=1, stages=Stages((1, 1)), **WORDS["pipedream"]) as shards:
        cluster = Cluster(shards, 1)
        with pytest.raises((AssertionError, ChangedInPlace)):  # the other stage waits
            cluster.run(STEPS)
        assert eventually(lambda: bool(cluster.problems))
        found = [str(problem) for problem in cluster.problems if isinstance(problem, ChangedInPlace)]
        for worker in list(shards.guests):
            worker.die()
    assert found and "lies in the memory of version" in found[0], cluster.problems


def test_what_cannot_be_predicted_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_workers, "optimizer_of", lambda net: torch.optim.AdamW(net.parameters()))
    with serving(tmp_path, workers=2, shards=1, stages=Stages((1, 1)), **WORDS["ftpipe"]) as shards:
        cluster = Cluster(shards, 1)
        with pytest.raises((AssertionError, SystemExit)):  # the other stage waits
            cluster.run(STEPS)
        assert eventually(lambda: len(cluster.problems) > 0)
        for worker in list(shards.guests):
            worker.die()
    assert "predict nesterov: weights of adamw cannot be predicted; known are sgd, adam; or leave predict out" in capfd.readouterr().err


class Add(nn.Module):
    """Its gradient does not depend on weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


def counting(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of this batch is a power of two of its own, so that weights tell which batches count, and how often."""
    return torch.zeros(20, WIDE), torch.full((20, WIDE), float(WIDE * 2**number))


def kill_by_seed(folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> tuple[int, int]:
    """How many were killed, and how many went back to a checkpoint."""
    monkeypatch.setattr(stage_workers, "model", lambda: nn.Sequential(*(Add() for _ in range(8))))
    monkeypatch.setattr(stage_workers, "batch", counting)
    monkeypatch.setattr(stage_workers, "LOSS", lambda output, target: (output * target).mean())
    monkeypatch.setattr(stage_workers, "optimizer_of", lambda net: torch.optim.SGD(net.parameters(), lr=1.0))
    chance = random.Random(seed)
    stages, name = chance.choice([2, 3, 4]), chance.choice(["2bw", "pipedream", "recompute", "vertical", "latest"])
    microbatches = chance.choice([4, 5] if name == "2bw" else [1, 2, 4])
    kills = Kills(chance, stages, microbatches, STEPS)
    with serving(folder, workers=stages, shards=chance.choice([1, 2, 3]), stages=Stages((1,) * stages), **WORDS[name]) as shards:
        cluster = Cluster(shards, microbatches, kills.before)
        cluster.run(STEPS)
        kills.check(cluster, seed)
        for rank, worker in cluster.ended.items():
            for key, tensor in worker.own.items():
                assert torch.equal(tensor, torch.full((WIDE,), -float(2**STEPS - 1))), (seed, rank, key, tensor)
        return len(kills.hits), cluster.rewound


@pytest.mark.parametrize("seed", [0, 1, 2, *map(rotating, range(3, 8))])
def test_each_batch_counts_once_whoever_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    kill_by_seed(tmp_path, monkeypatch, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(8, 200))
def test_each_batch_counts_once_over_many_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    kill_by_seed(tmp_path, monkeypatch, seed)


@pytest.mark.soak
def test_one_that_is_lost_alone_undoes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But where a gradient that it gave had not left it when its own push counted: seldom."""
    rewound = []
    for seed in range(300, 308):
        folder = tmp_path / str(seed)
        folder.mkdir()
        killed, back = kill_by_seed(folder, monkeypatch, seed)
        rewound += [back] if killed == 1 else []
    assert len(rewound) > 3 and sum(back > 0 for back in rewound) <= 1, rewound
