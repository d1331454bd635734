"""What becomes of a stage's gradient before it is pushed, on real shards: corrected for its age, clipped by the norm of all stages.

One process that keeps all weights, and one that torch clips, give the same numbers.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from psjob.api.rule_choice import chosen_rule
from psjob.api.staged import StageVersions
from psjob.modes.stages import Stages
from psjob.pipeline import predict
from psjob.pipeline.predict import corrector
from psjob.process.errors import Refused
from psjob.worker.exchange import GradientClip
from tests.live import stage_workers
from tests.live.live_shards import Worker, serving
from tests.live.stage_workers import (
    WAYS,
    Cluster,
    StageWorker,
    alone,
    kill_once,
    model,
    old_weights,
    optimizer_of,
    problems_of,
    tied,
    too_few,
    trained,
    untied,
    way_of,
    without_statistics,
)  # fmt: skip
from tests.support.covering import each_value
from tests.support.soaking import rotating

STEPS = 10
LIMIT = 0.1
"""Below the norm of most steps."""
CORRECT: dict[str, tuple[str, dict[str, float]]] = {
    "dc-asgd": ("dc-asgd", {}),
    "dc-asgd-c": ("dc-asgd", {"lam": 3000.0, "adaptive": 0}),
    "gap-aware": ("gap-aware", {"average": 0.9}),
    "gap-aware-max": ("gap-aware", {"max_lr": 0.2}),
}


@pytest.fixture(autouse=True)
def no_tied_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_workers, "model", without_statistics)


@pytest.fixture
def tied_weight(monkeypatch: pytest.MonkeyPatch, no_tied_weight: None) -> None:
    monkeypatch.setattr(stage_workers, "model", model)


def wanted(name: str, how: str | None, stages: int, microbatches: int, **more: Any) -> dict[str, torch.Tensor]:
    correct = None if how is None else corrector(way_of(name), *CORRECT[how])
    return old_weights(name, stages, microbatches, steps=STEPS, correct=correct, **more).weights


def corrected(folder: Path, name: str, how: str, replicas: tuple[int, ...], microbatches: int, count: int, **more: Any) -> Cluster:
    word, options = CORRECT[how]
    return trained(folder, replicas, microbatches, count, steps=STEPS, **WAYS[name], correct=word, correct_options=options, **more)


def worst(cluster: Cluster, wanted: dict[str, torch.Tensor]) -> float:
    """The largest difference of a weight."""
    found = [(key, tensor) for worker in cluster.ended.values() for key, tensor in worker.own.items() if key in wanted]
    return max(float((tensor - wanted[key]).abs().max()) for key, tensor in found)


LARGE = [(name, how, (4, 4), count) for name in ("2bw", "pipedream") for how in CORRECT for count in (1, 3)]


@pytest.mark.parametrize(
    ("name", "how", "size", "count"),
    [*each_value(["2bw", "pipedream"], CORRECT, [(2, 2), (4, 1)], [1, 3], skip=lambda name, how, size, count: too_few(name, size)),
     pytest.param(*LARGE[-1], id="large"), *(rotating(*row, id=f"large{number}") for number, row in enumerate(LARGE[:-1]))],
)  # fmt: skip
def test_a_corrected_gradient_is_that_of_one_process(tmp_path: Path, name: str, how: str, size: tuple[int, int], count: int) -> None:
    """`size` is of stages and micro-batches."""
    stages, microbatches = size
    cluster = corrected(tmp_path, name, how, (1,) * stages, microbatches, count)
    assert worst(cluster, wanted(name, how, stages, microbatches)) == 0
    assert worst(cluster, wanted(name, None, stages, microbatches)) > 1e-5, "nothing was corrected"


@pytest.mark.parametrize(("name", "how"), each_value(["vertical", "predict"], ["dc-asgd", "gap-aware"]))
def test_the_open_version_is_what_the_forward_took(tmp_path: Path, name: str, how: str) -> None:
    """With predict: nesterov that is the prediction, so that what is corrected is its error."""
    cluster = corrected(tmp_path, name, how, (1,) * 4, 1, 2)
    within = 1e-5 if name == "predict" else 0.0  # a prediction is made of two versions here, of the optimizer's state there
    assert worst(cluster, wanted(name, how, 4, 1)) <= within
    assert worst(cluster, wanted(name, None, 4, 1)) > 3e-5


def test_a_rate_by_delay_is_that_of_the_step(tmp_path: Path) -> None:
    cluster = corrected(tmp_path, "pipedream", "gap-aware", (1,) * 4, 1, 2, anneal_steps=8)
    assert worst(cluster, wanted("pipedream", "gap-aware", 4, 1, rate=lambda delay, step: predict.lr_by_delay(0.05, delay, step, 8))) == 0


@pytest.mark.parametrize(
    ("way", "how"), each_value([("2bw", 2, 1), ("pipedream", 2, 1, 1), ("pipedream", 2, 2, 2)], ["dc-asgd", "gap-aware"])
)
def test_each_replica_corrects_the_mean_of_its_own_micro_batches(tmp_path: Path, way: tuple[Any, ...], how: str) -> None:
    """`way` is a schedule, and how many workers each stage has."""
    name, *several = way
    replicas, microbatches = tuple(several), 2 if name == "pipedream" else 4
    cluster = corrected(tmp_path, name, how, replicas, microbatches, 2)
    assert worst(cluster, wanted(name, how, len(replicas), microbatches, replicas=replicas)) < 1e-5
    assert worst(cluster, wanted(name, None, len(replicas), microbatches, replicas=replicas)) > 3e-5


@pytest.mark.parametrize(("stages", "how"), each_value([2, 4], ["dc-asgd-c", "gap-aware"]))
def test_what_is_clipped_is_the_corrected_gradient(tmp_path: Path, how: str, stages: int) -> None:
    cluster = corrected(tmp_path, "2bw", how, (1,) * stages, 4, 2, max_grad_norm=LIMIT)
    assert worst(cluster, wanted("2bw", how, stages, 4, clip=LIMIT)) < 1e-6
    assert worst(cluster, wanted("2bw", how, stages, 4)) > 1e-4 and worst(cluster, wanted("2bw", None, stages, 4, clip=LIMIT)) > 1e-5


@pytest.mark.parametrize("how", ["dc-asgd", "gap-aware"])
def test_a_weight_of_two_stages_is_corrected_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Only the earlier stage pushes it, twice as large, since the shards take the mean of both."""
    monkeypatch.setattr(stage_workers, "model", lambda: tied(without_statistics()))
    cluster = corrected(tmp_path, "2bw", how, (1, 1), 2, 2)
    assert worst(cluster, wanted("2bw", how, 2, 2)) == 0


