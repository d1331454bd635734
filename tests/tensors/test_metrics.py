"""The operator's /metrics: the table is what is exposed, labels are bounded, and nothing that a pod says breaks the page.

The status of the largest job that a manifest may ask for is read whole, with every name and number at its longest.
"""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from psjob.protocol.coordinator.members import State
from psjob.protocol.coordinator.report import MAX_METRICS, JobProgress
from psjob.shard.push_metrics import GAPS, STALENESS_EDGES, Histogram
from psjob.shard.status_server import status
from psjob_operator.api.load import load_job
from psjob_operator.api.status import stamp
from psjob_operator.cluster import metrics
from psjob_operator.cluster.client import JobKey, KubernetesClient, Limits, _verb
from psjob_operator.cluster.main import Health
from psjob_operator.cluster.metrics import CONTENT_TYPE, JobReading, Meter, Sources, metrics_text, resource_of
from psjob_operator.cluster.observe import parse_status
from psjob_operator.cluster.queue import Queue
from psjob_operator.contract import STATUS_BYTES, STEP_PARTS
from tests.tensors.desk import Clerk, Desk
from tests.unit.api_manifest import GOOD

NOW = 1_790_000_000.0
STATUS: dict[str, Any] = {
    "phase": "Running",
    "internal": {"readyTime": "2026-09-21T14:01:00Z"},
    "shardsReady": "2/2",
    "workersReady": "3/4",
    "startTime": "2026-09-21T14:00:00Z",
    "checkpoint": {"step": 100, "time": "2026-09-21T14:12:00Z", "bytes": 4096},
    "interruption": {"since": "2026-09-21T14:13:00.500Z", "cause": "OOMKilled"},
    "lastRecovery": {"cause": "Error", "durationSeconds": 12.3, "stepsLost": 25, "time": "2026-09-21T14:10:00Z"},
    "restarts": {"total": 3, "causes": {"Error": 1, "OOMKilled": 2}, "counted": 2, "stepsLost": 25, "updatesLost": 7},
}


COMPLETE, FAILED = ({"type": kind, "status": "True"} for kind in ("Complete", "Failed"))
RESTS: dict[str, dict[str, Any]] = {
    "Complete": {"conditions": [COMPLETE]},
    "Failed": {"conditions": [FAILED]},
    "Suspended": {"internal": {}, "startTime": None},
    "Pending": {"internal": {}},
}
"""What of a status says that a job in this phase does not train."""


def told(values: list[float] = [], gaps: list[float] = [], **said: Any) -> dict[str, Any]:  # noqa: B006
    """As shard 0's status port says it, by way of JSON."""
    staleness, gap = Histogram(STALENESS_EDGES), Histogram(GAPS)
    for value in values:
        staleness.see(value)
    for value in gaps:
        gap.see(value)
    coordinator = {"step": 120, "loss": 0.25, "rate": 10.5, "pushBytes": 1 << 20, "staleness": staleness.told(), "gap": gap.told(), **said}
    coordinator |= {"stepParts": {**dict.fromkeys(STEP_PARTS, 0.01), "wire": 0.06, "own": 1.0}}
    coordinator |= {"workers": [{"rank": 0, "idle": 0.2}, {"rank": 1, "idle": 0.4}, {"rank": 2, "idle": None}]}
    found = parse_status(json.dumps({"run": "x", "counters": {"applied": 480}, "coordinator": coordinator}).encode())
    assert found is not None
    return dict(found)


def job(name: str = "one", namespace: str = "a", answer: Mapping[str, Any] | None = None, **status: Any) -> JobReading:
    return JobReading(JobKey(namespace, name), {}, {**STATUS, **status}, answer, None if answer is None else NOW - 30)


def page(*jobs: JobReading, meter: Meter | None = None) -> dict[str, Family]:
    text = metrics_text((meter or busy()).registry, list(jobs), NOW).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def busy() -> Meter:
    """A meter that has counted one of each."""
    meter = Meter()
    meter.turn("ok", 0.01)
    meter.answered("get", "/api/v1/namespaces/a/pods/x", 200, 0.01)
    meter.failed(409, "Conflict")
    meter.relisted("pods")
    meter.heard("pods")
    meter.pulled(True)
    meter.recovered("Error", 12.3)
    meter._objects.labels("pods").set(3)
    meter._refused.labels("team-a").set(1)
    return meter


