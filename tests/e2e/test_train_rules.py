"""Rules with state a worker on the shards, in a whole job: a shard and a worker are killed, and training goes on from what was kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.e2e.workloads import ledger, mlp
from tests.e2e.workloads.running import faults, manifest, train
from tests.soaking import rotating, soak

STEPS = 200
pytestmark = pytest.mark.timeout(1500)


@pytest.mark.parametrize(
    ("rule", "transport"),
    [rotating("dana-dc", "auto"), *(soak(rule, "tcp") for rule in ("dana-zero", "gap-aware-dana", "dc-asgd"))],
)
def test_a_job_with_kills_learns_by_a_named_rule(tmp_path: Path, rule: str, transport: str) -> None:
    training = {"mode": "async", "updateRule": rule, "transport": transport}
    checkpoint = {"everySteps": 25, "interval": "1h", "keep": 100}
    words = ["mlp.py", "sgd", str(STEPS), "--pace", "0.02", "--gates", "55:50,120:100"]
    what = ("kill:ps-1@step=80", "kill:worker-1@step=140")
    ran = train(tmp_path, manifest(tmp_path, words, training=training, checkpoint=checkpoint), *faults(*what))
    assert [recovery["fault"] for recovery in ran.summary["recoveries"]] == list(what)
    assert ran.summary["attempts"] == [1, 2] and sum(ran.summary["restarts"].values()) == 2
    assert ran.summary["result"] == "Complete" and ran.summary["steps"] == STEPS and ran.summary["updates_lost"] > 0
    model = mlp.build()
    x, y = mlp.samples(STEPS, 2).tensors
    before = loss(model, x, y)
    model.load_state_dict(ran.weights())
    assert loss(model, x, y) < 0.4 * before
    names = {slot for path in ran.folder.glob("v*shard*.safetensors") for slot in state_of(path)}
    assert {"sent@0", "sent@1"} <= names or rule == "dana-zero"
    assert {"v@0", "v@1"} <= names or rule == "dc-asgd"


@pytest.mark.rotating
def test_what_a_killed_shard_and_its_first_answer_lost_is_what_is_missing(tmp_path: Path) -> None:
    """The first push after the loss is based on weights that are gone: lr-over-lag cannot know its lag. Each push that counts adds 1."""
    training = {"mode": "async", "updateRule": "lr-over-lag"}
    words = ["ledger.py", str(STEPS), "0.02", "58:50"]
    job = manifest(tmp_path, words, workers=1, training=training, checkpoint={"everySteps": 25, "interval": "1h", "keep": 100})
    ran = train(tmp_path, job, *faults("kill:ps-1@step=88"))
    table = ledger.counted(ran.weights(), 1, 2)
    assert table[0] and all(block == [STEPS] for block in table[0])
    assert table[1] and all(block == [STEPS - ran.summary["updates_lost"]] for block in table[1])
    (recovery,) = ran.summary["recoveries"]
    acknowledged = recovery["acknowledged"]["0"]
    assert ran.summary["updates_lost"] > acknowledged - recovery["checkpointStep"], "more than what the shard forgot"


def loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        return float(mlp.loss_of(model, (x, y)))


def state_of(path: Path) -> set[str]:
    """Names of state tensors in a shard's file, whatever the block."""
    with safe_open(path, "pt") as file:
        return {name.partition(".")[2] for name in file.keys()}  # noqa: SIM118