@pytest.mark.parametrize("how", ["dc-asgd", rotating("gap-aware")])
def test_weights_of_now_in_place_of_the_open_ones_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The mutant corrects nothing."""
    outgoing = StageVersions.outgoing

    def newest(versions: StageVersions, grads: Any, _opened: Any, hyperparameters: Any) -> Any:
        return outgoing(versions, grads, versions.newest()[1], hyperparameters)

    monkeypatch.setattr(StageVersions, "outgoing", newest)
    cluster = corrected(tmp_path, "pipedream", how, (1,) * 4, 1, 1)
    assert worst(cluster, wanted("pipedream", how, 4, 1)) > 3e-5
    assert worst(cluster, wanted("pipedream", None, 4, 1)) < 1e-6


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"schedule": "flush", "correct": "dc-asgd"}, "correct dc-asgd: with schedule: flush no gradient is of old weights; leave"),
        (
            {"schedule": "pipedream", "stage_weights": "recompute", "correct": "gap-aware"},
            "correct gap-aware: with weights: recompute a gradient is of the newest weights; leave correct out",
        ),
        ({"schedule": "pipedream", "stage_weights": "latest", "correct": "dc-asgd"}, "with weights: latest a stage keeps no older weights"),
        ({"schedule": "2bw", "correct_options": {"lam": 1.0}}, "correctOptions has lam, and training.pipeline.correct names no correction"),
        (
            {"schedule": "2bw", "correct": "gap-aware", "correct_options": {"lam": 1.0}},
            "training.pipeline.correctOptions has lam, which correct gap-aware does not take; it takes average and max_lr",
        ),
        ({"schedule": "2bw", "correct": "gap-aware", "correct_options": {"average": 1.0}}, "average is 0 or more and below 1, got 1"),
        ({"schedule": "2bw", "correct": "dc-asgd", "correct_options": {"adaptive": 2.0}}, "adaptive of correct dc-asgd is 0 or 1, got 2"),
    ],
)
def test_what_has_nothing_to_correct_is_refused(tmp_path: Path, words: dict[str, Any], says: str) -> None:
    with serving(tmp_path, workers=2, shards=1, stages=Stages((1, 1)), **words) as shards, pytest.raises(Refused) as refused:
        StageWorker(shards, 0, 1, 2)
    assert says in str(refused.value)


def test_a_loss_that_rises_is_refused_with_dc_asgd(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_workers, "optimizer_of", lambda net: torch.optim.SGD(net.parameters(), lr=0.1, maximize=True))
    problems_of(tmp_path, 2, schedule="2bw", correct="dc-asgd")
    assert "training.pipeline.correct dc-asgd: it takes g² for the curvature of a loss that is to fall" in capfd.readouterr().err


LOW = 0.2
"""A norm below that of each step."""


clipped = partial(trained, max_grad_norm=LOW)


@pytest.mark.usefixtures("tied_weight")
@pytest.mark.parametrize(("replicas", "count"), each_value([(1,), (1, 1), (1, 1, 1, 1), (2, 1)], [1, 3]))
def test_flush_is_clipped_as_one_process_clips(tmp_path: Path, replicas: tuple[int, ...], count: int) -> None:
    cluster, wanted, free = clipped(tmp_path, replicas, count=count), alone(4, limit=LOW)[0].state_dict(), alone(4)[0].state_dict()
    for worker in cluster.ended.values():
        for name in worker.pipe.run.part.parameters:
            if not (sum(replicas) > len(replicas) and name.startswith("4.")):  # each replica has batch norm's statistics of its own
                torch.testing.assert_close(worker.own[name], wanted[name], atol=1e-6 if max(replicas) == 1 else 5e-3, rtol=0.0)
    assert (free["0.weight"] - wanted["0.weight"]).abs().max() > 0.02


@pytest.mark.usefixtures("tied_weight")
@pytest.mark.parametrize(("moment", "rank"), each_value(["push", "pushed"], [0, 1, 2]))
def test_a_stage_that_dies_around_its_push_changes_no_bit(tmp_path: Path, rank: int, moment: str) -> None:
    """The others' blocks are measured and wait for its own."""
    calm, hit = clipped(tmp_path / "calm", (1, 1, 1)), clipped(tmp_path / "hit", (1, 1, 1), before=kill_once(rank, moment))
    assert hit.died == 1
    for number, worker in hit.ended.items():
        for name, tensor in worker.own.items():
            assert torch.equal(tensor, calm.ended[number].own[name]), (number, name)


