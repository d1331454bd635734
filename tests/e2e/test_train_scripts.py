"""Other kinds of scripts: a worker-side optimizer, a loop without `ps.shard`, one that crashes; and another number of shards."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.e2e.oracle import assert_same_bits, oracle
from tests.e2e.workloads import crash, mlp
from tests.e2e.workloads.gates import steps_of
from tests.e2e.workloads.running import Ran, faults, manifest, train

STEPS = 120
CHECKPOINTS = {"everySteps": 25, "periodSeconds": 3600, "keep": 100}
pytestmark = pytest.mark.timeout(2000)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.soak
def test_an_optimizer_without_a_rule_steps_on_the_workers(tmp_path: Path) -> None:
    """RMSprop with a shard killed in the middle: torch's own steps on the reduced gradient, to the last bit."""
    job = manifest(tmp_path, ["mlp.py", "rmsprop", str(STEPS), "--pace", "0.02", "--gates", "55:50"], checkpoint=CHECKPOINTS)
    ran = train(tmp_path, job, *faults("kill:shard-1@step=70"))
    struck(ran)
    model = mlp.build()
    optimizer = mlp.optimizer_for("rmsprop", model)
    for step in range(STEPS):
        total: list[torch.Tensor] = []
        for batch in mlp.micro_batches(STEPS, 2, step):
            assert batch is not None
            optimizer.zero_grad()
            mlp.loss_of(model, batch).backward()
            grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            total = grads if not total else [a + b for a, b in zip(total, grads, strict=True)]
        for p, grad in zip(model.parameters(), total, strict=True):
            p.grad = grad * 0.5
        optimizer.step()
    assert_same_bits(ran, model)


@pytest.mark.rotating
def test_a_loop_of_its_own_is_replayed_and_a_run_resumes_on_other_shards(tmp_path: Path) -> None:
    """Without `ps.shard` a restarted script makes its first steps again without effect. Then its first half is resumed with 3 shards."""
    words = ["mlp.py", "adam", str(STEPS), "--replay", "--pace", "0.02", "--gates", "55:50"]
    job = manifest(tmp_path, words, checkpoint=CHECKPOINTS)
    ran = train(tmp_path, job, *faults("kill:shard-0@step=70"))
    struck(ran)
    model = oracle("adam", 2, STEPS)
    assert_same_bits(ran, model)

    half = tmp_path / ".psjob" / "half"
    shutil.copytree(ran.folder, half)
    for step in steps_of(half):
        if step > STEPS // 2:
            for path in half.glob(f"manifest-*-s{step:012d}.json"):
                path.unlink()
    for path in half.glob("CLAIM-*"):
        path.unlink()
    # Without its gates: no checkpoint of the new run would open them.
    job = manifest(tmp_path, words[: words.index("--gates")], checkpoint=CHECKPOINTS)
    resumed = train(tmp_path, job, "--resume", str(half), "--set", "spec.shards.replicas=3")
    assert resumed.summary["attempts"] == [1, 1, 1] and resumed.summary["steps"] == STEPS
    assert resumed.summary["applied"] == (STEPS - max(steps_of(half))) * 2 * 3, "only the second half was trained"
    assert_same_bits(resumed, model)


@pytest.mark.rotating
def test_crashes_of_all_kinds_are_no_ends(tmp_path: Path) -> None:
    """SystemExit, an exception and os._exit: each worker is started again and no batch is left out."""
    job = manifest(tmp_path, ["crash.py", str(STEPS)], workers=3, shards=1, checkpoint={"everySteps": 10, "periodSeconds": 3600})
    ran = train(tmp_path, job)
    assert sum(ran.summary["restarts"].values()) == 3 == len(crash.WAYS), ran.summary["restarts"]
    assert all(worker["start"] > 1 for worker in ran.summary["workers"]), ran.summary["workers"]
    assert "RuntimeError: this script has a fault" in ran.err
    assert_same_bits(ran, oracle("sgd", 3, STEPS))


@pytest.mark.soak
def test_a_worker_that_crashes_after_it_has_left_is_told_that_training_is_done(tmp_path: Path) -> None:
    """It looks for shards that have gone: they come back for it, and nobody searches until the deadline of connecting."""
    job = manifest(tmp_path, ["late.py", "20"], checkpoint={"everySteps": 10, "periodSeconds": 3600})
    ran = train(tmp_path, job, cold=True)
    assert ran.summary["restarts"] == {"Error": 1, "Finished": 2}, ran.err
    assert [worker["start"] for worker in ran.summary["workers"]] == [1, 2] and ran.summary["attempts"] == [2, 2]
    assert ran.summary["steps"] == 20 and "exit code 5" in ran.err
    assert_same_bits(ran, oracle("sgd", 2, 20))


def struck(ran: Ran) -> None:
    (recovery,) = ran.summary["recoveries"]
    print(
        f"{recovery['fault']}: {recovery['secondsToFirstPush']:.2f} s to the first push, {recovery['secondsToPassStep']:.2f} s to the step"
    )
    assert recovery["manifests"] >= 2 and max(recovery["acknowledged"].values()) > recovery["checkpointStep"] > 0, recovery
