"""What a sync job computes is what one process computes, bit for bit; and near what plain torch does (measure 2 of the first issue).

- Other kinds of scripts: a worker-side optimizer, a loop without `ps.shard`, one that crashes; and another number of shards.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.e2e.oracle import STEPS, assert_same_bits, oracle
from tests.e2e.workloads import crash, mlp
from tests.e2e.workloads.gates import steps_of
from tests.e2e.workloads.running import Ran, check_recovery, faults, manifest, train
from tests.support.reference import Wire
from tests.support.soaking import rotating, soak


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("optimizer", "workers", "shards", "transport"),
    [
        # Each optimizer and each transport once; more shards over shared memory are held against the oracle below.
        rotating("sgd", 3, 2, "tcp"),
        rotating("adam", 4, 1, "auto"),
        soak("sgd", 3, 2, "auto"),
        soak("adam", 4, 1, "tcp"),
        *(soak("sgd", workers, shards, "auto") for workers, shards in ((3, 1), (4, 1), (4, 2))),
        *(soak("adam", workers, shards, "auto") for workers, shards in ((3, 1), (3, 2), (4, 2))),
    ],
)
def test_final_weights_are_the_oracles_bits(tmp_path: Path, optimizer: str, workers: int, shards: int, transport: str) -> None:
    """The last round has one batch only: the other ranks are absent there, and the divisor is 1."""
    job = manifest(
        tmp_path, ["mlp.py", optimizer, str(STEPS), "--last", "1"], workers=workers, shards=shards, training={"transport": transport}
    )
    ran = train(tmp_path, job)
    assert ran.summary["transport"] == ("tcp" if transport == "tcp" else "shared")
    assert ran.summary["steps"] == STEPS and ran.summary["restarts"] == {} and ran.summary["updates_lost"] == 0
    # A shard counts a worker's clock once: `applied` is in worker-clocks, and every absent mark is one.
    assert ran.summary["applied"] == STEPS * workers * shards and ran.summary["duplicates_refused"] == 0
    model = oracle(optimizer, workers, last=1)
    assert_same_bits(ran, model)
    plain = plain_torch(optimizer, workers, last=1)
    scale = max(float(p.detach().abs().max()) for p in plain.parameters())
    held = ran.weights()
    worst = max(float((held[name] - p.detach()).abs().max()) for name, p in plain.named_parameters())
    print(f"{optimizer}, {workers} workers, {shards} shards: differs from torch's default by {worst / scale:.2e} of max|w|")
    assert worst <= 1e-5 * scale


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("codec", "workers", "shards"),
    [
        rotating("int8", 3, 2),
        *(soak(codec, 3, shards) for codec, shards in (("bf16", 1), ("fp16", 2), ("topk", 1), ("randomk", 2))),
    ],
)
def test_final_weights_with_a_codec_are_the_oracles_bits(tmp_path: Path, codec: str, workers: int, shards: int) -> None:
    """The oracle encodes and decodes each gradient, and adds what was left out to the next one of its rank."""
    training = {"compression": {"push": codec, "ratio": 0.05}}
    job = manifest(tmp_path, ["mlp.py", "sgd", str(STEPS), "--last", "1"], workers=workers, shards=shards, training=training)
    ran = train(tmp_path, job)
    assert ran.summary["applied"] == STEPS * workers * shards and ran.summary["codecs"] == f"push {codec}, pull none"
    encoded, plain = oracle("sgd", workers, last=1, wire=Wire(codec, 0.05)), oracle("sgd", workers, last=1)
    assert_same_bits(ran, encoded)
    assert any(not torch.equal(one, other) for one, other in zip(plain.parameters(), encoded.parameters(), strict=True))


def plain_torch(optimizer: str, workers: int, steps: int = STEPS, last: int | None = None) -> torch.nn.Module:
    """Torch alone: the mean of the micro-batches' losses, and its optimizer's default way of computing."""
    model = mlp.build()
    made = mlp.optimizer_for(optimizer, model)
    for step in range(steps):
        present = [batch for batch in mlp.micro_batches(steps, workers, step, last) if batch is not None]
        made.zero_grad()
        for batch in present:
            (mlp.loss_of(model, batch) / len(present)).backward()
        made.step()
    return model


SCRIPT_STEPS = 120
CHECKPOINTS = {"everySteps": 25, "periodSeconds": 3600, "keep": 100}


@pytest.mark.timeout(2000)
@pytest.mark.soak
def test_an_optimizer_without_a_rule_steps_on_the_workers(tmp_path: Path) -> None:
    """RMSprop with a shard killed in the middle: torch's own steps on the reduced gradient, to the last bit."""
    job = manifest(tmp_path, ["mlp.py", "rmsprop", str(SCRIPT_STEPS), "--pace", "0.02", "--gates", "55:50"], checkpoint=CHECKPOINTS)
    ran = train(tmp_path, job, *faults("kill:shard-1@step=70"))
    struck(ran)
    model = mlp.build()
    optimizer = mlp.optimizer_for("rmsprop", model)
    for step in range(SCRIPT_STEPS):
        total: list[torch.Tensor] = []
        for batch in mlp.micro_batches(SCRIPT_STEPS, 2, step):
            assert batch is not None
            optimizer.zero_grad()
            mlp.loss_of(model, batch).backward()
            grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            total = grads if not total else [a + b for a, b in zip(total, grads, strict=True)]
        for p, grad in zip(model.parameters(), total, strict=True):
            p.grad = grad * 0.5
        optimizer.step()
    assert_same_bits(ran, model)


