"""The live part of the terminal, as a person sees it: eight states of a job at three widths.

`python -m tests.unit.test_screen` draws the files in `tests/unit/screens` again. Look at what it has changed.

- The pure parts of the page: which points are kept, what is told, whose files are carried.
"""

from __future__ import annotations

import hashlib
import os
import re
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hack.terminal import terminal
from psjob_client.compare.outcome import Comparison, SideOutcome, repeated
from psjob_client.compare.report import report_rows
from psjob_client.jobs.view import EventView, HistoryView, JobView, Series
from psjob_client.local import console
from psjob_client.local.console import BAR
from psjob_client.local.monitor import RunWatch
from psjob_client.ui.shown import (
    ALL,
    EVENTS,
    FEW,
    LEAST,
    MOST,
    STEP,
    TIME,
    curve_data,
    curves,
    detail,
    job_settings,
    points_each,
    thin,
    unwound,
)
from psjob_operator.api.status import JobStatus
from psjob_operator.contract import STEP_PARTS

SCREENS = Path(__file__).parent / "screens"
NOW = 1_000_000.0
WIDTHS = (80, 100, 120)


def shards(*states: str, attempts: dict[int, int] | None = None) -> list[dict[str, Any]]:
    return [{"index": index, "attempt": (attempts or {}).get(index, 1), "state": state} for index, state in enumerate(states)]


def workers(*clocks: int, **more: Any) -> list[dict[str, Any]]:
    return [{"rank": rank, "start": 1, "state": "joined", "clock": clock, **more} for rank, clock in enumerate(clocks)]


WAITING = "shards [1] are restoring, for 3 s: 240 of 510 MB of the checkpoint of step 1150"
PROBLEM = (
    "cannot write v000001-c000007-shard001-a1.safetensors in .psjob/hello-1129-120000-abcdef: ENOSPC, the volume is full: free space on it"
)
ADVICE = (
    "workers compute for 13% of their time: of a step of 208 ms they wait for the wire for 120 ms. What helps most: "
    "training.compression.push: bf16 and pull: bf16, half the bytes; attach(overlap=True), gradients leave while the rest is computed"
)
RUNNING = {"step": 1200, "loss": 0.2134, "rate": 45.21, "totalSteps": 3680, "eta": 54.8, "checkpoint": {"step": 1150, "time": NOW - 2}}
STATES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pending": ({"phase": "Pending", "shards": shards("Starting", "Starting")}, {}),
    "first steps": ({"phase": "Running", "shards": shards("Serving")}, {"step": 3, "rate": 12.0, "workers": workers(3)}),
    "running": ({"phase": "Running", "shards": shards("Serving", "Serving")}, {**RUNNING, "workers": workers(1200, 1201)}),
    "a shard is back": ({"phase": "Recovering", "shards": shards("Serving", "Starting", attempts={1: 2}), "restarts": {"total": 1}},
        {**RUNNING, "workers": workers(1200, 1200),
        "waiting": "shards [1] are restoring, for 3 s: 240 of 510 MB of the checkpoint of step 1150"}),
    "a worker is away": ({"phase": "Recovering", "shards": shards("Serving", "Serving"), "restarts": {"total": 1}},
        {**RUNNING, "workers": [*workers(1200, 1200), {"rank": 2, "start": 2, "state": "absent", "clock": 1200}],
        "waiting": "worker 2 has not joined, for 2 s"}),
    "async": ({"phase": "Running", "shards": shards("Serving", "Serving")}, {**RUNNING, "workers": workers(1200, 1244, 1201, 1390)}),
    "slow steps": ({"phase": "Running", "shards": shards("Serving")},
        {**RUNNING, "workers": workers(1200, 1200), "stepParts": dict(zip(STEP_PARTS, (0.0264, 0.009, 0.12, 0.002, 0.0404, 0.0101, 4e-5),
        strict=True)), "stepAdvice": ADVICE}),
    "many": ({"phase": "Running", "shards": shards(*["Serving"] * 31, "Lost", attempts={31: 3})},
        {**RUNNING, "workers": workers(*range(1200, 1328, 2))}),
    "no checkpoint can be written": ({"phase": "Running", "shards": shards("Serving", "Serving")},
        {**RUNNING, "checkpointProblem": PROBLEM, "workers": [*workers(1200), {"rank": 1, "start": 1, "state": "left", "clock": 1200}]}),
}  # fmt: skip


