"""What the coordinator tells of an interruption, and of what all shards have counted."""

from __future__ import annotations

import pytest

from psjob.protocol.coordinator.report import RecoveryTimer
from psjob.shard.push_metrics import Counters, JobCounts


def first(comeback: RecoveryTimer) -> tuple[int, int, int, int, float] | None:
    told = comeback.told(100.0)["resumed"]
    return None if told is None else (told["view"], told["start"], told["from"], told["step"], told["age"])


def test_the_first_step_of_a_job_is_told_and_undoes_nothing() -> None:
    comeback = RecoveryTimer()
    assert first(comeback) is None
    comeback.interrupted(0)
    comeback.passed(1, view=1, start=1, wall=90.0)
    comeback.passed(2, view=1, start=1, wall=95.0)
    assert first(comeback) == (1, 1, 0, 1, 10.0) and comeback.steps_lost == 0


def test_steps_undone_count_once_all_have_passed_a_step_again() -> None:
    comeback = RecoveryTimer()
    comeback.passed(1, 1, 1, 10.0)
    comeback.undone(150, 100)
    assert comeback.steps_lost == 0
    comeback.interrupted(100)
    comeback.passed(100, 2, 1, 19.0)  # nothing new: where the checkpoint was
    assert comeback.steps_lost == 0 and first(comeback) == (1, 1, 0, 1, 90.0)
    comeback.passed(101, 2, 1, 20.0)
    assert comeback.steps_lost == 50 and first(comeback) == (2, 1, 100, 101, 80.0)


def test_a_new_coordinator_learns_from_workers_how_far_they_were() -> None:
    comeback = RecoveryTimer()
    comeback.undone(0, 100)
    comeback.heard(149)
    comeback.heard(150)
    comeback.undone(100, 100)
    comeback.passed(101, 2, 1, 20.0)
    assert comeback.steps_lost == 50
    comeback.heard(400)  # a stream that breaks while training goes on
    comeback.interrupted(300)
    comeback.passed(301, 2, 2, 30.0)
    assert comeback.steps_lost == 50 and first(comeback) == (2, 2, 300, 301, 70.0)


def test_a_second_loss_before_the_first_step_belongs_to_the_same_interruption() -> None:
    comeback = RecoveryTimer()
    comeback.passed(1, 1, 1, 1.0)
    comeback.undone(150, 100)
    comeback.undone(100, 50)
    comeback.passed(51, 3, 1, 9.0)
    assert comeback.steps_lost == 100


def test_counts_of_all_shards_are_summed_over_their_attempts() -> None:
    counts = JobCounts()
    counts.heard(0, Counters(bytes=10).word(1))
    counts.heard(1, Counters(bytes=5, lost=1).word(1))
    counts.heard(1, Counters(bytes=7, lost=1).word(1))
    assert counts.told() == {"pushBytes": 17, "updatesLost": 1}
    counts.heard(1, Counters(bytes=2, lost=3).word(2))
    counts.heard(1, Counters(bytes=70, lost=70).word(1))  # one that was cut off
    assert counts.told() == {"pushBytes": 19, "updatesLost": 4}


@pytest.mark.parametrize("body", [{}, {"attempt": 1}, {"attempt": 1, "pushBytes": "x", "updatesLost": 0}, {"attempt": 1, "pushBytes": 3}])
def test_what_is_no_count_is_refused(body: dict[str, object]) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        JobCounts().heard(1, body)


def test_counts_that_fall_are_refused() -> None:
    counts = JobCounts()
    counts.heard(1, Counters(bytes=9).word(1))
    with pytest.raises(ValueError, match="never fall"):
        counts.heard(1, Counters(bytes=8).word(1))
