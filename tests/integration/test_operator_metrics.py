"""What Prometheus reads of an operator through a job's life: a real process, a real API server, and a shard 0 that a test speaks for.

How much the operator asks of the API server, read from the audit log: little over a job's life, nothing when idle.
"""

from __future__ import annotations

import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from psjob_operator.cluster.metrics import METRICS
from tests.integration.operator_harness import Operator, World, manifest
from tests.integration.own_place import place
from tests.support.cluster_fixtures import KwokNodes
from tests.support.statusport import StatusPort, own_loopback

__all__ = ["place"]

pytestmark = pytest.mark.cluster


class Shard:
    """Shard 0's status port, at an address of its own: tests run beside each other."""

    def __init__(self) -> None:
        self.run = ""
        self.questions = b""
        """The run's key, which the test reads when the run has begun."""
        self.told: dict[str, Any] = {}
        self.port = StatusPort(self._said, lambda: self.questions)
        self.address = own_loopback()

    def _said(self, _: str) -> dict[str, Any]:
        return {"run": self.run, "attempt": 1, "counters": {"applied": 240}, "coordinator": self.told}

    def begin(self, place: World) -> None:
        """Take the keys of the job, as its pods do."""
        self.run = place.job()["metadata"]["uid"]
        self.questions = place.run_keys()["questions"]

    def say(self, step: int, **told: Any) -> None:
        checkpoint = {"step": 100, "term": 1, "time": 1790000000.0, "age": 5.0, "bytes": 4096, "path": "x", "final": False}
        common = {"mode": "sync", "loss": 0.25, "rate": 10.5, "metrics": {}, "checkpoint": checkpoint, "resumed": None, "stepsLost": 0}
        workers = [
            {"rank": rank, "clock": step, "state": "joined", "start": 1, "rewinds": 0, "idle": 0.25, "here": True} for rank in range(2)
        ]
        self.told = {**common, "step": step, "pushBytes": 1000 * step, "updatesLost": 0, "workers": workers, **told}


@pytest.fixture
def shard() -> Iterator[Shard]:
    made = Shard()
    with made.port.serve(made.address):
        yield made


def scrape(operator: Operator) -> dict[str, Family]:
    with urllib.request.urlopen(f"http://127.0.0.1:{operator.port}/metrics", timeout=10) as answer:
        return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}


def value(operator: Operator, name: str, **labels: str) -> float:
    """Sum of the samples of that name that have these labels; -1 where there is none."""
    samples = [sample for family in scrape(operator).values() for sample in family.samples if sample.name == name]
    found = [sample.value for sample in samples if labels.items() <= sample.labels.items()]
    return sum(found) if found else -1.0


def begin(place: World, shard: Shard, **spec: Any) -> None:
    """A job that runs, for whose shard 0 the test speaks."""
    place.create(manifest(**spec))
    place.until("the pods", lambda: len(place.pods()) == 2 + spec.get("shards", 1))
    shard.begin(place)
    place.run(*place.pods(), address=shard.address, job="job")


