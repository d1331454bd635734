"""Two models, and a group that comes later: one checkpoint, and the bits of an undisturbed run after any kill (real processes).

- The norm of the mean gradient over two shards: by manifest or by script, the same bits whoever is killed (real processes).
- Accumulated gradients on uneven data: the sums of torch, whoever is killed in the middle of a step (real processes).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from psjob.api.slices import Slices
from tests.e2e.workloads import accumulating
from tests.e2e.workloads.accumulating import EPOCHS, EVERY, SIZE
from tests.e2e.workloads.clipping import LIMIT
from tests.e2e.workloads.running import faults, manifest, train
from tests.support.soaking import rotating, soak

pytestmark = pytest.mark.timeout(600)


def job(folder: Path, *words: str, **training: object) -> Path:
    return manifest(
        folder, [*words], workers=2, shards=2, training={"mode": "sync", "seed": 2, **training},
        checkpoint={"periodSeconds": 3600, "everySteps": 10},
    )  # fmt: skip


@pytest.mark.parametrize("training", [rotating({}), soak({"updateAt": "worker"})])
def test_a_kill_changes_no_bit_of_two_models(tmp_path: Path, training: dict[str, object]) -> None:
    calm = train(tmp_path / "calm", job(tmp_path / "calm", "two_models.py", "0", **training))
    names = set(calm.weights())
    assert {"generator.0.weight", "critic.3.bias", "generator.1.running_mean"} <= names
    assert calm.summary["steps"] == 60
    for hit in ("kill:worker-1@step=27", "kill:shard-1@step=25"):
        folder = tmp_path / hit.replace(":", "-")
        assert train(folder, job(folder, "two_models.py", "0.1", **training), *faults(hit)).sha == calm.sha, hit


@pytest.mark.soak
@pytest.mark.parametrize("training", [{}, {"updateAt": "worker"}])
def test_a_kill_changes_no_bit_of_a_group_that_came_later(tmp_path: Path, training: dict[str, object]) -> None:
    calm = train(tmp_path / "calm", job(tmp_path / "calm", "late_group.py", "0", **training))
    assert calm.summary["steps"] == 60
    for hit in ("kill:worker-1@step=12", "kill:shard-1@step=45"):  # before the group is there, and after
        folder = tmp_path / hit.replace(":", "-")
        assert train(folder, job(folder, "late_group.py", "0.1", **training), *faults(hit)).sha == calm.sha, hit


def job_clipping(folder: Path, *words: str, **training: Any) -> Path:
    return manifest(
        folder, ["clipping.py", *words], workers=3, shards=2, training={"mode": "sync", **training},
        checkpoint={"periodSeconds": 3600, "everySteps": 10}, of_shards={"progressDeadlineSeconds": 3},
    )  # fmt: skip


@pytest.mark.soak
def test_a_kill_changes_no_bit_of_a_clipped_run(tmp_path: Path) -> None:
    calm = train(tmp_path / "calm", job_clipping(tmp_path / "calm", "0", sync={"maxGradNorm": LIMIT}))
    assert calm.summary["metrics"]["grad_norm"] > LIMIT, "something was clipped"
    asked = train(tmp_path / "asked", job_clipping(tmp_path / "asked", "0", "script"))
    assert asked.sha == calm.sha, "by the script or by the manifest"
    assert train(tmp_path / "none", job_clipping(tmp_path / "none", "0")).sha != calm.sha
    for number, hit in enumerate(("kill:shard-0@step=25", "kill:shard-1@step=25", "kill:worker-1@step=25", "stop:shard-1@step=33")):
        folder = tmp_path / str(number)
        assert train(folder, job_clipping(folder, "0.05", sync={"maxGradNorm": LIMIT}), *faults(hit)).sha == calm.sha, hit


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("mode", "sync", "said"),
    [
        ("async", {}, 'spec.training.sync: Invalid value: "object": is allowed only in spec.training.mode: sync'),
        ("sync", {"backupWorkers": 1}, "spec.training.sync.maxGradNorm: Invalid value: 0.5: must not be given with spec.training.sync"),
    ],
)
def test_a_mode_without_a_mean_of_all_workers_is_refused(tmp_path: Path, mode: str, sync: dict[str, int], said: str) -> None:
    ran = train(tmp_path, job_clipping(tmp_path, "0", mode=mode, sync={"maxGradNorm": LIMIT, **sync}), expect=2)
    assert said in ran.err


WORKERS, SHARDS, SEED = 3, 2, 5


def job_data(folder: Path, form: str, *words: str) -> Path:
    return manifest(
        folder, ["accumulating.py", form, *words], workers=WORKERS, shards=SHARDS, training={"mode": "sync", "seed": SEED},
        checkpoint={"periodSeconds": 3600, "everySteps": 2},
    )  # fmt: skip


def expected(form: str, stream: bool) -> dict[str, torch.Tensor]:
    """The weights of one process that makes every worker's gradients itself; a worker without a batch of its own counts as absent."""
    model = accumulating.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(EPOCHS):
        if stream:
            batches = list(DataLoader(accumulating.Stream(), batch_size=SIZE))
        else:
            data = accumulating.data()
            order = Slices(DataLoader(data, batch_size=SIZE, shuffle=True), SEED, 0, 1).batches(epoch)
            batches = [data[indices] for indices in order]
        rounds = -(-len(batches) // WORKERS)
        ends = [*range(EVERY, rounds + 1, EVERY)] + ([rounds] if rounds % EVERY and form != "drop" else [])
        begin = 0
        for end in ends:
            sums = [torch.zeros_like(p) for p in model.parameters()]
            present = 0
            for rank in range(WORKERS):
                turns = range(begin, end)
                if all(turn * WORKERS + rank >= len(batches) for turn in turns):
                    continue
                present += 1
                for turn in turns:
                    number = turn * WORKERS + rank
                    again = (turn - 1) * WORKERS + rank if stream else number % len(batches)
                    accumulating.loss_of(model, batches[number if number < len(batches) else again]).backward()
                for total, p in zip(sums, model.parameters(), strict=True):
                    total += p.grad
                model.zero_grad()
            for total, p in zip(sums, model.parameters(), strict=True):
                p.grad = total / present
            optimizer.step()
            optimizer.zero_grad()
            begin = end
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.rotating
@pytest.mark.parametrize("form", ["drop", "length", "after"])
def test_accumulated_gradients_are_those_of_torch(tmp_path: Path, form: str) -> None:
    """Each sample once an epoch, and all workers at the same step, though the last round has fewer batches than workers."""
    for stream in (False, True):
        ran = train(tmp_path / f"{stream}", job_data(tmp_path / f"{stream}", form, "0", *(["stream"] if stream else [])))
        torch.testing.assert_close(ran.weights(), expected(form, stream), rtol=1e-5, atol=1e-6)


@pytest.mark.soak
@pytest.mark.parametrize("form", ["length", "after"])
def test_a_kill_in_the_middle_of_an_accumulation_changes_no_bit(tmp_path: Path, form: str) -> None:
    calm = train(tmp_path / "calm", job_data(tmp_path / "calm", form, "0"))
    for hit in ("kill:worker-1@step=5", "kill:shard-1@step=6"):
        folder = tmp_path / hit.replace(":", "-")
        assert train(folder, job_data(folder, form, "0.1"), *faults(hit)).sha == calm.sha, hit
    folder = tmp_path / "stream"
    undisturbed = train(tmp_path / "still", job_data(tmp_path / "still", form, "0", "stream"))
    assert train(folder, job_data(folder, form, "0.1", "stream"), *faults("kill:worker-2@step=5")).sha == undisturbed.sha
