"""What a sync job computes is what one process computes, bit for bit; and near what plain torch does (measure 2 of the first issue)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.oracle import STEPS, assert_same_bits, oracle
from tests.e2e.workloads import mlp
from tests.e2e.workloads.running import manifest, train
from tests.support.reference import Wire
from tests.support.soaking import rotating, soak

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("optimizer", "workers", "shards", "transport"),
    [
        # Each optimizer and each transport once; more shards over shared memory are held against the oracle in test_train_scripts.
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
