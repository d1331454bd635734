"""Two models, and a group that comes later: one checkpoint, and the bits of an undisturbed run after any kill (real processes)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.workloads.running import faults, manifest, train
from tests.soaking import rotating, soak

pytestmark = pytest.mark.timeout(600)


def job(folder: Path, *words: str, **training: object) -> Path:
    folder.mkdir(exist_ok=True)
    return manifest(
        folder, [*words], workers=2, shards=2, training={"mode": "sync", "seed": 2, **training},
        checkpoint={"interval": "1h", "everySteps": 10},
    )  # fmt: skip


@pytest.mark.parametrize("training", [rotating({}), soak({"updateAt": "worker"})])
def test_a_kill_changes_no_bit_of_two_models(tmp_path: Path, training: dict[str, object]) -> None:
    calm = train(tmp_path / "calm", job(tmp_path / "calm", "two_models.py", "0", **training))
    names = set(calm.weights())
    assert {"generator.0.weight", "critic.3.bias", "generator.1.running_mean"} <= names
    assert calm.summary["steps"] == 60
    for hit in ("kill:worker-1@step=27", "kill:ps-1@step=25"):
        folder = tmp_path / hit.replace(":", "-")
        assert train(folder, job(folder, "two_models.py", "0.1", **training), *faults(hit)).sha == calm.sha, hit


@pytest.mark.soak
@pytest.mark.parametrize("training", [{}, {"updateAt": "worker"}])
def test_a_kill_changes_no_bit_of_a_group_that_came_later(tmp_path: Path, training: dict[str, object]) -> None:
    calm = train(tmp_path / "calm", job(tmp_path / "calm", "late_group.py", "0", **training))
    assert calm.summary["steps"] == 60
    for hit in ("kill:worker-1@step=12", "kill:ps-1@step=45"):  # before the group is there, and after
        folder = tmp_path / hit.replace(":", "-")
        assert train(folder, job(folder, "late_group.py", "0.1", **training), *faults(hit)).sha == calm.sha, hit