def value(found: dict[str, Family], name: str, **labels: str) -> float | None:
    family = found[name.removesuffix("_total")] if name.removesuffix("_total") in found else found[name.rsplit("_", 1)[0]]
    hits = [sample.value for sample in family.samples if sample.name == name and sample.labels == labels]
    return hits[0] if hits else None


def test_the_table_is_what_is_exposed_and_nothing_else() -> None:
    stage = {"name": "front", "step": 7, "idle": 0.25, "delay": 0.0, "peakBytes": 4096}
    found = page(
        job(
            completionTime=stamp(NOW),
            conditions=[{"type": "Contended", "status": "True"}],
            answer=told([3], [0.1], stages=[stage]),
            stages=[{"name": "front", "workersReady": "1/2"}],
        )
    )
    wanted = {metric.name.removesuffix("_total"): metric for metric in metrics.METRICS}
    assert {name for name in found if not name.startswith("process_")} == set(wanted)
    for name, metric in wanted.items():
        family = found[name]
        assert (family.type, family.documentation) == (metric.kind, metric.help), name
        assert family.samples, f"{name} has no sample"
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels), sample


def test_names_types_and_helps_keep_to_the_rules_of_prometheus() -> None:
    names = [metric.name for metric in metrics.METRICS]
    assert len(names) == len(set(names))
    for metric in metrics.METRICS:
        assert metric.name.startswith("psjob_") and metric.name.islower()
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert metric.help.endswith(".") and "\n" not in metric.help
        assert list(metric.buckets) == sorted(metric.buckets)
        assert len(metric.labels) <= 3


def test_a_job_as_status_and_shard_0_tell_it() -> None:
    found = page(job(answer=told([0, 2000], [0.02])))
    at: dict[str, str] = {"namespace": "a", "job": "one"}
    assert value(found, "psjob_jobs", namespace="a", phase="Running") == 1
    assert value(found, "psjob_job_phase", **at, phase="Running") == 1
    assert value(found, "psjob_job_restarts_total", **at, cause="OOMKilled") == 2
    numbers = {
        "shards": 2, "shards_ready": 2, "workers": 4, "workers_ready": 3, "failures_counted": 2, "interrupted_seconds": 19.5,
        "last_recovery_seconds": 12.3, "steps_lost_total": 25, "updates_lost_total": 7, "checkpoint_age_seconds": 80,
        "checkpoint_step": 100, "checkpoint_bytes": 4096, "step": 120, "steps_per_second": 10.5, "loss": 0.25, "wait_share": 0.3,
        "push_bytes_total": 1 << 20, "pushes_total": 480, "progress_age_seconds": 30,
    }  # fmt: skip
    for name, number in numbers.items():
        assert value(found, f"psjob_job_{name}", **at) == pytest.approx(number), name
    parts = {name: value(found, "psjob_job_step_part_seconds", **at, part=name) for name in (*STEP_PARTS, "own")}
    assert parts == {**dict.fromkeys(STEP_PARTS, 0.01), "wire": 0.06, "own": None}, "what is no part is no series"
    assert value(found, "psjob_push_staleness_bucket", **at, le="1024") == 1
    assert value(found, "psjob_push_staleness_bucket", **at, le="+Inf") == 2 and value(found, "psjob_push_staleness_sum", **at) == 2000
    assert value(found, "psjob_push_gap_bucket", **at, le="0.03") == 1


def test_stages_are_told_by_the_names_that_the_status_has() -> None:
    stages = [
        {"name": "front", "step": 7, "idle": 0.25, "delay": 0.0, "peakBytes": 4096},
        {"name": "front", "step": 9},
        {"name": "of a stranger", "step": 8},
        {"name": "back", "step": -1, "idle": 3, "delay": "x", "peakBytes": None},
        {"name": ["back"]},
        "back",
    ]
    status = {"stages": [{"name": "front", "workersReady": "1/2"}, {"name": "back", "workersReady": "odd"}, 3, {"name": 4}]}
    found = page(job(answer=told(stages=stages), **status))

    def of(name: str, stage: str) -> Any:
        return value(found, f"psjob_job_stage_{name}", namespace="a", job="one", stage=stage)

    front = {"workers_ready": 1, "step": 7, "idle_share": 0.25, "staleness_updates": 0, "peak_memory_bytes": 4096}
    assert {name: of(name, "front") for name in front} == front
    assert {name: of(name, "back") for name in front} == dict.fromkeys(front) | {"idle_share": 1}
    assert of("step", "of a stranger") is None
    over = page(job(answer=told(stages=stages), **status, phase="Complete", conditions=[COMPLETE]))
    assert value(over, "psjob_job_stage_idle_share", namespace="a", job="one", stage="front") is None
    for odd in (None, "x", {"name": "front"}, [None]):
        page(job(answer=told(stages=odd), stages=odd))