@pytest.mark.timeout(2000)
@pytest.mark.rotating
def test_a_loop_of_its_own_is_replayed_and_a_run_resumes_on_other_shards(tmp_path: Path) -> None:
    """Without `ps.shard` a restarted script makes its first steps again without effect. Then its first half is resumed with 3 shards."""
    words = ["mlp.py", "adam", str(SCRIPT_STEPS), "--replay", "--pace", "0.02", "--gates", "55:50"]
    job = manifest(tmp_path, words, checkpoint=CHECKPOINTS)
    ran = train(tmp_path, job, *faults("kill:shard-0@step=70"))
    struck(ran)
    model = oracle("adam", 2, SCRIPT_STEPS)
    assert_same_bits(ran, model)

    half = tmp_path / ".psjob" / "half"
    shutil.copytree(ran.folder, half)
    for step in steps_of(half):
        if step > SCRIPT_STEPS // 2:
            for path in half.glob(f"manifest-*-s{step:012d}.json"):
                path.unlink()
    for path in half.glob("CLAIM-*"):
        path.unlink()
    # Without its gates: no checkpoint of the new run would open them.
    job = manifest(tmp_path, words[: words.index("--gates")], checkpoint=CHECKPOINTS)
    resumed = train(tmp_path, job, "--resume", str(half), "--set", "spec.shards.replicas=3")
    assert resumed.summary["attempts"] == [1, 1, 1] and resumed.summary["steps"] == SCRIPT_STEPS
    assert resumed.summary["applied"] == (SCRIPT_STEPS - max(steps_of(half))) * 2 * 3, "only the second half was trained"
    assert_same_bits(resumed, model)


@pytest.mark.timeout(2000)
@pytest.mark.rotating
def test_crashes_of_all_kinds_are_no_ends(tmp_path: Path) -> None:
    """SystemExit, an exception and os._exit: each worker is started again and no batch is left out."""
    job = manifest(tmp_path, ["crash.py", str(SCRIPT_STEPS)], workers=3, shards=1, checkpoint={"everySteps": 10, "periodSeconds": 3600})
    ran = train(tmp_path, job)
    assert sum(ran.summary["restarts"].values()) == 3 == len(crash.WAYS), ran.summary["restarts"]
    assert all(worker["start"] > 1 for worker in ran.summary["workers"]), ran.summary["workers"]
    assert "RuntimeError: this script has a fault" in ran.err
    assert_same_bits(ran, oracle("sgd", 3, SCRIPT_STEPS))


@pytest.mark.timeout(2000)
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
    check_recovery(recovery)
