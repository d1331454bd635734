"""What returns after a loss has imported torch already, and trains on to the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.e2e.workloads.running import Ran, faults, manifest, train
from tests.support.soaking import rotating


def run(folder: Path, *what: str, words: Sequence[str] = ()) -> Ran:
    folder.mkdir()
    return train(folder, manifest(folder, ["returning.py", *words], checkpoint={"everySteps": 10, "periodSeconds": 3600}), *faults(*what))


def test_workers_return_as_forks_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time too, when they are forks already."""
    monkeypatch.setenv("PS_FORK_SERVER", "0")
    hit = run(tmp_path / "hit", "kill:shard-1@step=22", "kill:shard-0@step=100")
    assert hit.code == 0 and hit.summary["attempts"] == [2, 2], hit.err
    for rank in (0, 1):
        log = hit.log(f"job-worker-{rank}")
        assert log.count("begins with torch") == 3 and "begins without torch" not in log and "ends after 150 steps" in log
    monkeypatch.setenv("PS_FORK_SERVER", "never")
    undisturbed = run(tmp_path / "undisturbed")
    assert hit.sha == undisturbed.sha and undisturbed.summary["restarts"] == {}


def crashes(step: int, every: int, count: int) -> list[str]:
    """Of shard 1 and shard 0 in turn."""
    return [f"crash:shard-{(number + 1) % 2}@step={step + every * number}" for number in range(count)]


def test_a_shard_whose_process_crashes_goes_on_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some forty times: no worker begins again, no number rises, no block is read, and the bits are those of an undisturbed run."""
    monkeypatch.setenv("PS_FORK_SERVER", "0")
    hit = run(tmp_path / "hit", *crashes(21, 3, 40))
    assert hit.code == 0 and hit.summary["attempts"] == [1, 1] and hit.summary["restarts"] == {} and hit.summary["term"] == 1, hit.err
    assert [worker["rewinds"] for worker in hit.summary["workers"]] == [0, 0]
    log = hit.log("job-shard-")
    went_on = log.count("continues from its memory")  # where steps are quick, a crash may hit who has not yet come to say so
    assert 30 <= went_on <= 40 and 15 <= log.count("no worker begins again") <= 20
    assert hit.summary["steps"] == 150 and hit.summary["applied"] == 600 and went_on <= hit.summary["crashes"] <= 40
    monkeypatch.setenv("PS_FORK_SERVER", "never")
    undisturbed = run(tmp_path / "undisturbed", "crash:shard-1@step=100")
    assert undisturbed.summary["attempts"] == [1, 2], "without a keeper the shard itself is hit"
    assert hit.sha == undisturbed.sha


@pytest.mark.rotating
def test_a_shard_whose_process_hangs_goes_on_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_FORK_SERVER", "0")
    job = manifest(
        tmp_path, ["returning.py"], of_shards={"progressDeadlineSeconds": 6}, checkpoint={"everySteps": 10, "periodSeconds": 3600}
    )
    hit = train(tmp_path, job, *faults("hang:shard-1@step=22", "hang:shard-0@step=100"))
    assert hit.summary["attempts"] == [1, 1] and hit.summary["restarts"] == {}, hit.err
    assert [worker["rewinds"] for worker in hit.summary["workers"]] == [0, 0]
    log = hit.log("job-shard-")
    assert log.count("has shown no sign of life for 3.0 s") == log.count("a hang ended the process") == 2
    monkeypatch.setenv("PS_FORK_SERVER", "never")
    assert hit.sha == run(tmp_path / "undisturbed").sha


@pytest.mark.rotating
def test_a_clipped_norm_is_the_same_after_crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_FORK_SERVER", "0")
    hit = run(tmp_path / "hit", *crashes(21, 4, 20), words=["clip"])
    assert hit.summary["restarts"] == {} and hit.log("job-shard-").count("continues from its memory") == 20, hit.err
    assert hit.sha == run(tmp_path / "undisturbed", words=["clip"]).sha != run(tmp_path / "free").sha


@pytest.mark.parametrize("what", ["crash", rotating("kill")])
def test_buffers_of_a_worker_that_has_left_outlive_shard_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setenv("PS_FORK_SERVER", "0")
    hit, undisturbed = (
        train(folder, manifest(folder, ["leaving_first.py"], checkpoint={"everySteps": 10}), *faults(*texts)).weights()
        for folder, texts in ((made(tmp_path / "hit"), [f"{what}:shard-0@step=100"]), (made(tmp_path / "undisturbed"), []))
    )
    assert "1.running_mean" in hit and hit.keys() == undisturbed.keys()
    assert all(torch.equal(hit[name], undisturbed[name]) for name in hit)


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder
