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
from psjob.pipeline import predict
from psjob.pipeline.stage import ChangedInPlace
from psjob.shard.block import ParameterBlock
from psjob.worker import stage_connections
from tests.live import stage_workers
from tests.live.live_shards import SECONDS, serving
from tests.live.stage_workers import (
    WAYS,
    WIDE,
    Cluster,
    Kills,
    StageWorker,
    old_weights,
    problems_of,
    tied,
    too_few,
    trained,
    untied,
    way_of,
    without_statistics,
)
from tests.support.covering import each_value
from tests.support.pipeline_reference import Outcome
from tests.support.soaking import rotating, soak

STEPS = 12
LATE = [name for name in WAYS if name != "flush"]


@pytest.fixture(autouse=True)
def no_tied_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_workers, "model", untied)


def ran(folder: Path, name: str, replicas: tuple[int, ...], microbatches: int, count: int = 1, **more: Any) -> Cluster:
    return trained(folder, replicas, microbatches, count, steps=STEPS, **WAYS[name], **more)


def expected(name: str, stages: int, microbatches: int, **more: Any) -> Outcome:
    return old_weights(name, stages, microbatches, steps=STEPS, **more)


def delays_of(worker: StageWorker) -> Counter[int]:
    return Counter(dict(worker.pipe.delays))


def equal(cluster: Cluster, plain: Outcome, atol: float = 0.0, rtol: float = 0.0) -> None:
    """Parameters and buffers of all stages."""
    for worker in cluster.ended.values():
        for key, tensor in worker.own.items():
            torch.testing.assert_close(tensor, plain.weights[key] if key in plain.weights else plain.buffers[key], atol=atol, rtol=rtol)


LARGE = [(name, (4, 4), count) for name in sorted(LATE, key="pipedream".__eq__) for count in (1, 3)]
"""Of four stages and as many micro-batches, pipedream last."""


@pytest.mark.parametrize(
    ("name", "size", "count"),
    [*each_value(LATE, [(2, 2), (4, 1)], [1, 3], skip=lambda name, size, count: too_few(name, size)),
     pytest.param(*LARGE[-1], id="large"), *(rotating(*row, id=f"large{number}") for number, row in enumerate(LARGE[:-1]))],
)  # fmt: skip
def test_late_gradients_are_those_of_old_weights_in_one_process(tmp_path: Path, name: str, size: tuple[int, int], count: int) -> None:
    """`size` is of stages and micro-batches."""
    stages, microbatches = size
    cluster, plain = ran(tmp_path, name, (1,) * stages, microbatches, count), expected(name, stages, microbatches)
    assert {rank: delays_of(worker) for rank, worker in cluster.ended.items()} == dict(enumerate(plain.delays))
    predicted = way_of(name).predicts  # here of the difference of two versions, and there of the optimizer's state
    equal(cluster, plain, atol=1e-5 if predicted else 0.0, rtol=1e-4 if predicted else 0.0)


