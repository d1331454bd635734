"""What people see of a job, from the files of a run and from the objects of a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from psjob_client.cli.output import (
    BARS,
    CURVE,
    JOB_COLUMNS,
    PROCESS_COLUMNS,
    WATCHED_COLUMNS,
    WIDE_COLUMNS,
    job_facts,
    job_row,
    process_rows,
    short_name,
    sparkline,
    stage_rows,
)
from psjob_client.jobs import translate
from psjob_client.jobs.cluster import processes
from psjob_client.jobs.runs import _some
from psjob_client.jobs.translate import RunFiles
from psjob_client.jobs.view import HistoryView, JobView, job_html
from psjob_client.local.record import Samples
from psjob_client.problems import no_such_job, verb_step
from psjob_client.text import amount, span
from psjob_operator.contract import STEP_PARTS

TOLD = {
    "step": 40, "rate": 10.0, "eta": 6.0, "loss": "nan", "totalSteps": 100, "metrics": {"acc": 0.5, "bad": "nan"}, "mode": "bounded:3",
    "workers": [
        {"rank": 0, "clock": 42, "state": "joined", "start": 1, "rewinds": 1, "idle": 0.25, "passesAgain": 3},
        {"rank": 1, "clock": 40, "state": "absent"},
    ],
    "checkpoint": {"step": 30, "term": 2, "time": 990.0, "bytes": 2048, "path": "x", "final": False},
    "staleness": {"count": 4, "sum": 8.0, "max": 3.0, "buckets": [[1, 2], [4, 4]]},
    "diverged": "the loss is nan", "checkpointProblem": "disk full",
}  # fmt: skip
SHARD = {"index": 0, "attempt": 2, "counters": {"pushes": 7, "applied": 6}, "memory": {"rssBytes": 1 << 20}, "problem": None}
STORY: list[dict[str, Any]] = [
    {"time": 900, "what": "phase", "phase": "Pending"},
    {"time": 901, "what": "start", "name": "j-shard-0-a1", "role": "shard", "index": 0, "number": 1, "at": 901},
    {"time": 902, "what": "start", "name": "j-worker-0-r1", "role": "worker", "index": 0, "number": 1, "at": 902},
    {"time": 903, "what": "serving", "name": "j-shard-0-a1"},
    {"time": 904, "what": "phase", "phase": "Running"},
    {"time": 910, "what": "end", "name": "j-shard-0-a1", "code": 137, "signal": 9, "problem": "", "asked": False},
    {"time": 911, "what": "start", "name": "j-shard-0-a2", "role": "shard", "index": 0, "number": 2, "at": 911},
]
STATUS = {"phase": "Running", "shards": [{"index": 0, "attempt": 2, "state": "Serving"}], "restarts": {"total": 1, "causes": {"Signal": 1}}}


def files(**change: Any) -> RunFiles:
    made: dict[str, Any] = {
        "id": "j-1", "place": "/x/.psjob/j-1", "alive": True, "made": 890.0, "run": {"job": "j", "run": "j-1", "created": 899.0},
        "status": STATUS, "live": {"time": 999.0, "coordinator": TOLD, "shards": [SHARD]},
        "config": {"job": "j", "mode": "bounded"}, "story": STORY,
    }  # fmt: skip
    return RunFiles(**{**made, **change})


def test_a_running_run() -> None:
    job = translate.run_view(files())
    assert (job.id, job.name, job.where, job.phase, job.mode, job.fresh, job.active) == (
        "j-1",
        "j",
        "local",
        "Running",
        "bounded:3",
        True,
        True,
    )
    assert job.progress.step == 40 and job.progress.total == 100 and job.progress.loss is None and job.progress.metrics == {"acc": 0.5}
    (shard,) = job.shards
    assert (shard.attempt, shard.restarts, shard.pushes, shard.memory_bytes, shard.name) == (2, 1, 7, 1 << 20, "j-shard-0-a2")
    first, second = job.workers
    assert (first.state, first.clock, first.behind, first.idle, first.rewinds, first.passes_again) == ("Running", 42, 0, 0.25, 1, 3)
    assert (second.state, second.behind, second.passes_again) == ("Waiting", 2, 0)
    assert ("run again", "3 passes over data") in job_facts(job, 1000.0)
    assert job.staleness is not None and (job.staleness.mean, job.staleness.max) == (2.0, 3.0)
    assert job.warnings == ("the loss is nan",) and job.problems == ("disk full",)
    assert job.checkpoint is not None and job.checkpoint.age(1000.0) == 10.0
    assert JobView.model_validate(json.loads(json.dumps(job.to_manifest()))) == job, "its JSON is whole"


def test_where_a_step_goes_is_a_line_and_a_series_a_part() -> None:
    parts = dict(zip(STEP_PARTS, (0.026, 0.009, 0.12, 0.002, 0.04, 0.01, 0.0), strict=True))
    told = {**TOLD, "stepParts": parts, "stepAdvice": "workers compute for 13% of their time"}
    job = translate.run_view(files(live={"time": 999.0, "coordinator": told, "shards": []}))
    line = "207 ms: compute 26, copy out 9, wire 120, others 2, update 40, copy back 10, psjob 0"
    facts = job_facts(job, 1000.0)
    assert ("a step", line) in facts and ("advice", "workers compute for 13% of their time") in facts
    assert JobView.model_validate(json.loads(json.dumps(job.to_manifest()))) == job
    for odd in ({"compute": 1.0}, {**parts, "wire": "x"}, {**parts, "wire": -1.0}, [1.0] * 7, None):
        quiet = translate.run_view(files(live={"time": 999.0, "coordinator": {**TOLD, "stepParts": odd}, "shards": []}))
        assert quiet.progress.step_parts == {} and "a step" not in dict(job_facts(quiet, 1000.0)), odd
    lines = [{"time": 1.0 + at, "step": at, "rate": 2.0, "metrics": {}, "stepParts": [*parts.values()][: 7 - at]} for at in range(2)]
    history = translate.history_view(lines)
    wire = history.of("stepParts.wire")
    assert wire is not None and wire.values == (0.12,) and wire.steps == (0,), "a line of another version has none"


def test_stages_come_from_the_running_job_or_else_from_its_status() -> None:
    stages: list[Any] = [
        {
            "index": 0, "name": "front", "desired": 2, "ready": 1, "step": 9, "delay": 0.0, "idle": 0.25,
            "rssBytes": 1 << 20, "peakBytes": 3 << 20, "devicePeakBytes": None, "waiting": None,
        },
        {"name": "back", "idle": "x", "waiting": "gradients, for 4 s"}, "odd",
    ]  # fmt: skip
    job = translate.run_view(files(live={"time": 999.0, "coordinator": {**TOLD, "stages": stages}, "shards": []}))
    assert stage_rows(job) == [
        ("front", "1/2", "9", "0", "25%", "1 MiB", "3 MiB", "-", ""),
        ("back", "0/0", "-", "-", "-", "-", "-", "-", "gradients, for 4 s"),
    ]
    assert JobView.model_validate(json.loads(json.dumps(job.to_manifest()))) == job
    assert translate.run_view(files()).stages == ()
    status = {**RAW["status"], "stages": [{"name": "front", "workersReady": "2/2", "idleFraction": 0.5, "peakDeviceBytes": 1 << 30}]}
    stored = translate.cluster_view({**RAW, "status": status}, "kind")
    assert stage_rows(stored) == [("front", "2/2", "-", "-", "50%", "-", "-", "1 GiB", "")]
    live = translate.cluster_view({**RAW, "status": status}, "kind", (), {0: {"coordinator": {**TOLD, "stages": stages[:1]}}})
    assert [stage.workers_ready for stage in live.stages] == ["1/2"]
    quiet = translate.cluster_view({**RAW, "status": status}, "kind", (), {0: {"coordinator": TOLD}})
    assert quiet.stages == stored.stages


def test_a_run_that_was_killed_has_failed_and_can_be_resumed() -> None:
    job = translate.run_view(files(alive=False))
    assert job.phase == "Failed" and job.reason == "Killed" and "psjob resume j-1" in job.message
    assert {one.state for one in (*job.shards, *job.workers)} == {"Ended"}


@pytest.mark.parametrize("result", ["Complete", "Failed", "Suspended"])
def test_a_run_that_has_ended(result: str) -> None:
    run = {"job": "j", "created": 899.0, "ended": 950.0, "result": result, "failure": "ScriptFailed: boom" if result == "Failed" else None}
    job = translate.run_view(files(alive=False, run=run))
    assert job.phase == result and job.seconds(2000.0) == 51.0 and not job.active
    assert (job.end, job.suspended) == ((None, True) if result == "Suspended" else (result, False))
    said = {"Failed": ("ScriptFailed", "boom"), "Complete": ("Diverged", "the loss is nan"), "Suspended": ("", "")}
    assert (job.reason, job.message) == said[result]
    assert job_row(job, 2000.0, JOB_COLUMNS)[1] == ("Complete, diverged" if result == "Complete" else result)
    if result == "Complete":
        apart = translate.run_view(files(alive=False, run=run, live={"coordinator": {"drift": "weights differ"}}))
        assert (apart.reason, apart.message) == ("WorkersDiffer", "weights differ")
        assert job_row(apart, 2000.0, JOB_COLUMNS)[1] == "Complete, workers differ"
    well = translate.run_view(files(alive=False, run=run, live={}))
    assert job_row(well, 2000.0, JOB_COLUMNS)[1] == result


@pytest.mark.parametrize("broken", [{"status": {"phase": 3}}, {"live": {}, "status": {}}, {"story": (), "config": {}, "run": {}}])
def test_a_folder_that_is_damaged_or_of_an_older_psjob_is_still_shown(broken: dict[str, Any]) -> None:
    assert translate.run_view(files(**broken)).id == "j-1"


def test_the_timeline_has_a_span_a_phase_and_a_process() -> None:
    spans = translate.run_timeline(STORY, until=920.0)
    assert [(one.lane, one.state, one.number, one.begin, one.end, one.ending) for one in spans] == [
        ("job", "Pending", 0, 900, 904, ""),
        ("job", "Running", 0, 904, None, ""),
        ("shard 0", "Starting", 1, 901, 903, ""),
        ("shard 0", "Serving", 1, 903, 910, "Failed"),
        ("shard 0", "Starting", 2, 911, 920.0, ""),
        ("worker 0", "Running", 1, 902, 920.0, ""),
    ]
    assert translate.run_timeline(STORY, until=None)[-1].end is None


def test_events_are_what_is_news() -> None:
    assert [(one.reason, one.about) for one in translate.run_events(STORY)] == [("Ended", "j-shard-0-a1"), ("Started", "j-shard-0-a2")]


def pod(role: str, index: int, number: int, **status: Any) -> dict[str, Any]:
    labels = {"psjob.dev/role": role, "psjob.dev/index": str(index), "psjob.dev/number": str(number)}
    name = f"j-{role}-{index}-{'a' if role == 'shard' else 'r'}{number}"
    owner = [{"controller": True, "uid": "u"}]
    metadata = {"name": name, "uid": name, "labels": labels, "ownerReferences": owner, "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {"metadata": metadata, "spec": {"containers": [{"name": role}], "nodeName": "n1"}, "status": {"phase": "Running", **status}}


def ended(role: str, code: int) -> list[dict[str, Any]]:
    return [{"name": role, "state": {"terminated": {"exitCode": code, "reason": "Error", "finishedAt": "2026-01-01T00:01:00Z"}}}]


RAW: dict[str, Any] = {
    "apiVersion": "psjob.dev/v1alpha1", "kind": "PSTrainingJob",
    "metadata": {
        "name": "j", "namespace": "n", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z", "managedFields": [1],
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", "mine": "x"},
    },
    "spec": {"training": {"mode": "sync"}, "shards": {"replicas": 1}},
    "status": {
        "phase": "Running", "run": "u", "shards": [{"index": 0, "attempt": 2, "state": "Serving", "pod": "j-shard-0-a2"}],
        "workers": {"problems": [{"index": 1, "reason": "ImagePullBackOff", "message": "no such image"}]},
        "progress": {"step": 9, "loss": 0.5, "stepsPerSecond": 2.0, "time": "2026-01-01T00:01:00Z"},
        "conditions": [
            {"type": "Ready", "status": "True", "reason": "Running", "message": "all run", "lastTransitionTime": "2026-01-01T00:00:10Z"},
        ],
    },
}  # fmt: skip


def test_a_job_of_a_cluster_without_and_with_what_its_shards_say() -> None:
    pods = processes([pod("shard", 0, 2), pod("worker", 0, 1), pod("worker", 0, 2, containerStatuses=ended("worker", 3))], "u")
    job = translate.cluster_view(RAW, "kind", pods)
    assert (job.place, job.phase, job.reason, job.fresh, job.progress.step, job.progress.metrics) == (
        "kind/n",
        "Running",
        "Running",
        False,
        9,
        {"loss": 0.5},
    )
    assert job.shards[0].restarts == 1 and job.shards[0].node == "n1"
    assert [(one.index, one.state, one.restarts) for one in job.workers] == [(0, "Failed", 1), (1, "Pending", 0)]
    assert "exit code 3" in (job.workers[0].problem or "") and job.workers[1].problem == "ImagePullBackOff: no such image"
    assert job.problems == ("worker 1: ImagePullBackOff: no such image",)
    live = translate.cluster_view(RAW, "kind", pods, {0: {"coordinator": TOLD, **SHARD}}, now=1000.0)
    assert (
        live.fresh and live.progress.step == 40 and live.mode == "bounded:3" and live.shards[0].pushes == 7 and live.progress.time == 1000.0
    )


@pytest.mark.parametrize("condition", ["Complete", "Failed", "Suspended"])
@pytest.mark.parametrize("truth", ["True", "False"])
def test_conditions_say_how_a_job_of_a_cluster_stands_and_its_phase_does_not(condition: str, truth: str) -> None:
    told = {"type": condition, "status": truth, "reason": "Told", "lastTransitionTime": "2026-01-01T00:00:10Z"}
    for phase in ("Running", "Complete", "Failed", "Suspended"):
        job = translate.cluster_view({**RAW, "status": {**RAW["status"], "phase": phase, "conditions": [told]}}, "kind")
        assert job.phase == phase and job.active == (truth == "False")
        assert (job.over, job.suspended) == ((False, False) if job.active else (condition != "Suspended", condition == "Suspended"))


def test_the_manifest_of_a_job_is_what_its_author_wrote() -> None:
    made = translate.manifest_of(RAW)
    assert made["metadata"] == {"name": "j", "namespace": "n", "annotations": {"mine": "x"}} and set(made) == {
        "apiVersion",
        "kind",
        "metadata",
        "spec",
    }


def test_the_timeline_of_a_cluster() -> None:
    raw = [pod("shard", 0, 1, containerStatuses=ended("shard", 0)), pod("worker", 0, 1, conditions=[{"type": "Ready", "status": "True"}])]
    pods = processes(raw, "u")
    spans = translate.cluster_timeline(translate.cluster_view(RAW, "kind", pods), pods, RAW, translate.pod_ends(raw))
    assert [(one.lane, one.state, one.ending) for one in spans] == [
        ("job", "Pending", ""),
        ("job", "Running", ""),
        ("shard 0", "Serving", "Succeeded"),
        ("worker 0", "Running", ""),
    ]
    assert spans[2].end == spans[2].begin + 60


def test_events_of_both_apis_in_their_order() -> None:
    raw = [
        {
            "lastTimestamp": "2026-01-01T00:00:05Z",
            "involvedObject": {"kind": "Pod", "name": "p"},
            "reason": "B",
            "type": "Warning",
            "count": 3,
        },
        {"eventTime": "2026-01-01T00:00:01.5Z", "regarding": {"kind": "PSTrainingJob", "name": "j"}, "reason": "A", "note": "x\ny"},
    ]
    first, second = translate.cluster_events(raw)
    assert (first.reason, first.about, first.message) == ("A", "", "x y") and (second.about, second.count, second.type) == (
        "p",
        3,
        "Warning",
    )


def test_series_skip_what_is_no_number_and_no_news() -> None:
    lines = [
        {"time": 1, "step": 1, "rate": None, "metrics": {"loss": 2.0, "acc": 0.1}},
        {"time": 2, "step": 1, "rate": 5.0, "metrics": {"loss": 2.0}},
        {"time": 3, "step": 2, "rate": 6.0, "metrics": {"loss": float("nan"), "acc": 0.2}},
        {"step": 3},
    ]
    history = translate.history_view(lines)
    assert [(one.name, one.steps, one.values) for one in history.series] == [
        ("loss", (1,), (2.0,)), ("rate", (1, 2), (5.0, 6.0)), ("acc", (1, 2), (0.1, 0.2)),
    ]  # fmt: skip


def test_a_report_is_one_point_at_its_own_step() -> None:
    """A line holds what was given last: accuracy, told once a pass, would be a staircase."""
    told = [(5, 0.9, 5, 0.5, 4), (6, 0.8, 6, 0.5, 4), (7, 0.8, 7, 0.5, 4), (9, 0.7, 9, 0.5, 8), (10, 0.7, 10, 0.6, 10)]
    lines = [
        {"time": at, "step": at, "rate": 1.0, "metrics": {"loss": loss, "acc": acc}, "reported": [of_loss, of_acc]}
        for at, loss, of_loss, acc, of_acc in told
    ]
    history = translate.history_view(lines)
    loss, acc = history.of("loss"), history.of("acc")
    assert loss is not None and (loss.steps, loss.values) == ((5, 6, 7, 9, 10), (0.9, 0.8, 0.8, 0.7, 0.7))
    assert acc is not None and (acc.steps, acc.values) == ((4, 8, 10), (0.5, 0.5, 0.6)), "the same value again is a report too"


@pytest.mark.parametrize(("lines", "most"), [(0, 5), (1, 5), (5, 5), (6, 5), (11, 5), (1000, 7), (9, None)])
def test_of_a_long_record_so_many_lines_are_read_and_the_last_is_among_them(lines: int, most: int | None) -> None:
    kept = translate.thinned(list(range(lines)), most)
    assert len(kept) <= (most or lines) and list(kept[-1:]) == list(range(lines))[-1:]
    assert len(kept) >= min(lines, (most or lines) // 2)
    if most is not None:
        text = b"".join(b"%d\n" % number for number in range(lines))
        some = [int(line) for line in _some(text, most)]
        assert len(some) <= most and some[-1:] == list(range(lines))[-1:] and some == sorted(set(some))
        assert len(some) >= min(lines, most // 2)


def test_a_file_of_samples_stays_small_and_keeps_the_ends(tmp_path: Path) -> None:
    samples = Samples(tmp_path / "h", most=64, least=0.0)
    for step in range(1000):
        samples.take({"step": step, "rate": 1.0, "metrics": {"loss": 1.0 / (step + 1)}}, float(step))
    lines = (tmp_path / "h").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert 16 <= len(lines) <= 64 and steps == sorted(steps) and steps[-1] > 900


def test_html_is_escaped_and_names_its_curve() -> None:
    history = HistoryView.model_validate({"series": [{"name": "loss", "times": [1, 2], "steps": [1, 9], "values": [2.0, 1.0]}]})
    job = translate.run_view(files()).model_copy(update={"id": "<b>&", "warnings": ("<script>",)})
    text = job_html(job, history, now=1000.0)
    assert "<script>" not in text and "&lt;b&gt;&amp;" in text and 'aria-label="loss 2 to 1, steps 1 to 9"' in text
    assert "<polyline" not in job_html(job, HistoryView(), now=1000.0)


def test_rows_are_as_wide_as_their_heads() -> None:
    job = translate.run_view(files())
    assert all(len(job_row(job, 1000.0, head)) == len(head) for head in (JOB_COLUMNS, WATCHED_COLUMNS, WIDE_COLUMNS))
    assert {len(row) for row in process_rows(job)} == {len(PROCESS_COLUMNS)}
    assert dict(job_facts(job, 1000.0))["checkpoint"] == "step 30, 10 s ago, 2 KiB"
    assert sparkline([1.0] * 100) == BARS[0] * 20 or len(sparkline([1.0] * 100)) <= CURVE
    assert sparkline([0.0, 1.0]) == "▁█"
    assert short_name("j-worker-0-r1", "j") == "worker-0"


def test_spans_and_sizes_are_read_by_people() -> None:
    assert [span(value) for value in (None, 5, 65, 3700, 90_000)] == ["", "5 s", "1 min 5 s", "1 h 1 min", "1 d 1 h"]
    assert [amount(value) for value in (None, 12, 1536, 5 << 30)] == ["", "12 B", "1.5 KiB", "5 GiB"]


def test_near_names_are_suggested() -> None:
    assert "did you mean digits?" in str(no_such_job("digit", "here", ["digits", "lda"], verb_step("list")))
    unknown = no_such_job("zzz", "here", ["digits"], verb_step("list"))
    assert "`client.list()` shows" in str(unknown) and "`psjob list` shows" in unknown.in_terminal
