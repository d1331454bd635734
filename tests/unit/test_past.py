"""What shard 0 keeps of a job's numbers over time: bounded, in order, from the beginning to now."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from psjob import contract
from psjob.protocol.coordinator.report import MOST_ENTRIES, MOST_NAMES, JobProgress, MetricHistory


@given(st.integers(1, 3000), st.floats(0.01, 10.0))
def test_it_spans_all_of_the_time_in_a_bounded_list(steps: int, seconds: float) -> None:
    past = MetricHistory(most=16)
    for step in range(steps):
        past.note(step, {"loss": 1.0}, None, 1000.0 + step * seconds, {"loss": step})
    told = past.told()
    times = [entry["time"] for entry in told]
    assert 1 <= len(told) < 16 and times == sorted(times)
    spacing = max((after - before for before, after in pairwise(times)), default=0.0)
    whole = (steps - 1) * seconds
    assert spacing <= max(2 * whole / 4, 2 * seconds, 2.0), "no hole"
    assert whole - (times[-1] - 1000.0) <= max(whole / 2, seconds, 1.0), "the newest is near the end"


def test_its_answer_fits_what_is_read() -> None:
    past = MetricHistory()
    names = {f"{number:064d}": -1.2345678901234567e-300 for number in range(2 * MOST_NAMES)}
    for step in range(MOST_ENTRIES - 1):
        past.note(10**12 + step, names, -1.2345678901234567e-300, 1.8e9 + 2 * step + 0.123456, dict.fromkeys(names, 10**12 + step))
    assert len(past.told()) == MOST_ENTRIES - 1
    assert len(json.dumps({"entries": past.told()})) < contract.STATUS_BYTES


def test_progress_keeps_what_was_reported() -> None:
    progress = JobProgress()
    for step in range(1, 5):
        progress.report(0, {"loss": 1.0 / step})
        progress.passed(step, 1000.0 + 2 * step)
    assert [(entry["step"], entry["metrics"]["loss"]) for entry in progress.past.told()] == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)]
    assert progress.past.told()[-1]["reported"] == [3], "it was given when three steps had passed"
    progress.report(0, {"accuracy": 0.5})
    progress.report(0, {"loss": 0.1})
    said = progress.status(1010.0)
    assert dict(zip(said["metrics"], said["reported"], strict=True)) == {"accuracy": 4, "loss": 4}


def test_a_numbers_first_value_waits_for_no_second() -> None:
    past = MetricHistory()
    past.note(1, {}, None, 1000.0, {})
    past.note(2, {"loss": 0.5}, None, 1000.01, {"loss": 2})
    past.note(3, {"loss": 0.25}, None, 1000.02, {"loss": 3})
    past.note(4, {"loss": 0.2, "grad_norm": 3.0}, None, 1000.03, {"loss": 4, "grad_norm": 4})
    assert [(entry["step"], entry["metrics"]) for entry in past.told()] == [
        (1, {}),
        (2, {"loss": 0.5}),
        (4, {"loss": 0.2, "grad_norm": 3.0}),
    ]


def test_names_without_end_make_no_entries_without_end() -> None:
    past = MetricHistory()
    for step in range(10_000):
        past.note(step, {f"loss_{step}": 1.0}, None, 1000.0 + step * 1e-6, {f"loss_{step}": step})
    assert len(past.told()) == MOST_NAMES