def drawn(state: str, width: int) -> str:
    """What the terminal shows, after lines of the script, while the job is in this state."""
    status, told = STATES[state]
    watch = RunWatch(30.0, b"", progress={"coordinator": told})
    with terminal(width) as it, os.fdopen(os.dup(it.theirs), "w") as out, patch.dict(os.environ, it.environment), patch("sys.stdout", out):
        shown = console.Display("hello", progress=True)
        with patch("time.time", lambda: NOW):
            shown.output("epoch 0: loss 0.51")
            for _ in range(2):  # the second is drawn over the first
                shown._shown = 0.0
                shown.refresh(JobStatus.model_validate(status), watch)
        out.flush()
        it.settle()
        lines = it.shown()
        shown.close()
    return "".join(line + "\n" for line in lines)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("state", STATES)
def test_a_screen_is_as_it_was_approved(state: str, width: int) -> None:
    found = drawn(state, width)
    assert found == (SCREENS / f"{state.replace(' ', '-')}-{width}.txt").read_text(), f"\n{found}"
    assert found.startswith("epoch 0: loss 0.51\nhello  ") and found.count("hello  ") == 1
    assert all(len(line) <= width for line in found.splitlines())


def test_nothing_that_is_waited_for_is_cut_off() -> None:
    for state, (_, told) in STATES.items():
        for text in (told.get("waiting"), told.get("checkpointProblem"), told.get("stepAdvice")):
            assert text is None or "".join(text.split()) in "".join(drawn(state, 80).split()), state


def test_the_bar_is_as_full_as_the_job_is_far() -> None:
    far = [line for line in drawn("running", 100).splitlines() if "━" in line]
    assert len(far) == 1 and len(far[0].strip()) == BAR


def main() -> None:
    SCREENS.mkdir(exist_ok=True)
    for state in STATES:
        for width in WIDTHS:
            (SCREENS / f"{state.replace(' ', '-')}-{width}.txt").write_text(drawn(state, width))


if __name__ == "__main__":
    main()


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=400), st.integers(4, 60))
def test_a_thin_curve_keeps_its_ends_and_its_extremes(values: list[float], most: int) -> None:
    kept = thin(values, most)
    assert kept == sorted(set(kept)) and len(kept) <= most
    assert len(values) <= most or {0, len(values) - 1} <= set(kept)
    finite = [value for value in values[1:-1] if value == value and abs(value) != float("inf")]
    if len(values) > most and finite:
        chosen = [values[at] for at in kept]
        assert min(finite) in chosen and max(finite) in chosen


def test_a_spike_of_one_point_is_seen() -> None:
    values = [1.0] * 10_000
    values[7_777] = 50.0
    assert 7_777 in thin(values, 100)


def test_a_curve_tells_how_many_points_it_has() -> None:
    series = Series(name="loss", times=tuple(range(1000)), steps=tuple(range(1000)), values=(0.5,) * 1000)
    told = curves(HistoryView(series=(series,)), STEP, 0.0, 50)["series"][0]
    assert told["count"] == 1000 and len(told["x"]) == len(told["y"]) <= 50 and told["last"] == 0.5


@given(st.lists(st.integers(0, 30), max_size=60))
def test_steps_that_a_restart_undid_are_left_out(steps: list[int]) -> None:
    points = [(float(at), float(step), float(at)) for at, step in enumerate(steps)]
    kept = unwound(points)
    assert [step for _, step, _ in kept] == sorted({step for _, step, _ in kept}), "each step once, rising"
    assert not points or kept[-1] == points[-1], "what was told last holds"
    undone = [one for one in points if any(later[1] <= one[1] for later in points[points.index(one) + 1 :])]
    assert [one for one in points if one not in undone] == kept


def test_a_curve_over_time_goes_back_in_nothing() -> None:
    points = [(1.0, 10.0, 0.5), (2.0, 20.0, 0.4), (9.0, 11.0, 0.45)]
    assert curve_data(points, STEP, 0.0) == {"x": [10.0, 11.0], "y": [0.5, 0.45]}
    assert curve_data(points, TIME, 0.0) == {"x": [1.0, 2.0, 9.0], "y": [0.5, 0.4, 0.45]}


def test_all_points_are_smoothed_and_not_those_that_are_kept() -> None:
    """The least and the largest values of stretches are kept: their mean is not that of the curve."""
    points = [(float(at), float(at), 10.0 if at % 100 == 50 else 1.0) for at in range(10_000)]
    told = curve_data(points, STEP, 0.99, 100)
    assert len(told["smooth"]) == len(told["y"]) <= 100 and max(told["y"]) == 10.0
    assert 1.0 <= max(told["smooth"]) < 1.3, "the mean of the curve is 1.09, that of what is kept is above 3"
    assert "smooth" not in curve_data(points[: FEW - 1], STEP, 0.99)