def test_what_is_newer_than_the_status_is_believed_of_a_checkpoint() -> None:
    found = page(job(answer=told(checkpoint={"step": 110, "age": 4.0})))
    assert value(found, "psjob_job_checkpoint_age_seconds", namespace="a", job="one") == 34


def test_without_a_checkpoint_its_age_counts_from_the_beginning_and_disabled_ones_have_none() -> None:
    found = page(
        job("young", checkpoint=None), JobReading(JobKey("a", "off"), {"checkpoint": {"disabled": True}}, {**STATUS, "checkpoint": None})
    )
    assert value(found, "psjob_job_checkpoint_age_seconds", namespace="a", job="young") == 800
    assert value(found, "psjob_job_checkpoint_age_seconds", namespace="a", job="off") is None


def test_a_resumed_job_has_the_age_of_its_resumption_until_a_checkpoint_is_newer() -> None:
    at = {"namespace": "a", "job": "one"}
    kept = {"step": 3, "time": stamp(NOW - 90_000), "bytes": 1}
    found = page(job(checkpoint=kept, startTime=stamp(NOW - 50)))
    assert value(found, "psjob_job_checkpoint_age_seconds", **at) == 50
    found = page(job(checkpoint={**kept, "time": stamp(NOW - 20)}, startTime=stamp(NOW - 50)))
    assert value(found, "psjob_job_checkpoint_age_seconds", **at) == 20
    for odd in (None, 3, "yesterday"):
        assert value(page(job(checkpoint=kept, startTime=odd)), "psjob_job_checkpoint_age_seconds", **at) == 90_000


@pytest.mark.parametrize(
    ("brief", "interval"),
    [({}, 30), ({"checkpoint": {}}, 30), ({"checkpoint": {"periodSeconds": 7200}}, 7200), ({"checkpoint": {"periodSeconds": "soon"}}, 30)],
)
def test_the_interval_of_checkpoints_is_told_as_the_job_has_it(brief: dict[str, Any], interval: float) -> None:
    found = page(JobReading(JobKey("a", "one"), brief, STATUS))
    assert value(found, "psjob_job_checkpoint_interval_seconds", namespace="a", job="one") == interval


def test_a_job_that_failed_has_nobody_ready_and_a_time() -> None:
    at = {"namespace": "a", "job": "one"}
    found = page(job(phase="Failed", conditions=[FAILED], completionTime=stamp(NOW - 60)))
    for name, number in {"workers_ready": 0, "shards_ready": 0, "workers": 4, "shards": 2, "completion_time_seconds": NOW - 60}.items():
        assert value(found, f"psjob_job_{name}", **at) == number, name
    found = page(job(phase="Complete", conditions=[COMPLETE], completionTime=stamp(NOW - 60)))
    assert value(found, "psjob_job_workers_ready", **at) == 3
    assert value(page(job()), "psjob_job_completion_time_seconds", **at) is None


def test_the_first_fault_of_a_process_is_an_increase() -> None:
    found = page(meter=Meter())
    assert {value(found, "psjob_operator_turns_total", result=result) for result in ("ok", "api", "error")} == {0}


@pytest.mark.parametrize("phase", RESTS)
def test_a_job_that_does_not_run_has_no_rate_and_no_age(phase: str) -> None:
    found = page(job(answer=told(), phase=phase, interruption=None, **RESTS[phase]))
    assert value(found, "psjob_job_step_part_seconds", namespace="a", job="one", part="wire") is None
    for name in ("steps_per_second", "wait_share", "checkpoint_age_seconds", "progress_age_seconds", "interrupted_seconds"):
        assert value(found, f"psjob_job_{name}", namespace="a", job="one") is None, name
    assert value(found, "psjob_job_pushes_total", namespace="a", job="one") == 480


def test_the_series_of_a_job_go_with_it() -> None:
    def jobs(found: dict[str, Family]) -> set[str]:
        return {sample.labels["job"] for family in found.values() for sample in family.samples if "job" in sample.labels}

    assert jobs(page(job(), job("two"))) == {"one", "two"}
    assert jobs(page(job("two"))) == {"two"}


