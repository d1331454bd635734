"""status.stages: each stage's workers by their pods, and what they measured by shard 0."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from psjob_operator.api.status import StageStatus
from psjob_operator.plan.observed_state import ObservedState
from psjob_operator.plan.plan import plan
from tests.unit.plan_given import NOW, ended, job, pod, running

STAGES = [{"name": "front", "replicas": 2}, {"name": "back", "cut": "layers.6"}]
FRONT: dict[str, Any] = {"name": "front", "step": 9, "delay": 0.0, "idle": 0.25, "rssBytes": 100, "peakBytes": 200, "devicePeakBytes": None}
BACK: dict[str, Any] = {"name": "back", "step": 8, "delay": None, "idle": 0.5, "rssBytes": 1, "peakBytes": 2, "devicePeakBytes": 3}
WAITS = "activations of micro-batch 1 of step 8 from worker 1 (stage 0), for 12 s"


def staged(**changes: Any) -> ObservedState:
    return running(job(stages=STAGES), **changes)


def told(up: ObservedState, *stages: Any, at: float = NOW) -> ObservedState:
    return replace(up, progress={"run": "run-1", "coordinator": {"step": 8, "stages": list(stages)}}, progress_at=at)


def test_a_job_without_stages_has_none() -> None:
    status = plan(told(running(), FRONT), NOW).status
    assert status.stages is None and status.stages_ready is None
    assert not {"stages", "stagesReady"} & status.to_manifest().keys()


def test_each_stage_counts_its_own_workers() -> None:
    first = plan(job(stages=STAGES), NOW).status
    assert [(stage.name, stage.workers_ready) for stage in first.stages] == [("front", "0/2"), ("back", "0/1")]
    assert first.stages_ready == "0/2"
    up = plan(staged(), NOW).status
    assert [stage.workers_ready for stage in up.stages] == ["2/2", "1/1"] and up.stages_ready == "2/2"
    lost = plan(staged(worker_1=pod("worker", 1, **ended(1))), NOW).status
    assert [stage.workers_ready for stage in lost.stages] == ["1/2", "1/1"] and lost.stages_ready == "1/2"
    done = plan(staged(worker_2=pod("worker", 2, **ended(0))), NOW).status
    assert done.stages_ready == "2/2", "one that has succeeded is not missing"


def test_it_has_what_the_workers_measured() -> None:
    status = plan(told(staged(), FRONT, {**BACK, "waiting": WAITS}), NOW).status
    assert status.stages == (
        StageStatus(
            name="front", workers_ready="2/2", step=9, delay=0.0, idle=0.25, memory_bytes=100, peak_memory_bytes=200,
        ),
        StageStatus(
            name="back", workers_ready="1/1", step=8, idle=0.5, memory_bytes=1, peak_memory_bytes=2, peak_device_bytes=3, waiting=WAITS,
        ),
    )  # fmt: skip


def test_what_was_told_holds_while_shard_0_is_out_of_reach_and_a_wait_does_not() -> None:
    up = told(staged(), FRONT, {**BACK, "waiting": WAITS})
    before = plan(up, NOW).status
    away = plan(replace(up, status=before, progress=None, written_at=NOW), NOW + 100).status
    assert [stage.peak_memory_bytes for stage in away.stages] == [200, 2] and [stage.waiting for stage in away.stages] == [None, None]


def test_its_numbers_are_written_once_a_minute_and_its_workers_at_once() -> None:
    up = told(staged(), FRONT, BACK)
    first = plan(up, NOW).status
    moved = replace(told(up, {**FRONT, "idle": 0.75}, BACK, at=NOW + 30), status=first, written_at=NOW)
    assert plan(moved, NOW + 30).status == first
    later = plan(replace(moved, progress_at=NOW + 60), NOW + 60).status
    assert later.stages[0].idle == 0.75
    lost = replace(moved, processes=(*moved.processes[:-1], pod("worker", 2, **ended(1))))
    assert plan(lost, NOW + 30).status.stages[1].workers_ready == "0/1"


@pytest.mark.parametrize(
    "odd", [None, "x", 3, [], {}, {"name": "back"}, {"name": 4}, {"name": "front", "idle": "x", "step": -1, "delay": -2}]
)
def test_it_is_read_with_suspicion(odd: Any) -> None:
    for stages in ([odd], [odd, odd, odd], odd):
        up = replace(staged(), progress={"run": "run-1", "coordinator": {"step": 8, "stages": stages}}, progress_at=NOW)
        front, back = plan(up, NOW).status.stages
        assert (front, back) == (StageStatus(name="front", workers_ready="2/2"), StageStatus(name="back", workers_ready="1/1"))


def test_numbers_stay_in_their_bounds_and_sentences_short() -> None:
    up = told(staged(), {**FRONT, "idle": 7, "delay": 1.23456, "waiting": "x" * 5000}, {**BACK, "waiting": " \n "})
    front, back = plan(up, NOW).status.stages
    assert (front.idle, front.delay, len(front.waiting or ""), back.waiting) == (1.0, 1.23, 160, None)


def test_the_most_stages_stay_small_in_status() -> None:
    stages = [{"name": f"{'s' * 60}-{number:02d}", "replicas": 4} for number in range(64)]
    large = job(stages=stages, ps={"shards": 256}, workers={"replicas": 256})
    said = [
        {**FRONT, "name": stage["name"], "rssBytes": 2**52, "peakBytes": 2**52, "devicePeakBytes": 2**52, "waiting": "w" * 300}
        for stage in stages
    ]
    up = told(running(large), *said)
    status = plan(up, NOW).status
    assert [stage.waiting is not None for stage in status.stages] == [True] * 8 + [False] * 56
    size = len(status.model_dump_json(by_alias=True, exclude_none=True))
    assert size < 34 * 1024, size
