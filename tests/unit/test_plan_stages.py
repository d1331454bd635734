"""status.stages: each stage's workers by their pods, and what they measured by shard 0.

- What is told of each stage of a job: what its workers measured, in whatever shape they say it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psjob.modes import Bounded
from psjob.modes.stages import Stages
from psjob.protocol.coordinator import events
from psjob.protocol.coordinator import events as e
from psjob_operator.api.status import StageStatus
from psjob_operator.plan.observed_state import ObservedState
from psjob_operator.plan.plan import plan
from tests.unit.coordinator_world import World
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
            name="front", workers_ready="2/2", step=9, staleness=0.0, idle_fraction=0.25, memory_bytes=100, peak_memory_bytes=200,
        ),
        StageStatus(
            name="back", workers_ready="1/1", step=8, idle_fraction=0.5, memory_bytes=1, peak_memory_bytes=2, peak_device_bytes=3,
            waiting=WAITS,
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
    assert later.stages[0].idle_fraction == 0.75
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
    assert (front.idle_fraction, front.staleness, len(front.waiting or ""), back.waiting) == (1.0, 1.23, 160, None)


def test_the_most_stages_stay_small_in_status() -> None:
    stages = [{"name": f"{'s' * 60}-{number:02d}", "replicas": 4} for number in range(64)]
    large = job(stages=stages, shards={"replicas": 256}, workers={"replicas": 256})
    said = [
        {**FRONT, "name": stage["name"], "rssBytes": 2**52, "peakBytes": 2**52, "devicePeakBytes": 2**52, "waiting": "w" * 300}
        for stage in stages
    ]
    up = told(running(large), *said)
    status = plan(up, NOW).status
    assert [stage.waiting is not None for stage in status.stages] == [True] * 8 + [False] * 56
    size = len(status.model_dump_json(by_alias=True, exclude_none=True))
    assert size < 38 * 1024, size


MIB = 1 << 20


def world(**more: Any) -> World:
    """Stages of 2 and 1 workers, all of them there."""
    return World(workers=3, stages=Stages((2, 1)), stage_names=("front", "back"), **more).begun()


def measured(it: World, rank: int, **told: Any) -> None:
    it.post(events.Measured.of(it._stream(rank), it.step, told, 3))


def stages(it: World) -> list[dict[str, Any]]:
    told = it.machine.status(it.now, 0.0)["stages"]
    assert isinstance(told, list)
    return told


def test_a_job_without_stages_tells_none() -> None:
    it = World().begun()
    assert it.machine.status(0.0, 0.0)["stages"] is None and it.c.stages.waiting(0.0) is None


def test_a_stage_is_told_by_its_slowest_idlest_on_average_and_largest() -> None:
    it = world()
    assert stages(it)[0] == {
        "index": 0, "name": "front", "desired": 2, "ready": 2, "step": 0, "delay": 0.0, "idle": None,
        "rssBytes": None, "peakBytes": None, "devicePeakBytes": None, "waiting": None,
    }  # fmt: skip
    it.go(3)
    it.record(1, 4)
    measured(it, 0, idle=0.25, rss=50 * MIB, peak=80 * MIB)
    measured(it, 1, idle=0.75, rss=60 * MIB, peak=70 * MIB, devicePeak=5)
    measured(it, 2, idle=0.0, rss=1, peak=2)
    front, back = stages(it)
    assert (front["step"], front["idle"], front["rssBytes"], front["peakBytes"], front["devicePeakBytes"]) == (
        3, 0.5, 60 * MIB, 80 * MIB, 5,
    )  # fmt: skip
    assert (back["name"], back["desired"], back["idle"], back["peakBytes"], back["devicePeakBytes"]) == ("back", 1, 0.0, 2, None)


def test_a_mode_that_lets_workers_run_ahead_has_no_known_delay() -> None:
    it = world(mode=Bounded(2))
    assert [stage["delay"] for stage in stages(it)] == [None, None]


def test_without_flush_the_delay_is_what_its_workers_measured() -> None:
    it = world(flushes=False)
    assert [stage["delay"] for stage in stages(it)] == [None, None]
    measured(it, 0, delay=1.0)
    measured(it, 1, delay=2.0)
    measured(it, 2, delay=0)
    assert [stage["delay"] for stage in stages(it)] == [1.5, 0]


def test_what_a_process_told_is_not_its_successors() -> None:
    it = world()
    measured(it, 2, idle=0.5, rss=9, peak=9, waits="gradients", seconds=3.0)
    it.hello(2, start=2)
    assert (stages(it)[1]["idle"], stages(it)[1]["peakBytes"], stages(it)[1]["waiting"]) == (None, None, None)


def test_a_worker_that_is_gone_is_not_ready_and_waits_for_nobody() -> None:
    it = world()
    measured(it, 1, idle=0.5, waits="activations", seconds=3.0)
    it.post(e.WorkerStreamEnded(it._stream(1)))
    front = stages(it)[0]
    assert (front["ready"], front["waiting"], front["idle"]) == (1, None, 0.5)


def test_a_stage_that_waits_says_for_what_and_how_long() -> None:
    it = world()
    measured(it, 2, idle=0.9, waits="activations of micro-batch 1 of step 0 from worker 1 (stage 0)", seconds=4.0, **{"for": 1})
    it.now += 6
    sentence = "activations of micro-batch 1 of step 0 from worker 1 (stage 0), for 10 s"
    assert [stage["waiting"] for stage in stages(it)] == [None, sentence]
    assert it.c.stages.waiting(it.now) == f"worker 2 (stage 1) waits for {sentence}"
    measured(it, 2, idle=0.9)
    assert stages(it)[1]["waiting"] is None and it.c.stages.waiting(it.now) is None


def test_of_a_chain_of_waits_the_one_is_named_whose_worker_does_not_wait() -> None:
    it = World(workers=3, stages=Stages((1, 1, 1)), stage_names=("a", "b", "c")).begun()
    measured(it, 2, waits="activations from worker 1", seconds=90.0, **{"for": 1})
    measured(it, 1, waits="activations from worker 0", seconds=30.0, **{"for": 0})
    assert it.c.stages.waiting(it.now) == "worker 1 (stage 1) waits for activations from worker 0, for 30 s"


def test_what_a_worker_of_undone_steps_measured_is_passed_over() -> None:
    it = world()
    stream = it._stream(2)
    it.hello(2, start=2)
    it.post(events.Measured.of(stream, 0, {"idle": 0.5}, 3))
    assert stages(it)[1]["idle"] is None


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({}, events.Measured(1, 7)),
        ({"idle": 3, "rss": 5.7, "peak": -1}, events.Measured(1, 7, 1.0, 5)),
        ({"idle": True, "rss": "5", "peak": None, "devicePeak": 2**63}, events.Measured(1, 7)),
        ({"idle": float("nan"), "seconds": float("inf")}, events.Measured(1, 7)),
        ({"waits": "a\nb" + "c" * 400, "for": 3, "seconds": 2}, events.Measured(1, 7, waits="ab" + "c" * 118, seconds=2)),
        ({"waits": 4, "for": True}, events.Measured(1, 7)),
        ({"waits": "x", "for": 2}, events.Measured(1, 7, waits="x", awaited=2)),
    ],
)
def test_what_is_not_in_shape_is_not_known(body: dict[str, Any], found: events.Measured) -> None:
    assert events.Measured.of(1, 7, body, 3) == found


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5)


@given(st.dictionaries(st.sampled_from(["idle", "rss", "peak", "devicePeak", "waits", "for", "seconds"]), JSON))
def test_no_body_breaks_the_report(body: dict[str, Any]) -> None:
    it = world()
    measured(it, 1, **body)
    front = stages(it)[0]
    assert front["idle"] is None or 0 <= front["idle"] <= 1
    assert all(front[key] is None or 0 <= front[key] < 2**63 for key in ("rssBytes", "peakBytes", "devicePeakBytes"))