@pytest.mark.parametrize("stages", [rotating(2), 4])
def test_2bw_is_clipped_as_old_weights_in_one_process_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: int) -> None:
    monkeypatch.setattr(stage_workers, "model", untied)
    cluster = clipped(tmp_path, (1,) * stages, steps=12, schedule="2bw")
    plain = old_weights("2bw", stages, 4, steps=12, clip=LOW)
    for rank, worker in cluster.ended.items():
        assert dict(worker.pipe.delays) == plain.delays[rank], "a step waits for no norm that is not there yet"
        for name in worker.pipe.run.part.parameters:
            torch.testing.assert_close(worker.own[name], plain.weights[name], atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("more", [{}, {"schedule": "2bw"}])
def test_an_optimizer_without_a_rule_on_the_shards_is_refused(tmp_path: Path, more: dict[str, str]) -> None:
    """A shard would answer a stage's push with the gradient."""
    said = "RMSprop has no rule on the shards, and a job of stages needs one; use SGD, Adam, AdamW, NAdam"
    with serving(tmp_path, workers=2, shards=1, stages=Stages((1, 1)), **more) as shards, pytest.raises(Refused, match=said):
        chosen_rule(torch.optim.RMSprop(untied().parameters()), shards.config)


@pytest.mark.usefixtures("tied_weight")
def test_a_shard_has_room_for_the_pushes_of_each_stage_once(tmp_path: Path) -> None:
    """Four workers of four stages push as much together as one worker of the whole model, and a weight that two of them have twice."""
    said: list[str] = []
    with serving(tmp_path, workers=4, shards=1, stages=Stages((1,) * 4), max_grad_norm=LOW) as shards:
        store = shards.servers[0].store
        store.on_problem, store.budget = said.append, 2 * sum(p.numel() * 4 for p in model().parameters())
        cluster = Cluster(shards, 4)
        cluster.run(2)
    assert not said


def test_a_step_that_is_passed_over_leaves_no_clipping_behind(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=1) as shards:
        net = untied()
        worker = Worker(shards, 0, net, optimizer_of(net), 1, overlap=False)
        worker.job.places.skipping = True
        worker.job.clipping.ask(worker.job.pairs[:1], GradientClip(norm=1.0))
        worker.job.step(worker.job.pairs[0], None)
        assert worker.job.clipping.take(worker.job.pairs[0]) == GradientClip()
