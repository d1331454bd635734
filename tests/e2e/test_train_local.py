"""Local SGD in real processes: rounds of DiLoCo to the last bit, whoever dies in the middle of one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from psjob.checkpoint.manifest import newest_manifest
from psjob.process.config import LocalConfig
from tests.e2e.oracle import assert_same_bits
from tests.e2e.workloads import mlp
from tests.e2e.workloads.running import faults, manifest, stopped_from, train
from tests.support.reference import local_reference

OUTER = LocalConfig(inner_steps=4)
STEPS, ROUNDS = 122, 31
"""Of each worker; the last round has two steps."""
CHECKPOINTS = {"everySteps": 5, "periodSeconds": 3600, "keep": 100}
LOCAL: dict[str, Any] = {"mode": "local", "local": {"innerSteps": OUTER.inner_steps}}
pytestmark = pytest.mark.timeout(2000)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def oracle(optimizer: str, workers: int, last: int | None = None) -> torch.nn.Module:
    """One process that makes all steps."""

    def batch(step: int, rank: int) -> mlp.Batch | None:
        return mlp.micro_batches(STEPS, workers, step, last)[rank]

    return local_reference(mlp.build, partial(mlp.optimizer_for, optimizer), batch, mlp.loss_of, workers, STEPS, OUTER).model


@pytest.mark.rotating
def test_kills_in_the_middle_of_rounds_change_no_bit(tmp_path: Path) -> None:
    """A worker, a shard and the coordinator's shard; the last step of the data is rank 0's alone."""
    what = ("kill:worker-1@step=8", "kill:shard-1@step=14", "kill:shard-0@step=22")
    words = ["mlp.py", "adam", str(STEPS), "--last", "1", "--pace", "0.02", "--gates", "13:10,21:15"]
    job = manifest(tmp_path, words, training=LOCAL, checkpoint=CHECKPOINTS)
    ran = train(tmp_path, job, *faults(*what))
    assert [recovery["fault"] for recovery in ran.summary["recoveries"]] == list(what)
    assert ran.summary["attempts"] == [2, 2] and ran.summary["updates_lost"] == 0 and ran.summary["steps"] == ROUNDS
    assert f"rank 0 ends at step {ROUNDS - 1}" in ran.out, "the round that was open is pushed when the script ends"
    assert_same_bits(ran, oracle("adam", 2, last=1))


@pytest.mark.soak
def test_ranks_that_came_back_count_the_batches_that_they_do_not_have(tmp_path: Path) -> None:
    """An epoch of three workers has 27 steps, rank 2 has no batch in the last; all go back to the middle of it."""
    shas = []
    for number, what in enumerate([(), ("kill:shard-0@step=3",)]):
        folder = tmp_path / str(number)
        training = {"mode": "local", "local": {"innerSteps": 7}}
        job = manifest(
            folder, ["stateful.py", "2", "3:2"], workers=3, shards=1, training=training, checkpoint={"everySteps": 2, "periodSeconds": 3600}
        )
        ran = train(folder, job, *faults(*what))
        assert [recovery["checkpointStep"] for recovery in ran.summary["recoveries"]] == [2] * len(what) and ran.summary["steps"] == 8
        shas.append(ran.sha)
    assert shas[0] == shas[1]


@pytest.mark.soak
@pytest.mark.parametrize(
    "own", [{"local": {"innerSteps": 4, "quorum": 2, "graceSeconds": 0.05}}, {**LOCAL, "updateRule": "delayed-nesterov"}]
)
def test_rounds_that_do_not_wait_for_all_go_on_whoever_dies(tmp_path: Path, own: dict[str, Any]) -> None:
    """Two of three workers make a round, or each makes its own; a worker and a shard are killed, and every worker comes to its end."""
    training = {"mode": "local", **own}
    words = ["mlp.py", "adam", str(STEPS), "--pace", "0.02", "--gates", "13:10"]
    what = ("kill:worker-1@step=6", "kill:shard-1@step=16")
    ran = train(tmp_path, manifest(tmp_path, words, workers=3, training=training, checkpoint=CHECKPOINTS), *faults(*what))
    assert [recovery["fault"] for recovery in ran.summary["recoveries"]] == list(what)
    assert ran.summary["result"] == "Complete" and ran.summary["attempts"] == [1, 2]
    made, _ = newest_manifest(ran.folder, str(ran.summary["run"]))
    assert made is not None and made.final and {worker["clock"] for worker in made.workers.values()} == {ROUNDS}
    assert made.step >= (3 * ROUNDS if "updateRule" in own else ROUNDS), "a version is a round that counted"


@pytest.mark.soak
def test_a_stop_in_the_middle_of_a_round_resumes_on_other_shards(tmp_path: Path) -> None:
    """An optimizer without a rule, and a loop without `ps.shard`: it makes the steps of its ended rounds again, without effect."""
    words = ["mlp.py", "rmsprop", str(STEPS), "--replay", "--pace", "0.05"]
    job = manifest(tmp_path, words, training=LOCAL, checkpoint={"everySteps": 5, "periodSeconds": 3600})
    stopped = stopped_from(tmp_path, job, 1)
    checkpoint = stopped.summary["checkpoint"]["step"]
    assert stopped.code == 130 and 5 <= checkpoint == stopped.summary["steps"] < ROUNDS, "the last checkpoint holds the last round"
    assert f"stopped at round {checkpoint}, checkpoint at round {checkpoint}" in stopped.err
    resumed = train(tmp_path, job, "--resume", str(stopped.folder), "--set", "spec.shards.replicas=3")
    assert resumed.summary["steps"] == ROUNDS
    assert resumed.summary["applied"] == (ROUNDS - checkpoint) * 2 * 3, "only what was missing is trained"
    assert_same_bits(resumed, oracle("rmsprop", 2))
