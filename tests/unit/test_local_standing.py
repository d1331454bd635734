"""A local job that makes no step is never silent, and ends where there is no room; a restart does not spoil the time that is left."""

from __future__ import annotations

from psjob.protocol.coordinator.report import JobProgress
from psjob_client.local.verdict import FULL_PATIENCE, Standstill

FULL = {"checkpointProblem": "checkpoints pause, the volume of /x is full: 10 are free; the next try is in 8 s"}


def test_a_full_volume_is_told_once_and_its_end_too() -> None:
    standing = Standstill()
    assert standing.see(1, {}, 0) == []
    (line,) = standing.see(2, FULL, 1)
    assert line.startswith("warning: checkpoints pause")
    assert standing.see(3, {"checkpointProblem": FULL["checkpointProblem"].replace("8 s", "16 s")}, 2) == []
    assert standing.see(4, {}, 3) == ["checkpoints are written again"]
    assert standing.see(5, {}, 4) == []


def test_a_standstill_is_told_again_and_again_with_its_reason() -> None:
    standing = Standstill()
    hung = {"hung": [{"rank": 1, "start": 1, "seconds": 28.0}]}
    said = [(now, line) for now in range(0, 1000, 5) for line in standing.see(7, hung, float(now))]
    assert [now for now, _ in said] == [30, 60, 120, 240, 480, 780]
    assert said[0][1] == (
        "no step for 30 s, at step 7: they wait for worker 1 for 28.0 s; "
        "spec.workers.stepTimeoutSeconds has such a worker started again; Ctrl-C stops the job"
    )
    assert standing.see(8, hung, 1000) == [] and standing.see(8, {"waiting": "shards [1] are restoring, for 31 s"}, 1031)[0].startswith(
        "no step for 31 s, at step 8: shards [1] are restoring"
    )


def test_a_long_step_is_no_standstill_for_a_while() -> None:
    standing = Standstill("round")
    said = [(now, line) for now in range(0, 700, 5) for line in standing.see(3, {}, float(now))]
    assert [now for now, _ in said] == [300, 480] and said[0][1].startswith("no round for 300 s, at round 3: nobody waits")


def test_a_volume_without_room_ends_a_job_that_stands_and_no_other() -> None:
    standing = Standstill()
    standing.see(0, FULL, 0)
    assert standing.verdict(FULL, FULL_PATIENCE - 1) is None
    assert standing.verdict({}, FULL_PATIENCE + 1) is None
    told = standing.verdict(FULL, FULL_PATIENCE + 1)
    assert told is not None and told.startswith("DiskFull: no step for 301 s at step 0: checkpoints pause")
    standing.see(1, FULL, FULL_PATIENCE + 2)
    assert standing.verdict(FULL, FULL_PATIENCE + 3) is None


def test_the_time_left_after_a_restart_is_that_of_the_steps_alone() -> None:
    progress = JobProgress()
    progress.report(0, {"total": 1000})
    now = 0.0
    for step in range(1, 121):
        now += 0.02
        progress.passed(step, now)
    before = progress.status(now)["eta"]
    now += 16
    progress.rewound(100)
    for step in range(101, 111):
        now += 0.02
        progress.passed(step, now)
    after = progress.status(now)
    assert before is not None and abs(before - 17.6) < 0.1
    assert abs(after["eta"] - 17.8) < 0.1, after["eta"]
    for step in range(111, 116):
        now += 16 if step == 113 else 0.02  # a lost worker returns: nobody goes back, all wait
        progress.passed(step, now)
    assert abs(progress.status(now)["eta"] - 17.7) < 0.1


def test_a_rate_is_that_of_the_last_minute_and_not_of_a_moment() -> None:
    progress, now = JobProgress(), 0.0
    for step in range(1, 2001):
        now += 0.01 if step % 200 < 150 else 0.03  # as where an evaluation beside it takes the processor
        progress.passed(step, now)
        if step > 400:
            assert abs((progress.rate(now) or 0) - 1 / 0.015) < 12, step


def test_slow_steps_are_steps() -> None:
    progress = JobProgress()
    for step, now in ((1, 0.0), (2, 9.0), (3, 20.0), (4, 28.0)):
        progress.passed(step, now)
    assert progress.rate(28.0) is not None and abs((progress.rate(28.0) or 0) - 3 / 28) < 1e-9
    assert JobProgress().rate(0) is None
