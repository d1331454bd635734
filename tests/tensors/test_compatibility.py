"""Each row of the table of what does not go together is refused for a script and a job that ask for both, and for no job without."""

from __future__ import annotations

from dataclasses import replace

import pytest

from psjob.api.compatibility import CLASHES, Clash, Features, refuse
from psjob.modes.stages import Stages
from psjob.process.config import CheckpointConfig, CompressionConfig, Config, LocalConfig
from psjob.process.errors import Refused

JOB = Config("job", "run", "0", "sync", 0, None, 3, (), CheckpointConfig(1.0, None, 2, True, None), "AllWorkers", 10.0, 10.0)
LOCAL = replace(JOB, mode="local", local=LocalConfig())
STAGED = replace(JOB, stages=Stages((1, 1)))
LATE = replace(STAGED, schedule="pipedream")
SEVERAL = replace(JOB, processes=2)
NOTHING = Features()
OVERLAP, RULE, ROWS, SUMS = Features(overlap=True), Features(half_rule=True), Features(rows="words"), Features(sums="counts")
TOP_K = CompressionConfig(push="topk")

BOTH: list[tuple[str, Features, Config | None]] = [
    ("attach(…, overlap=True) does not go with attach(…, later=…)", replace(OVERLAP, later=True), None),
    ("attach(…, overlap=True) does not go with modules of torch.jit", replace(OVERLAP, scripted=True), None),
    ("does not go with training.updateRule dana-slim", replace(OVERLAP, half_rule=True),
     replace(JOB, mode="async", update_rule="dana-slim")),
    ("attach(…, overlap=True) does not go with training.mode local", OVERLAP, LOCAL),
    ("attach(…, overlap=True) does not go with 2 processes per worker", OVERLAP, SEVERAL),
    ("training.updateRule dana-slim with its part on the workers does not go with 2 processes", RULE,
     replace(SEVERAL, mode="async", update_rule="dana-slim")),
    ("a table of rows on the shards (ps.Embedding, ps.Table) does not go with 2 processes", ROWS, SEVERAL),
    ("Accelerate does not go with 2 processes per worker: it makes a process group", Features(library="Accelerate"), SEVERAL),
    ("attach(…, overlap=True) does not go with 2 attached optimizers", replace(OVERLAP, pairs=2), JOB),
    ("training.updateRule dana-slim with its part on the workers does not go with 2 attached", replace(RULE, pairs=2),
     replace(JOB, mode="async", update_rule="dana-slim")),
    ("a table of rows on the shards (ps.Embedding, ps.Table) does not go with 3 attached optimizers", replace(SUMS, pairs=3), JOB),
    ("training.mode local does not go with 2 attached optimizers", Features(pairs=2), LOCAL),
    ("a table of rows on the shards (ps.Embedding, ps.Table) does not go with training.mode local", ROWS, LOCAL),
    ("ps.Table counts does not go with training.mode threshold", SUMS, replace(JOB, mode="threshold")),
    ("ps.Table counts does not go with training.sync.backupWorkers 1", SUMS, replace(JOB, backup_workers=1)),
    ("training.sync.reduction median does not go with rows of words on the shards", ROWS, replace(JOB, reduction="median")),
    ("training.sync.maxGradNorm does not go with rows of words on the shards", ROWS, replace(JOB, max_grad_norm=1.0)),
    ("training.sync.reduction median does not go with training.compression.push topk", NOTHING,
     replace(JOB, reduction="median", compression=TOP_K)),
    ("attach(…, name=…) does not go with a job of stages", Features(named=True), STAGED),
    ("attach(…, overlap=True) does not go with a job of stages", OVERLAP, STAGED),
    ("several attached optimizers does not go with a job of stages", Features(pairs=2), STAGED),
    ("training.nonFinite skip does not go with a job of stages: a stage would skip", NOTHING, replace(STAGED, non_finite="skip")),
    ("training.warmupSteps does not go with a job of stages", NOTHING, replace(STAGED, warmup_steps=5)),
    ("training.maxPushNorm does not go with a job of stages", NOTHING, replace(STAGED, max_push_norm=1.0)),
    ("training.lrScaling linear does not go with a job of stages", NOTHING, replace(STAGED, lr_scaling="linear")),
    ("training.sync.maxGradNorm does not go with training.pipeline.schedule pipedream", NOTHING, replace(LATE, max_grad_norm=1.0)),
    ("training.compression.push topk does not go with training.pipeline.schedule pipedream; ", NOTHING, replace(LATE, compression=TOP_K)),
    ("workers.progressDeadlineSeconds does not go with a job of stages", NOTHING, replace(STAGED, step_timeout=5.0)),
]  # fmt: skip


@pytest.mark.parametrize(("said", "features", "job", "clash"), [(*both, clash) for both, clash in zip(BOTH, CLASHES, strict=True)])
def test_both_are_refused_and_each_is_taken(said: str, features: Features, job: Config | None, clash: Clash) -> None:
    assert clash.holds(features, job) and said in clash.sentence(features, job)
    with pytest.raises(Refused, match=r" does not go with .*; "):
        refuse(features, job)
    assert not clash.holds(NOTHING, JOB)
    refuse(NOTHING, JOB)
    if job is not None and features != NOTHING:
        assert not clash.holds(features, None), "outside a job only the script counts"


def test_what_goes_together_is_taken() -> None:
    for features, job in ((OVERLAP, JOB), (Features(pairs=2, named=True), JOB), (ROWS, JOB), (SUMS, replace(JOB, mode="bounded"))):
        refuse(features, job)
    for job in (LOCAL, STAGED, LATE, SEVERAL, replace(JOB, reduction="median"), replace(JOB, mode="async", update_rule="nag")):
        refuse(NOTHING, job)