def test_a_job_that_nobody_has_seen_yet_and_a_phase_of_a_newer_operator() -> None:
    found = page(JobReading(JobKey("a", "new"), {}, {}), job("later", phase="Paused"))
    assert value(found, "psjob_job_phase", namespace="a", job="new", phase="Pending") == 1
    assert value(found, "psjob_job_phase", namespace="a", job="later", phase="Unknown") == 1


def test_an_operator_that_stands_by_has_no_jobs() -> None:
    async def scenario() -> tuple[bytes, bytes]:
        meter = Meter()
        sources = Sources(Queue(), lambda: {"pods": 3}, lambda: [job()], lambda: True)
        first = await meter.page(sources, NOW)
        meter.leads(False)
        return first, await meter.page(sources, NOW)

    acts, stands_by = (text.decode() for text in asyncio.run(scenario()))
    assert "psjob_operator_leader 1.0" in acts and 'psjob_job_phase{job="one"' in acts
    assert "psjob_operator_leader 0.0" in stands_by and 'job="one"' not in stands_by


def test_the_queue_is_measured() -> None:
    now = [100.0]
    queue = Queue(clock=lambda: now[0])
    for name in ("a", "b"):
        queue.add(JobKey("n", name))
        now[0] += 5
    assert (queue.waiting(), queue.running(), queue.oldest()) == (2, 0, 10.0)
    first = queue.take()
    assert first is not None and (queue.waiting(), queue.running(), queue.oldest()) == (1, 1, 5.0)
    queue.fail(first)
    queue.done(first)
    assert (queue.running(), queue.backing_off()) == (0, 1)
    second = queue.take()
    assert second is not None and queue.oldest() == 0.0
    queue.succeed(first)
    assert queue.backing_off() == 0


@pytest.mark.parametrize(
    ("path", "resource"),
    [
        ("/api/v1/namespaces/a/pods/x", "pods"),
        ("/api/v1/pods", "pods"),
        ("/api/v1/nodes/n", "nodes"),
        ("/apis/psjob.dev/v1alpha1/namespaces/a/pstrainingjobs/x/status", "pstrainingjobs/status"),
        ("/apis/events.k8s.io/v1/namespaces/a/events", "events"),
        ("/api/v1/namespaces/a/secrets", "secrets"),
        ("/api/v1/namespaces/pods/endpoints/pods", "other"),
        ("/apis/psjob.dev/v1alpha1", "other"),
        ("/version", "other"),
        ("/", "other"),
    ],
)
def test_paths_become_few_resources(path: str, resource: str) -> None:
    assert resource_of(path) == resource


@pytest.mark.parametrize(
    ("method", "path", "content", "verb"),
    [
        ("GET", "/api/v1/namespaces/a/pods", "", "list"),
        ("GET", "/api/v1/namespaces/a/pods/x", "", "get"),
        ("GET", "/api/v1/nodes/n", "", "get"),
        ("POST", "/api/v1/namespaces/a/pods", "application/json", "create"),
        ("PATCH", "/api/v1/namespaces/a/services/x", "application/apply-patch+yaml", "apply"),
        ("PATCH", "/x/status", "application/merge-patch+json", "patch"),
        ("DELETE", "/api/v1/namespaces/a/pods/x", "", "delete"),
    ],
)
def test_verbs_are_those_of_the_api_server(method: str, path: str, content: str, verb: str) -> None:
    assert _verb(method, path, content) == verb


def test_a_reason_that_a_webhook_made_up_is_other() -> None:
    meter = Meter()
    meter.failed(403, "OnlyOnTuesdays42")
    meter.failed(0, "Timeout")
    found = page(meter=meter)
    assert value(found, "psjob_operator_api_errors_total", code="403", reason="Other") == 1
    assert value(found, "psjob_operator_api_errors_total", code="none", reason="Timeout") == 1


