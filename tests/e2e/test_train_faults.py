"""Shards and workers are killed while a sync job trains: the weights are those of the undisturbed run (measures 3 and 4).

- What returns after a loss has imported torch already, and trains on to the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.e2e.workloads.running import Ran, check_recovery, check_torn, faults, manifest, train
from tests.support.soaking import rotating, soak

EPOCHS, STEPS = 6, 240
CHECKPOINTS = {"everySteps": 25, "periodSeconds": 3600, "keep": 100}


def run(
    folder: Path, *what: str, gates: str = "", way: str = "shared", codecs: tuple[str, str] = ("none", "none"), epochs: int = EPOCHS
) -> Ran:
    """`way`: shared memory, tcp, overlap or delay, or some of them as on a GPU (staged); `codecs` are of pushes and pulls."""
    words = ["stateful.py", str(epochs), gates, *way.split()]
    training = {"compression": {"push": codecs[0], "pull": codecs[1], "ratio": 0.05}, "transport": "tcp" if "tcp" in way else "auto"}
    if "delay" in way:
        training["delay"] = 1
    ran = train(folder, manifest(folder, words, workers=2, shards=2, checkpoint=CHECKPOINTS, training=training), *faults(*what))
    assert ran.summary["transport"] == ("tcp" if "tcp" in way or way == "overlap" else "shared")
    return ran


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The undisturbed run."""
    ran = run(tmp_path_factory.mktemp("undisturbed") / "plain")
    assert ran.summary["steps"] == STEPS and ran.summary["restarts"] == {}
    return ran


@pytest.mark.timeout(2000)
@pytest.mark.parametrize("way", ["delay", *map(rotating, ("shared", "staged", "staged overlap", "delay tcp"))])
def test_a_killed_shard_and_a_killed_worker_change_no_bit(tmp_path: Path, way: str) -> None:
    """Dropout, batch norm, a schedule and shuffled data of loader processes go back with the workers."""
    undisturbed = run(tmp_path / "undisturbed", epochs=2, way="delay" if "delay" in way else "shared")
    what = ("kill:shard-1@step=45", "kill:worker-1@step=60")
    hit = run(tmp_path / "hit", *what, gates="33:25", way=way, epochs=2)
    assert [recovery["fault"] for recovery in hit.summary["recoveries"]] == list(what)
    check_recovery(hit.summary["recoveries"][0], manifests=1)
    assert hit.summary["attempts"] == [1, 2] and hit.summary["updates_lost"] == 0
    assert sum(hit.summary["restarts"].values()) == 2 and undisturbed.summary["restarts"] == {}
    assert hit.sha == undisturbed.sha
    assert_same_file(hit, undisturbed)


@pytest.mark.timeout(2000)
@pytest.mark.parametrize("way", [rotating("shared"), *map(soak, ("tcp", "overlap", "staged", "staged overlap"))])
def test_killed_shards_and_a_killed_worker_change_no_bit(tmp_path: Path, plain: Ran, way: str) -> None:
    what = ("kill:shard-1@step=70", "kill:shard-0@step=145", "kill:worker-1@step=190")
    hit = run(tmp_path / "hit", *what, gates="55:50,130:125", way=way)
    assert [r["fault"] for r in hit.summary["recoveries"]] == list(what)
    for recovery in hit.summary["recoveries"][:2]:
        check_recovery(recovery)
    assert hit.summary["attempts"] == [2, 2] and hit.summary["updates_lost"] == 0
    assert sum(hit.summary["restarts"].values()) == 3
    assert_steps_lost(hit)
    assert hit.sha == plain.sha
    assert_same_file(hit, plain)


@pytest.mark.timeout(2000)
@pytest.mark.soak
@pytest.mark.parametrize("way", ["delay", "delay tcp"])
def test_ten_kills_change_no_bit_of_a_run_with_a_delay(tmp_path: Path, plain: Ran, way: str) -> None:
    """Each takes away who holds one of the two versions: shards with their pods or without, and workers."""
    undisturbed = run(tmp_path / "undisturbed", way=way)
    kinds = ("kill:shard-1", "kill:worker-0", "crash:shard-0", "kill:worker-1", "kill:shard-0")
    hit = run(tmp_path / "hit", *(f"{kinds[number % 5]}@step={30 + 20 * number}" for number in range(10)), way=way)
    assert len(hit.summary["recoveries"]) == 10 and hit.summary["updates_lost"] == 0
    assert undisturbed.sha == hit.sha != plain.sha
    assert_same_file(hit, undisturbed)


@pytest.mark.timeout(2000)
@pytest.mark.soak
@pytest.mark.parametrize(
    ("push", "pull"),
    [("topk", "bf16"), ("bf16", "fp16"), ("fp16", "none"), ("int8", "bf16"), ("randomk", "fp16")],
)
def test_kills_change_no_bit_of_a_run_with_codecs(tmp_path: Path, push: str, pull: str) -> None:
    """What was left out of pushes is put back with the workers, whoever dies."""
    undisturbed = run(tmp_path / "plain", way="tcp", codecs=(push, pull))
    what = ("kill:shard-0@step=70", "kill:worker-1@step=145")
    hit = run(tmp_path / "hit", *what, gates="55:50,130:125", way="tcp", codecs=(push, pull))
    assert [r["fault"] for r in hit.summary["recoveries"]] == list(what)
    check_recovery(hit.summary["recoveries"][0])
    assert hit.summary["codecs"] == undisturbed.summary["codecs"] == f"push {push}, pull {pull}"
    assert hit.summary["attempts"] == [2, 1] and hit.sha == undisturbed.sha
    assert_same_file(hit, undisturbed)