@pytest.mark.parametrize(
    ("name", "replicas"), each_value(["2bw", "pipedream", "vertical", "latest", "ftpipe"], [(2, 1), (2, 1, 1), (2, 2, 2), (3, 1)])
)
def test_replicas_sum_before_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, replicas: tuple[int, ...]) -> None:
    """Each has one micro-batch of an update. Their sums are of each replica's micro-batches first, so the last bits may be others."""
    monkeypatch.setattr(stage_workers, "model", lambda: untied(nn.Identity))  # each replica would have statistics of its own
    microbatches = replicas[0] if name != "2bw" else replicas[0] * len(replicas)
    cluster = ran(tmp_path, name, replicas, microbatches, 2)
    plain = expected(name, len(replicas), microbatches, replicas=replicas)
    for rank, worker in cluster.ended.items():
        stage = Stages(replicas).of(rank)
        assert stage is not None and delays_of(worker) == plain.delays[stage]
        if name not in ("2bw", "vertical"):
            rest = sum(replicas[stage:])
            assert max(delays_of(worker)) == -(-((rest - 1) // replicas[stage]) * replicas[stage] // microbatches)
    equal(cluster, plain, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["pipedream", rotating("vertical"), rotating("latest")])
def test_a_late_stage_begins_with_a_small_rate(tmp_path: Path, name: str) -> None:
    """lr / τ^(1 - t/8) at update t: PipeMare's T1, to the bit."""
    plain = expected(name, 4, 1, rate=lambda delay, step: predict.lr_by_delay(0.05, delay, step, 8))
    equal(ran(tmp_path, name, (1,) * 4, 1, 2, anneal_steps=8), plain)
    assert not torch.equal(plain.weights["0.weight"], expected(name, 4, 1).weights["0.weight"])


BETA = 0.9


@pytest.mark.parametrize(
    ("way", "stages", "count"), each_value([("flush", None), ("2bw", None), ("pipedream", None), ("pipedream", 0.99)], [4, 2], [1, 3])
)
def test_nadam_of_stages_is_torchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: tuple[str, float | None], stages: int, count: int
) -> None:
    """Stage k of K, late by d updates, has beta1 + d (highest - beta1) / K (arXiv 2505.01099)."""
    name, highest = way

    def nadam(parameters: Any, beta: float = BETA) -> torch.optim.Optimizer:
        return torch.optim.NAdam(parameters, lr=0.01, betas=(beta, 0.99), weight_decay=0.01, decoupled_weight_decay=True)

    def by_stage(parameters: list[nn.Parameter], delay: int) -> torch.optim.Optimizer:
        return nadam(parameters, BETA if highest is None else predict.momentum_by_stage(BETA, delay, stages, highest))

    monkeypatch.setattr(stage_workers, "model", without_statistics)
    monkeypatch.setattr(stage_workers, "optimizer_of", lambda net: nadam(net.parameters()))
    microbatches = 1 if name == "pipedream" else stages
    cluster = ran(tmp_path, name, (1,) * stages, microbatches, count, highest_momentum=highest)
    plain = expected(name, stages, microbatches, optimizer=by_stage)
    equal(cluster, plain)
    if highest is not None:
        assert not torch.equal(expected(name, stages, microbatches).weights["0.weight"], plain.weights["0.weight"])
        assert plain.delays[0].most_common(1)[0][0] == stages - 1


UNFIT: dict[str, tuple[str, dict[str, Any], str]] = {
    "momentum by stage of sgd": (
        "SGD",
        {"schedule": "pipedream", "highest_momentum": 0.99},
        "highestMomentum: the momentum of sgd does not go by stage; take torch.optim.NAdam; or leave highestMomentum out",
    ),
    "less momentum by stage than the optimizer's": (
        "NAdam",
        {"schedule": "pipedream", "highest_momentum": 0.8},
        "highestMomentum: beta is 0.9, highest 0.8, stages 2; must be 0 <= beta <= highest < 1",
    ),
    "a prediction of adamw": (
        "AdamW", WAYS["ftpipe"], "predict nesterov: weights of adamw cannot be predicted; known are sgd, adam; or leave predict out",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(UNFIT))
def test_an_optimizer_that_does_not_fit_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    optimizer, words, says = UNFIT[name]
    monkeypatch.setattr(stage_workers, "optimizer_of", lambda net: getattr(torch.optim, optimizer)(net.parameters()))
    problems_of(tmp_path, 1, **words)
    assert says in capfd.readouterr().err


def test_a_stage_without_stash_has_one_memory(tmp_path: Path) -> None:
    """Of all the versions that its forwards take."""
    seen: dict[int, set[int]] = {}

    def before(worker: StageWorker, what: str, step: int, micro: int) -> None:
        if what == "push" and step:
            seen.setdefault(worker.rank, set()).update(worker.own[name].data_ptr() for name in worker.pipe.run.part.parameters)

    for rank, worker in ran(tmp_path, "latest", (1, 1), 2, before=before).ended.items():
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

    with serving(tmp_path, workers=2, shards=1, stages=Stages((1, 1)), **WAYS["2bw"]) as shards:
        Cluster(shards, 4, before).run(STEPS)
    assert held and given == [(-1, -1), (5, 1)]


STRANGE: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "no version": (
        "vertical", lambda given: given[:2] if type(given[2]) is int else given, "worker 0 (stage 0) gave for micro-batch 0 of ",
    ),
    "a word as version": ("vertical", lambda given: (*given[:2], "1") if type(given[2]) is int else given, "is no activation of a stage"),
    "a version below 0": ("vertical", lambda given: (*given[:2], -1) if type(given[2]) is int else given, "is no activation of a stage"),
    "a number": ("latest", lambda given: 5 if len(given) == 2 else given, "is no activation of a stage"),
    "no loss": (
        "latest", lambda given: given[:2] if len(given) == 3 else given, "worker 1 (stage 1) gave for micro-batch 0 of step 0 is no",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(STRANGE))
def test_what_a_neighbour_makes_up_is_refused_by_name(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the key of the link, and a structure of tensors that is none of a stage."""
    words, made_up, says = STRANGE[name]
    write = structures.encode_structure
    monkeypatch.setattr(stage_connections.structures, "encode_structure", lambda given: write(made_up(given)))
    problems = problems_of(tmp_path, 2, **WAYS[words])
    assert all(isinstance(problem, SystemExit) for problem in problems), problems
    assert says in capfd.readouterr().err


def test_gradients_are_given_back_when_their_push_is_answered(tmp_path: Path) -> None:
    """Else each stage would hold a gradient as large as its weights while it computes."""
    held: list[int] = []

    def before(worker: StageWorker, what: str, step: int, micro: int) -> None:
        if what.startswith("take") and step > 4:
            exchange = worker.session.exchange
            waits = any(link.outstanding for link in worker.session.links)
            held.append(0 if waits else sum(one is not None for one in exchange.sources))

    ran(tmp_path, "latest", (1, 1), 2, before=before)
    assert held and not any(held), held


def test_two_stages_may_share_a_weight_where_both_are_as_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_workers, "model", lambda: tied(untied()))
    equal(ran(tmp_path / "2bw", "2bw", (1, 1), 2, 2), expected("2bw", 2, 2))
    why = r"0\.weight is shared by stages 0, 1, whose delays are 1, 0 updates; take schedule: flush or 2bw, or weights: vertical"
    with (
        serving(tmp_path, workers=2, shards=1, stages=Stages((1, 1)), schedule="pipedream") as shards,
        pytest.raises(ValueError, match=why),
    ):
        StageWorker(shards, 0, 1, 1)


def test_weights_that_land_in_an_open_version_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a pull writes into the parameters, or a shard changes memory that it lends: gradients would be wrong silently."""
    monkeypatch.setattr(StageVersions, "fresh", lambda versions: [p.data for p in versions._job.parameters])
    problems = problems_of(tmp_path, 1, **WAYS["pipedream"])
    found = [str(problem) for problem in problems if isinstance(problem, ChangedInPlace)]
    assert found and "lies in the memory of version" in found[0], problems


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
    cluster = ran(folder, name, (1,) * stages, microbatches, chance.choice([1, 2, 3]), before=kills.before)
    kills.check(cluster, seed)
    for rank, worker in cluster.ended.items():
        for key, tensor in worker.own.items():
            assert torch.equal(tensor, torch.full((WIDE,), -float(2**STEPS - 1))), (seed, rank, key, tensor)
    return len(kills.hits), cluster.rewound


@pytest.mark.parametrize("seed", [0, 1, 2, *map(rotating, range(3, 8)), *map(soak, range(8, 200))])
def test_each_batch_counts_once_whoever_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    kill_by_seed(tmp_path, monkeypatch, seed)


@pytest.mark.soak
def test_one_that_is_lost_alone_undoes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But where a gradient that it gave had not left it when its own push counted: seldom."""
    found = [kill_by_seed(tmp_path / str(seed), monkeypatch, seed) for seed in range(300, 308)]
    rewound = [back for killed, back in found if killed == 1]
    assert len(rewound) > 3 and sum(back > 0 for back in rewound) <= 1, rewound
