"""Rules with state a worker on the shards, in a whole job: a shard and a worker are killed, and training continues from what was kept.

- Bounded staleness as a user runs it: shards and workers are killed, the job is stopped, and it continues in another mode.
- A running job is told another mode by its config: it goes over at a checkpoint, and no push is lost or counts twice.
- Modes in which the coordinator decides, as jobs: processes are killed in the middle, and every push counts at most once.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from psjob.checkpoint.manifest import newest_manifest
from tests.e2e.workloads import ledger, mlp
from tests.e2e.workloads.running import SECONDS, Ran, faults, finish, manifest, start, train
from tests.support.soaking import rotating, soak

STEPS = 200


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("rule", "transport"),
    [rotating("dana-dc", "auto"), *(soak(rule, "tcp") for rule in ("dana-zero", "gap-aware-dana", "dc-asgd"))],
)
def test_a_job_with_kills_learns_by_a_named_rule(tmp_path: Path, rule: str, transport: str) -> None:
    training = {"mode": "async", "updateRule": rule, "transport": transport}
    checkpoint = {"everySteps": 25, "periodSeconds": 3600, "keep": 100}
    words = ["mlp.py", "sgd", str(STEPS), "--pace", "0.02", "--gates", "55:50,120:100"]
    what = ("kill:shard-1@step=80", "kill:worker-1@step=140")
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


@pytest.mark.timeout(1500)
@pytest.mark.rotating
def test_what_a_killed_shard_and_its_first_answer_lost_is_what_is_missing(tmp_path: Path) -> None:
    """The first push after the loss is based on weights that are gone, so lr-over-lag cannot use it. Each push that counts adds 1."""
    training = {"mode": "async", "updateRule": "lr-over-lag"}
    words = ["ledger.py", str(STEPS), "0.02", "58:50"]
    job = manifest(tmp_path, words, workers=1, training=training, checkpoint={"everySteps": 25, "periodSeconds": 3600, "keep": 100})
    ran = train(tmp_path, job, *faults("kill:shard-1@step=88"))
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


WORKERS, SHARDS, BOUNDED_STEPS = 2, 2, 140
CHECKPOINTS = {"everySteps": 20, "periodSeconds": 3600, "keep": 100}


SWITCH_STEPS = 240
TOLD = "told"
"""The file for which the script waits, however late this test's process is."""


@pytest.mark.timeout(1500)
@pytest.mark.rotating
def test_sync_async_sync_while_training_goes_on(tmp_path: Path) -> None:
    """A step of sync adds half a push of each worker, any other a whole one; the last shard 0 to die finds the mode in the checkpoint."""
    checkpoints = {"everySteps": 20, "periodSeconds": 3600, "keep": 100}
    words = ["ledger.py", str(SWITCH_STEPS), "0.02", f"140:{TOLD},205:200"]
    job = manifest(tmp_path, words, workers=WORKERS, shards=SHARDS, checkpoint=checkpoints)
    process = start(tmp_path, job, *faults("kill:shard-0@step=225"))
    tell(tmp_path, mode="async", staleness=None)
    changed(tmp_path, "async")
    tell(tmp_path, mode="sync", staleness=None).with_name(TOLD).touch()
    ran = finish(process, tmp_path)
    assert ran.code == 0 and ran.summary["attempts"] == [2, 1] and ran.summary["updates_lost"] == 0, ran.err
    steps = switches(ran.folder)
    assert [mode for _, mode in steps] == ["async", "bounded:3", "sync"], "from async by way of bounded"
    alone = steps[2][0] - steps[0][0]
    assert 0 < steps[0][0] < steps[2][0] < 225
    weights = ran.weights()
    found = {float(weights[tensor][element]) for rank in range(WORKERS) for _, tensor, element in ledger.places(rank)}
    assert found == {alone + (SWITCH_STEPS - alone) / WORKERS}


def tell(folder: Path, **training: Any) -> Path:
    """Change the config that the processes read, once the job trains; where it lies."""
    deadline = time.monotonic() + SECONDS / 2
    while not (paths := list(folder.glob(".psjob/*/manifest-*.json"))):
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.05)
    path = paths[0].parent / "config.json"
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({**json.loads(path.read_text()), **training}))
    fresh.replace(path)  # nobody reads half of it
    return path


def changed(folder: Path, mode: str) -> None:
    deadline = time.monotonic() + SECONDS / 2
    while mode not in [to for run in folder.glob(".psjob/*") for _, to in switches(run)]:
        assert time.monotonic() < deadline, f"it did not go over to {mode}"
        time.sleep(0.05)


def switches(run: Path) -> list[tuple[int, str]]:
    """(step, mode) of each change, as shard 0 has logged it."""
    told = "".join(path.read_text() for path in sorted((run / "logs").glob("job-shard-0-*.log")))
    return [(int(step), mode) for step, mode in re.findall(r"from step (\d+) on the mode is (\S+), it was", told)]


DECIDED_STEPS = 100
"""Of 3 workers in 5 epochs."""


def run(folder: Path, training: dict[str, Any], *what: str, gates: str = "", policy: str = "AllWorkers") -> Ran:
    late = "late" if policy == "FirstWorker" else ""
    job = manifest(
        folder, ["decided.py", "5", gates, late], workers=3, shards=2, checkpoint=CHECKPOINTS, training=training,
        runPolicy={"successPolicy": policy},
    )  # fmt: skip
    return train(folder, job, *faults(*what))


@pytest.mark.timeout(1000)
@pytest.mark.rotating
def test_kills_change_no_bit_of_a_run_with_a_backup_worker(tmp_path: Path) -> None:
    """The last worker's pushes never count, so the weights are those of the other two, who end the job."""
    plain = run(tmp_path / "plain", {"sync": {"backupWorkers": 1}}, policy="FirstWorker")
    assert plain.summary["steps"] == DECIDED_STEPS and plain.summary["restarts"] == {}
    what = ("kill:shard-1@step=45", "kill:worker-2@step=60", "kill:shard-0@step=75")
    hit = run(tmp_path / "hit", {"sync": {"backupWorkers": 1}}, *what, gates="35:20,65:60", policy="FirstWorker")
    assert [r["fault"] for r in hit.summary["recoveries"]] == list(what)
    assert hit.summary["attempts"] == [2, 2] and hit.summary["updates_lost"] == 0
    assert hit.summary["steps"] == DECIDED_STEPS and hit.sha == plain.sha
    mine, theirs = hit.weights(), plain.weights()
    assert {name: tensor.equal(theirs[name]) for name, tensor in mine.items()} == dict.fromkeys(theirs, True)


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    "training",
    [
        soak({"mode": "softsync", "softsync": {"splits": 3}}, id="softsync"),
        soak({"mode": "threshold", "threshold": {"staleness": 4}}, id="threshold"),
    ],
)
def test_a_killed_shard_and_a_killed_worker_stop_no_job(tmp_path: Path, training: dict[str, Any]) -> None:
    """Every worker comes to its end, whoever was lost."""
    what = ("kill:shard-1@step=90", "kill:worker-1@step=150")
    hit = run(tmp_path / "hit", training, *what, gates="30:20")
    assert [r["fault"] for r in hit.summary["recoveries"]] == list(what)
    assert hit.summary["attempts"] == [1, 2] and hit.summary["result"] == "Complete"
    made, _ = newest_manifest(hit.folder, str(hit.summary["run"]))
    assert made is not None and made.final and {int(worker["clock"]) for worker in made.workers.values()} == {DECIDED_STEPS}
    assert made.step > DECIDED_STEPS, "updates of some workers, not of all together"