def test_metrics_through_a_life_with_a_restart(place: World, shard: Shard) -> None:
    at = {"namespace": place.namespace, "job": "job"}
    operator = place.operator("--progress-seconds=0.5")
    assert value(operator, "psjob_operator_leader") == 1 and value(operator, "psjob_operator_ready") == 1
    for kind in ("pstrainingjobs", "pods", "services", "configmaps", "persistentvolumeclaims"):
        assert value(operator, "psjob_operator_relists_total", resource=kind) >= 1, kind
        assert value(operator, "psjob_operator_api_requests_total", verb="watch", resource=kind, code="200") >= 1, kind
    shard.say(125)
    begin(place, shard, shards=2)
    place.until("what shard 0 tells", lambda: value(operator, "psjob_job_step", **at) == 125)
    expected = {
        "psjob_job_shards_ready": 2, "psjob_job_workers_ready": 2, "psjob_job_workers": 2, "psjob_job_steps_per_second": 10.5,
        "psjob_job_push_bytes_total": 125_000, "psjob_job_pushes_total": 240, "psjob_job_wait_share": 0.25,
        "psjob_job_checkpoint_step": 100, "psjob_job_restarts_total": -1, "psjob_job_interrupted_seconds": -1,
    }  # fmt: skip
    place.until("all metrics of the job", lambda: {name: value(operator, name, **at) for name in expected} == expected)
    assert value(operator, "psjob_jobs", namespace=place.namespace, phase="Running") == 1
    assert 5 <= value(operator, "psjob_job_checkpoint_age_seconds", **at) < 120
    assert value(operator, "psjob_operator_api_requests_total", verb="create", resource="pods", code="201") == 4
    assert value(operator, "psjob_operator_turns_total", result="ok") >= 2
    assert value(operator, "psjob_operator_objects", resource="pods") == 4
    exposed = {family.name for family in scrape(operator).values() if not family.name.startswith("process_")}
    assert exposed == {metric.name.removesuffix("_total") for metric in METRICS}

    lost_at = time.time()
    place.end("job-shard-1-a1", 137, reason="OOMKilled")
    place.until("the next shard", lambda: "job-shard-1-a2" in place.pods())
    assert place.status()["interruption"]["cause"] == "OOMKilled"
    assert value(operator, "psjob_job_interrupted_seconds", **at) >= 0
    place.run("job-shard-1-a2", address=shard.address, job="job")
    shard.say(101, resumed={"term": 2, "start": 1, "from": 100, "step": 101, "age": 1.0}, stepsLost=25)
    place.until("the recovery to be told", lambda: place.status().get("lastRecovery"))
    status = place.status()
    assert status["lastRecovery"]["cause"] == "OOMKilled" and status["lastRecovery"]["stepsLost"] == 25
    assert 0 <= status["lastRecovery"]["durationSeconds"] <= time.time() - lost_at + 1 and "interruption" not in status
    (event,) = place.until("its Event", lambda: place.events("Recovered"))
    assert event["message"].endswith("25 steps done again") and event["type"] == "Normal"
    place.until("the histogram", lambda: value(operator, "psjob_recovery_seconds_count", cause="OOMKilled") == 1)
    assert value(operator, "psjob_job_restarts_total", **at, cause="OOMKilled") == 1
    assert value(operator, "psjob_job_steps_lost_total", **at) == 25
    assert value(operator, "psjob_job_last_recovery_seconds", **at) == status["lastRecovery"]["durationSeconds"]

    place.cluster.api.delete(place.path("pstrainingjobs", "job"))
    place.until("the job's series to go", lambda: value(operator, "psjob_job_phase", **at) == -1)
    assert not [s for family in scrape(operator).values() for s in family.samples if s.labels.get("job") == "job"]


def test_another_operator_goes_on_with_an_interruption(place: World, shard: Shard) -> None:
    """The counts of a job are in its status; those of the operator begin anew."""
    at = {"namespace": place.namespace, "job": "job"}
    operator = place.operator("--progress-seconds=0.5")
    shard.say(125, mode="async")
    begin(place, shard, training={"mode": "async"})
    place.until("what shard 0 tells", lambda: value(operator, "psjob_job_step", **at) == 125)
    place.end("job-worker-1-r1", 1)
    place.until("the next worker", lambda: "job-worker-1-r2" in place.pods())
    operator.kill()
    operator.start()
    place.run("job-worker-1-r2", address=shard.address)
    shard.say(126, mode="async", resumed={"term": 1, "start": 2, "from": 125, "step": 126, "age": 1.0}, updatesLost=0)
    place.until("the recovery to be told", lambda: place.status().get("lastRecovery"))
    assert place.status()["lastRecovery"]["updatesLost"] == 0
    place.until("the histogram", lambda: value(operator, "psjob_recovery_seconds_count", cause="Error") == 1)
    assert value(operator, "psjob_job_restarts_total", **at, cause="Error") == 1


def test_refusals_of_the_api_server_are_counted_by_code_and_reason(place: World) -> None:
    place.make("ResourceQuota", "none", spec={"hard": {"pods": "0"}})
    operator = place.operator()
    place.create(manifest())
    place.until("a refusal", lambda: value(operator, "psjob_operator_api_errors_total", code="403", reason="Forbidden") >= 1)
    assert value(operator, "psjob_operator_api_requests_total", verb="create", resource="pods", code="403") >= 1
    assert value(operator, "psjob_job_phase", namespace=place.namespace, job="job", phase="Pending") == 1


