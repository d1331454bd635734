"""When a script on one machine is not started again."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from psjob_client.local.process import ChildProcess
from psjob_client.local.verdict import Failures


@dataclass
class Raw:
    pid: int
    returncode: int


def ended(name: str, code: int, role: str = "worker", deleting: float | None = None) -> ChildProcess:
    index = int(name.split("-")[1])
    return ChildProcess(name, role, index, 1, Raw(7, code), 0.0, ended=1.0, deleting=deleting)  # type: ignore[arg-type]


def verdict(*seen: tuple[str, int, int, str], heard: tuple[int, float | None] = (0, 2.0)) -> str | None:
    """Of (name, code, steps made, end of the log), in their order; all end at 1.0. `heard`: steps, and when. Log "ours": the runtime's."""
    failures = Failures()
    for name, code, made, tail in seen:
        failures.note(ended(name, code), made, tail, ours=tail == "ours")
    return failures.verdict(*heard, now=2.5)


def test_an_error_before_the_first_step_ends_the_job_at_once() -> None:
    assert verdict(("worker-1", 1, 0, "Traceback …\nZeroDivisionError: division by zero")) == (
        "ScriptFailed: worker-1 ended with exit code 1: ZeroDivisionError: division by zero (before the job's first step); "
        "fix the script and run it again"
    )


@pytest.mark.parametrize(("heard", "over"), [((0, None), True), ((0, 2.0), True), ((0, 0.5), False), ((20, 2.0), False)])
def test_steps_that_were_not_heard_of_yet_are_asked_for(heard: tuple[int, float | None], over: bool) -> None:
    """A short job may train between two looks, and fail after it."""
    assert (verdict(("worker-1", 5, 0, "gone"), heard=heard) is not None) == over


@pytest.mark.parametrize(
    ("heard", "now", "holds"),
    [
        ((0, None), 1.5, True), ((0, 0.5), 1.5, True), ((0, 0.5), 3.1, False), ((0, 2.0), 2.5, True), ((20, 0.5), 1.5, False),
        ((20, 2.0), 2.5, False),
    ],
)  # fmt: skip
def test_nothing_is_started_again_while_it_is_not_heard_whether_there_was_a_step(
    heard: tuple[int, float | None], now: float, holds: bool
) -> None:
    failures = Failures()
    assert not failures.holds(*heard, now)
    failures.note(ended("worker-0", 1), 0, "gone")
    assert failures.holds(*heard, now) == holds
    failures.note(ended("worker-0", 1), 0, "gone")
    assert failures.holds(0, 0.5, 3.1), "a verdict"


def test_a_later_error_is_tried_once_more_and_the_first_one_is_shown() -> None:
    first = ("worker-0", 1, 12, "ValueError: labels")
    assert verdict(first) is None
    told = verdict(first, ("worker-0", 1, 12, "NameError: name 'loss' is not defined"))
    assert told is not None and told.startswith("ScriptFailed: worker-0 ended with exit code 1: ValueError: labels (at step 12)")
    assert "NameError" in told and told.endswith("the first error is the one to look at")
    same = verdict(first, first)
    assert same is not None and "started again" not in same


def test_an_end_with_0_in_the_middle_of_training_is_tried_once_more() -> None:
    failures = Failures()
    for name in ("worker-0", "worker-0", "worker-1"):
        failures.note_unfinished(ended(name, 0), 12)
        assert not failures.holds(12, 2.0, 2.5), "each process once"
    again = replace(ended("worker-1", 0), name="worker-1-again")
    failures.note_unfinished(again, 12)
    told = failures.verdict(12, 2.0, 2.5)
    assert told is not None and "worker-0 ended with exit code 0: it left in the middle of training" in told and "os._exit" in told


@pytest.mark.parametrize(
    "seen",
    [
        [("worker-0", 1, 12, "a"), ("worker-0", 1, 13, "a")],  # progress between them
        [("worker-0", 1, 12, "a"), ("worker-1", 1, 12, "a")],  # each once
        [("worker-0", 137, 0, "")],  # killed
        [("worker-0", 75, 0, "ours")],  # start me again
        [("worker-0", 79, 3, "ours"), ("worker-0", 79, 3, "ours")],  # it hung
        [("worker-0", 0, 0, "")],
    ],
)
def test_what_may_be_another_time_better_is_tried_again(seen: list[tuple[str, int, int, str]]) -> None:
    assert verdict(*seen) is None


def test_a_scripts_own_exit_code_is_its_error_whatever_the_number() -> None:
    assert (verdict(("worker-0", 77, 0, "usage: train.py")) or "").startswith("ScriptFailed: worker-0 ended with exit code 77: usage")


def test_what_was_asked_to_end_is_no_failure() -> None:
    failures = Failures()
    failures.note(ended("worker-0", 1, deleting=1.0), 0, "KeyboardInterrupt")
    failures.note(ended("ps-0", 1, role="shard"), 0, "MemoryError")
    assert failures.verdict(0, None, 2.5) is None