def test_a_request_that_nobody_answers_is_counted() -> None:
    from kubernetes.aio.client import Configuration

    from psjob_operator.cluster.client import PODS, ApiError

    async def scenario() -> Meter:
        meter = Meter()
        configuration = Configuration()
        configuration.host = "http://127.0.0.1:1"
        client = KubernetesClient(configuration, Limits(timeout=60.0), "test", observer=meter)
        with pytest.raises(ApiError):
            await client.get(PODS, "a", "x")
        await client.close()
        return meter

    found = page(meter=asyncio.run(scenario()))
    assert value(found, "psjob_operator_api_requests_total", verb="get", resource="pods", code="none") == 1
    assert value(found, "psjob_operator_api_errors_total", code="none", reason="Connection") == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=6,
)
"""Small: Hypothesis gives a test up that takes half a minute to draw, as large ones do on a busy machine."""
HISTOGRAM = st.fixed_dictionaries({"count": JSON, "sum": JSON, "buckets": st.lists(st.tuples(JSON, JSON) | JSON) | JSON}) | JSON


@settings(max_examples=25)
@given(
    st.fixed_dictionaries({"staleness": HISTOGRAM, "gap": HISTOGRAM, "step": JSON, "pushBytes": JSON, "workers": JSON, "checkpoint": JSON})
)
def test_whatever_a_pod_says_the_page_is_in_form(said: Any) -> None:
    answer = parse_status(json.dumps({"coordinator": said}).encode())
    assert answer is not None
    found = page(JobReading(JobKey("n", "j"), {}, STATUS, answer, NOW), meter=Meter())
    for name in ("psjob_push_staleness", "psjob_push_gap"):
        buckets = [sample for sample in found[name].samples if sample.name.endswith("_bucket")]
        edges = [float(sample.labels["le"]) for sample in buckets]
        assert edges == sorted(set(edges)) and (not edges or edges[-1] == float("inf"))
        assert [sample.value for sample in buckets] == sorted(sample.value for sample in buckets)


def test_the_page_is_served_beside_the_probes() -> None:
    async def scenario() -> tuple[str, str]:
        meter = busy()
        sources = Sources(Queue(), dict, lambda: [job()], lambda: False)
        health = Health(dict, lambda: meter.page(sources, NOW))
        await health.start("127.0.0.1", 0)
        try:
            assert health._listening is not None
            port = health._listening.sockets[0].getsockname()[1]
            async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as reply:
                return reply.headers["Content-Type"], await reply.text()
        finally:
            await health.stop()

    kind, text = asyncio.run(scenario())
    assert kind == CONTENT_TYPE and "psjob_operator_ready 0.0" in text and 'psjob_jobs{namespace="a",phase="Running"} 1.0' in text


WORKERS = 4000


def accepted(workers: int) -> bool:
    manifest: dict[str, Any] = copy.deepcopy(GOOD)
    manifest["spec"]["workers"]["replicas"] = workers
    return load_job(yaml.safe_dump(manifest))[0] is not None


def test_the_status_of_the_largest_job_is_read_whole(tmp_path: Path) -> None:
    assert accepted(WORKERS) and not accepted(WORKERS + 1)
    desk = Desk(tmp_path, workers=WORKERS, mode="async")
    server, coordinator = desk.servers[0], desk.c
    long = -1.2345678901234567e-300
    for rank, member in coordinator.members.all.items():
        member.clock, member.incarnation, member.state, member.idle = 2**63 - 1, (2**32 - 1, 2**32 - 1), State.JOINED, 0.9999
        server.store.admission.rows[rank].complete = 2**63 - 1
        server.sessions[rank] = Clerk(server, rank, 1, 0, {})
    coordinator.progress.report(0, {"\u6743" * 60 + f"{number:04d}": long for number in range(2 * MAX_METRICS)})
    for step in range(64):
        coordinator.progress.passed(2**63 - step, time.time())
    server.job.waiting_for = f"workers {list(range(WORKERS))} have not pushed step {2**63 - 1} (block 100000), for 100000 s"
    raw = json.dumps(status(server)).encode()
    assert STATUS_BYTES / 2 < len(raw) < STATUS_BYTES
    found = parse_status(raw)
    assert found is not None
    told = found["coordinator"]
    assert [worker["rank"] for worker in told["workers"]] == list(range(WORKERS)) and len(told["metrics"]) == MAX_METRICS
    assert len(found["counters"]["acknowledged"]) == len(found["transports"]) == WORKERS


def test_names_that_are_never_told_again_make_room() -> None:
    progress = JobProgress()
    for step in range(1000):
        progress.report(0, {"loss": 1.0 / (step + 1), f"loss at {step}": float(step)})
    assert len(progress.metrics) == MAX_METRICS
    assert progress.metrics["loss"] == 0.001 and progress.metrics["loss at 999"] == 999.0 and "loss at 0" not in progress.metrics