def requests(place: World) -> list[dict[str, Any]]:
    """What this operator asked, watches and discovery apart."""
    found = [event for event in place.cluster.audit(user=place.user) if event["stage"] == "ResponseComplete"]
    return [event for event in found if event["verb"] != "watch" and event.get("objectRef", {}).get("resource")]


def words(events: list[dict[str, Any]]) -> list[str]:
    found = []
    for event in events:
        meant = event["objectRef"]
        resource = f"{meant['resource']}/{meant['subresource']}" if "subresource" in meant else meant["resource"]
        found.append(f"{event['verb']} {resource} {meant.get('name', '')} {event['responseStatus']['code']}")
    return found


def grouped(events: list[dict[str, Any]]) -> Counter[str]:
    found = []
    for event in events:
        meant = event["objectRef"]
        found.append(f"{event['verb']} {meant['resource']}" + (f"/{meant['subresource']}" if "subresource" in meant else ""))
    return Counter(found)


def settled(place: World, seconds: float = 1.0) -> int:
    """Wait until this operator asks nothing for so long; answers how many requests there were until then."""
    count, since = -1, time.monotonic()

    def quiet() -> bool:
        nonlocal count, since
        now = len(requests(place))
        if now != count:
            count, since = now, time.monotonic()
        return time.monotonic() - since > seconds

    place.until("the operator to come to rest", quiet, seconds=60)
    return count


def test_a_life_costs_one_request_a_pod_and_fifteen_a_job_and_four_a_restart(place: World) -> None:
    place.operator("--progress-seconds=3600")
    before = settled(place)
    first, second, *workers = place.trains(shards=2, workers=4)
    running = settled(place)
    place.end(second, 1)
    place.run("job-shard-1-a2", job="job")
    restart = settled(place) - running
    for pod in [*workers, first, "job-shard-1-a2"]:
        place.end(pod)
    place.until_phase("Complete", seconds=60)
    spent = settled(place) - before
    said = "\n".join(words(requests(place)[before:]))
    assert restart <= 1 + 4, said
    assert spent - restart <= 6 + 15, said


def measure_idle(place: World, nodes: KwokNodes, jobs: int, seconds: float, relist: float, progress: float) -> Counter[str]:
    """What the operator asks in a while in which nothing happens to running jobs."""
    nodes(2, {"pods": "1000"})
    place.operator(f"--relist-seconds={relist}", f"--progress-seconds={progress}", "--qps=200")
    names = [f"j{index}" for index in range(jobs)]
    for name in names:
        place.create(manifest(name, shards=1, workers=1, checkpoint={"disabled": True}))
    place.until("all to run", lambda: _running(place) == set(names), seconds=240)
    before = settled(place, 3.0)
    time.sleep(seconds)
    return grouped(requests(place)[before:])


def _running(place: World) -> set[str]:
    return {job["metadata"]["name"] for job in place.items("pstrainingjobs") if job.get("status", {}).get("phase") == "Running"}


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_fifty_idle_jobs_for_fifteen_minutes(place: World, kwok_nodes: KwokNodes) -> None:
    asked = measure_idle(place, kwok_nodes, 50, 900, 600, 60)
    patches = asked.pop("patch pstrainingjobs/status", 0)
    assert patches <= 50 * 16
    assert all(what.startswith("list ") and count <= 2 * 2 for what, count in asked.items()), asked


@pytest.mark.soak
def test_fifty_idle_jobs_ask_nothing(place: World, kwok_nodes: KwokNodes) -> None:
    """More than a minute, the longest of the operator's own periods, in which a re-list falls due once stands for the ten minutes of a real
    installation; no shard can be asked for progress here, which must cost nothing either."""
    asked = measure_idle(place, kwok_nodes, 50, 75, 55, 6)
    assert sum(count for what, count in asked.items() if not what.startswith("list ")) == 0, asked
    assert set(asked) <= {f"list {kind}" for kind in ("pstrainingjobs", "pods", "services", "configmaps", "persistentvolumeclaims")}, asked
    assert all(count <= 2 for count in asked.values()), asked