@pytest.mark.parametrize("runs", [1, 2, 10, 33, 100, 200])
def test_many_curves_have_few_points_each(runs: int) -> None:
    each = points_each(runs)
    assert LEAST <= each <= MOST and (each == LEAST or each * runs <= max(ALL, MOST))


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["python", "train.py", "--lr", "0.1", "--fp16", "--seed=3"],
         {"script": "python train.py", "--lr": "0.1", "--fp16": "yes", "--seed": "3"}),
        (["python", "-m", "pkg", "--tag", "a", "--tag", "b"], {"script": "python -m pkg", "--tag": "a, b"}),
        (["--a=1=2", "--", "x"], {"script": "-- x", "--a": "1=2"}),
    ],
)  # fmt: skip
def test_a_scripts_flags_are_hyperparameters(words: list[str], found: dict[str, str]) -> None:
    container = {"name": "worker", "command": words, "env": [{"name": "A", "value": 1}, {"name": "SECRET", "valueFrom": {}}]}
    manifest = {"spec": {"training": {"mode": "async", "local": {"innerSteps": 5}, "seed": None}, "workers": {"replicas": 2,
                "template": {"spec": {"containers": [container]}}}}}  # fmt: skip
    rest = {"env.A": "1", "training.mode": "async", "training.local.innerSteps": "5", "workers.replicas": "2"}
    assert job_settings(manifest) == found | rest


@pytest.mark.parametrize(
    "manifest",
    [None, {}, {"spec": []}, {"spec": {"workers": [], "shards": 3}}, {"spec": {"workers": {"template": {"spec": {"containers": "x"}}}}}],
)
def test_a_manifest_that_is_none_has_no_hyperparameters_and_no_error(manifest: Any) -> None:
    assert all(isinstance(value, str) for value in job_settings(manifest).values())


def test_old_events_are_counted() -> None:
    job = JobView(id="a", name="a", where="local", place=".")
    told = detail(job, (), [EventView(time=float(at)) for at in range(250)], (), 300.0)
    assert len(told["events"]) == EVENTS and told["moreEvents"] == 50 and told["events"][-1]["time"] == 249.0


@pytest.mark.parametrize(
    ("standing", "ended", "until"),
    [({"end": "Complete"}, 100.0, 100.0), ({}, None, 300.0), ({"suspended": True}, 100.0, 100.0)],
)
def test_the_time_line_of_a_job_that_is_over_ends_with_it(standing: dict[str, Any], ended: float | None, until: float) -> None:
    job = JobView(id="a", name="a", where="local", place=".", ended=ended, **standing)
    assert detail(job, (), (), (), 300.0)["until"] == until


@pytest.mark.parametrize("name", ["uplot.js", "uplot.css"])
def test_what_is_carried_is_what_was_written_down(name: str) -> None:
    static = files("psjob_client.ui").joinpath("static")
    line = next(line for line in static.joinpath("VENDOR.md").read_text().splitlines() if f"`{name}`" in line)
    assert hashlib.sha256(static.joinpath(name).read_bytes()).hexdigest() in line
    assert "MIT" in line and "MIT" in static.joinpath("uplot.LICENSE").read_text()


def test_the_page_loads_nothing_from_elsewhere() -> None:
    static = files("psjob_client.ui").joinpath("static")
    for name in ("index.html", "page.css", "page.js", "views.js", "charts.js", "timeline.js", "dom.js", "icon.svg"):
        text = static.joinpath(name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|innerHTML|eval\(", text), name


def test_a_side_that_was_trained_several_times_has_a_mean_and_a_spread() -> None:
    def side(loss: float, diverged: bool = False) -> SideOutcome:
        curve_data = [(0.0, 0.0, 2.0), (1.0, 1.0, loss)]
        return SideOutcome("sync", "", "Complete", 10.0 * loss, 2.0, {"loss": curve_data}, {"loss": loss}, diverged=diverged)

    found = repeated([side(0.3), side(0.1), side(0.2)])
    assert found.repeats == 3 and found.final["loss"] == pytest.approx(0.2) and found.spread["loss"] == pytest.approx(0.1)
    assert found.curves["loss"][-1][2] == 0.2 and found.elapsed == pytest.approx(2.0)
    table = report_rows(Comparison("job", "s", {}, "", [found]))
    assert "0.2 ± 0.1" in table[1]
    spoilt = repeated([side(0.3), side(0.1, diverged=True)])
    assert spoilt.verdict == "diverged" and spoilt.warnings[0] == "diverged in 1 of 2 runs"
    assert repeated([found]) is found