@pytest.mark.timeout(2000)
@pytest.mark.parametrize(
    ("shard", "way"),
    [rotating(1, "shared"), *(soak(shard, way) for shard, way in ((0, "shared"), (0, "tcp"), (1, "tcp")))],
)
def test_a_shard_killed_while_it_writes_a_checkpoint_changes_no_bit(tmp_path: Path, plain: Ran, shard: int, way: str) -> None:
    """Its blocks are held, and the manifest that would name them never comes: the checkpoint before counts."""
    hit = run(tmp_path / "hit", f"kill:shard-{shard}@checkpoint=3", way=way)
    check_torn(hit, shard)
    assert hit.summary["updates_lost"] == 0 and hit.sha == plain.sha
    assert_same_file(hit, plain)


def assert_steps_lost(ran: Ran) -> None:
    """The status has counted the steps that were done again: at least those acknowledged after the checkpoints that were gone back to."""
    status = json.loads((ran.folder / "status.json").read_text())
    shards = [recovery for recovery in ran.summary["recoveries"] if recovery["fault"].startswith("kill:shard-")]
    least = sum(min(recovery["acknowledged"].values()) - recovery["checkpointStep"] for recovery in shards)
    assert 0 < least <= status["restarts"]["stepsLost"] < STEPS, status
    assert status["restarts"]["updatesLost"] == 0 and status["lastRecovery"]["durationSeconds"] > 0, status


def assert_same_file(one: Ran, other: Ran) -> None:
    """Parameters and buffers of both are the same bits."""
    mine, theirs = one.weights(), other.weights()
    assert set(mine) == set(theirs)
    for name, tensor in mine.items():
        assert tensor.equal(theirs[name]), name


def run_returning(folder: Path, *what: str, words: Sequence[str] = ()) -> Ran:
    return train(folder, manifest(folder, ["returning.py", *words], checkpoint={"everySteps": 10, "periodSeconds": 3600}), *faults(*what))


def test_workers_return_as_forks_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time too, when they are forks already."""
    monkeypatch.setenv("PS_FORK_SERVER", "0")
    hit = run_returning(tmp_path / "hit", "kill:shard-1@step=22", "kill:shard-0@step=100")
    assert hit.code == 0 and hit.summary["attempts"] == [2, 2], hit.err
    for rank in (0, 1):
        log = hit.log(f"job-worker-{rank}")
        assert log.count("begins with torch") == 3 and "begins without torch" not in log and "ends after 150 steps" in log
    monkeypatch.setenv("PS_FORK_SERVER", "never")
    undisturbed = run_returning(tmp_path / "undisturbed")
    assert hit.sha == undisturbed.sha and undisturbed.summary["restarts"] == {}


def crashes(step: int, every: int, count: int) -> list[str]:
    """Of shard 1 and shard 0 in turn."""
    return [f"crash:shard-{(number + 1) % 2}@step={step + every * number}" for number in range(count)]


def test_a_shard_whose_process_crashes_goes_on_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some forty times: no worker begins again, no number rises, no block is read, and the bits are those of an undisturbed run."""
    monkeypatch.setenv("PS_FORK_SERVER", "0")
    hit = run_returning(tmp_path / "hit", *crashes(21, 3, 40))
    assert hit.code == 0 and hit.summary["attempts"] == [1, 1] and hit.summary["restarts"] == {} and hit.summary["term"] == 1, hit.err
    assert [worker["rewinds"] for worker in hit.summary["workers"]] == [0, 0]
    log = hit.log("job-shard-")
    went_on = log.count("continues from its memory")  # where steps are quick, a crash may hit who has not yet come to say so
    assert 30 <= went_on <= 40 and 15 <= log.count("no worker begins again") <= 20
    assert hit.summary["steps"] == 150 and hit.summary["applied"] == 600 and went_on <= hit.summary["crashes"] <= 40
    monkeypatch.setenv("PS_FORK_SERVER", "never")
    undisturbed = run_returning(tmp_path / "undisturbed", "crash:shard-1@step=100")
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
    assert hit.sha == run_returning(tmp_path / "undisturbed").sha


@pytest.mark.rotating
def test_a_clipped_norm_is_the_same_after_crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_FORK_SERVER", "0")
    hit = run_returning(tmp_path / "hit", *crashes(21, 4, 20), words=["clip"])
    assert hit.summary["restarts"] == {} and hit.log("job-shard-").count("continues from its memory") == 20, hit.err
    assert hit.sha == run_returning(tmp_path / "undisturbed", words=["clip"]).sha != run_returning(tmp_path / "free").sha


@pytest.mark.parametrize("what", ["crash", rotating("kill")])
def test_buffers_of_a_worker_that_has_left_outlive_shard_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setenv("PS_FORK_SERVER", "0")
    hit, undisturbed = (
        train(folder, manifest(folder, ["leaving_first.py"], checkpoint={"everySteps": 10}), *faults(*texts)).weights()
        for folder, texts in ((tmp_path / "hit", [f"{what}:shard-0@step=100"]), (tmp_path / "undisturbed", []))
    )
    assert "1.running_mean" in hit and hit.keys() == undisturbed.keys()
    assert all(torch.equal(hit[name], undisturbed[name]) for name in hit)
