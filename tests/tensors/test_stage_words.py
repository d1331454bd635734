"""What workers of stages and the coordinator say to each other: keys of links, steps that were lost, what a job of stages refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from psjob.api import stagecuts
from psjob.api.stagecuts import StageCuts
from psjob.contract import keys
from psjob.layout.blocks import TensorSpec
from psjob.modes.stages import Stages
from psjob.pipeline.cuts import split
from psjob.process.config import Config
from psjob.process.errors import Refused
from psjob.protocol.coordinator.decode import Malformed, step_lost
from psjob.protocol.coordinator.events import StepLost
from tests.live.live_shards import NEVER
from tests.runkeys import RUN

JOB = Config("job", "run", "0", "sync", 0, None, 2, (), NEVER, "AllWorkers", 10.0, 10.0, stages=Stages((1, 1)))


def test_a_stage_has_parameters_and_buffers_of_its_own() -> None:
    rows = [TensorSpec("a", (1,), "float32", 0, (0,)), TensorSpec("b", (1,), "float32", 0, (0,))]
    with pytest.raises(Refused, match="stage 1 has no parameter that the optimizer trains"):
        stagecuts.check_table(JOB, rows)
    stagecuts.check_table(JOB, [*rows, TensorSpec("c", (1,), "float32", 0, (0, 1))])
    norm = nn.BatchNorm1d(4)
    with pytest.raises(Refused, match=r"buffer 1\.running_mean is in stages 0 and 1"):
        stagecuts.cuts_of(split(nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm), [2]), 0)


def test_two_workers_have_one_key_and_each_reads_it_with_its_own() -> None:
    ends = {3: 1, 4: 2}
    link = keys.link(RUN["workers"], ends)
    assert keys.link(RUN["workers"], {4: 2, 3: 1}) == link
    for rank, start in ends.items():
        own = keys.worker(RUN["workers"], rank, start)
        masked = keys.masked(own, link, ends)
        assert masked != link and keys.masked(own, masked, ends) == link
    others = [{3: 1, 4: 1}, {3: 2, 4: 2}, {3: 1, 5: 2}, {2: 1, 4: 2}]
    assert len({keys.link(RUN["workers"], other) for other in [ends, *others]}) == 5


@pytest.mark.parametrize(
    "body", [{}, {"rank": 2, "step": 1}, {"rank": -1, "step": 1}, {"rank": 0, "step": -1}, {"rank": 0}, {"rank": "0", "step": 1}]
)
def test_a_step_that_was_lost_names_a_worker_and_a_step(body: dict[str, Any]) -> None:
    assert step_lost(7, {"rank": 1, "step": 5}, 2) == StepLost(7, 1, 5)
    with pytest.raises(Malformed):
        step_lost(7, body, 2)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"mode": "async"}, "training.mode async; take sync"),
        ({"backup_workers": 1}, "training.backupWorkers"),
        ({"update_at": "worker"}, "training.updateAt worker"),
        ({"reduction": "median"}, "training.reduction median"),
        ({"warmup_steps": 5}, "training.warmupSteps"),
        ({"max_push_norm": 1.0}, "training.maxPushNorm"),
        ({"non_finite": "skip"}, "training.nonFinite skip"),
        ({"lr_scaling": "linear"}, "training.lrScaling linear"),
        ({"max_grad_norm": 1.0, "schedule": "pipedream"}, "training.maxGradNorm under training.pipeline.schedule pipedream"),
        ({"step_timeout": 1.0}, "workers.stepTimeoutSeconds"),
    ],
)
def test_what_does_not_go_with_stages_is_refused(monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], says: str) -> None:
    monkeypatch.setattr(stagecuts, "_known", [])
    model = nn.Linear(1, 1)
    with pytest.raises(Refused, match=r"cut the model with ps\.pipeline"):
        stagecuts.known(model, JOB)
    stagecuts.remember(model, StageCuts({"weight": (0,)}, frozenset()))
    assert stagecuts.known(model, JOB).stages == {"weight": (0,)}
    with pytest.raises(Refused, match=says):
        stagecuts.known(model, replace(JOB, **changed))
    with pytest.raises(Refused, match="called twice"):
        stagecuts.remember(nn.Linear(1, 1), StageCuts())
    assert stagecuts.known(nn.Linear(1, 1), replace(JOB, stages=Stages())) is stagecuts.WHOLE
