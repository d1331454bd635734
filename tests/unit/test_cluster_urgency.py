"""Which job is looked at first: one that lost something, then what is begun, then what is new; and the counts that this rests on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psjob_operator.cluster import queue
from psjob_operator.cluster.cache import JobStore, PodTally
from psjob_operator.cluster.client import JOBS, PODS, JobKey

KEY = JobKey("n", "job")
_versions = iter(range(1, 1_000_000))


def job(phase: str | None, run: str | None = "u", workers: int = 2, **metadata: Any) -> dict[str, Any]:
    status = {"phase": phase, **({"run": run} if run else {})} if phase else {}
    spec = {"shards": {"replicas": 1}, "workers": {"replicas": workers}}
    return {
        "metadata": {"namespace": "n", "name": "job", "uid": "u", "resourceVersion": str(next(_versions)), **metadata},
        "spec": spec,
        "status": status,
    }


def pod(
    name: str, phase: str = "Running", role: str = "worker", ready: bool = True, deleting: bool = False, owner: str = "job"
) -> dict[str, Any]:
    labels = {"psjob.dev/job-name": owner, "psjob.dev/role": role, "psjob.dev/index": "0", "psjob.dev/number": "1"}
    metadata = {"namespace": "n", "name": name, "uid": f"u-{name}", "resourceVersion": str(next(_versions)), "labels": labels}
    if deleting:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    return {"metadata": metadata, "spec": {"containers": [{"name": role}]}, "status": {"phase": phase, "conditions": conditions}}


UP = [pod("s", role="shard"), pod("w0"), pod("w1")]


@pytest.mark.parametrize(
    ("phase", "run", "pods", "wanted"),
    [
        (None, None, [], queue.NEW),
        ("Pending", "another", [], queue.NEW),
        ("Pending", "u", [], queue.BEGUN),
        ("Pending", "u", [pod("s", role="shard"), pod("w0"), pod("w1", "Pending")], queue.LATER),
        ("Pending", "u", [pod("s", role="shard", ready=False), pod("w0"), pod("w1")], queue.LATER),
        ("Pending", "u", UP, queue.NEAR),
        ("Running", "u", UP, queue.LATER),
        ("Running", "u", UP[:2], queue.RECOVERING),
        ("Running", "u", [*UP[:2], pod("w1", "Failed")], queue.RECOVERING),
        ("Running", "u", [*UP[:2], pod("w1", deleting=True)], queue.RECOVERING),
        ("Running", "u", [*UP, pod("w-old", "Failed")], queue.LATER),
        ("Recovering", "u", UP[:2], queue.RECOVERING),
        ("Recovering", "u", [*UP[:2], pod("w1", "Pending")], queue.LATER),
        ("Recovering", "u", UP, queue.NEAR),
        ("Complete", "u", [], queue.LATER),
    ],
)
def test_the_rank_of_a_job(phase: str | None, run: str | None, pods: list[dict[str, Any]], wanted: int) -> None:
    store = JobStore()
    store.put(JOBS, job(phase, run))
    for raw in pods:
        store.put(PODS, {**raw, "metadata": {**raw["metadata"], "resourceVersion": str(next(_versions))}})
    assert queue.urgency(store, KEY) == wanted


def test_a_job_that_is_gone_or_goes_is_not_urgent() -> None:
    store = JobStore()
    assert queue.urgency(store, KEY) == queue.LATER
    store.put(JOBS, job(None, None, deletionTimestamp="2026-01-01T00:00:00Z"))
    assert queue.urgency(store, KEY) == queue.LATER


@pytest.mark.parametrize("spec", [{}, {"shards": None, "workers": 3}, {"shards": {"replicas": "x"}, "workers": {"replicas": None}}])
def test_a_spec_that_cannot_be_read_has_a_rank(spec: dict[str, Any]) -> None:
    store = JobStore()
    store.put(JOBS, {**job("Running"), "spec": spec})
    assert queue.urgency(store, KEY) == queue.LATER


STEPS = st.tuples(
    st.sampled_from(["a", "b", "c"]),
    st.sampled_from(["put", "remove"]),
    st.sampled_from(["Pending", "Running", "Succeeded", "Failed"]),
    st.sampled_from(["worker", "shard", "other"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["job", "neighbour", ""]),
)


def test_the_workers_of_a_job_in_stages_are_counted() -> None:
    raw = job("Pending")
    raw["spec"] |= {"workers": {"template": {}}, "stages": [{"name": "a"}, {"name": "b", "replicas": 2}]}
    store = JobStore()
    store.put(JOBS, raw)
    entry = store.job(KEY)
    assert entry is not None and entry.brief["workers"] == {"replicas": 3} and "replicas" not in entry.spec["workers"]


@given(st.lists(STEPS, max_size=40))
def test_the_counts_are_those_of_the_pods_that_are_there(steps: list[Any]) -> None:
    store = JobStore()
    for name, what, phase, role, ready, deleting, owner in steps:
        raw = pod(name, phase, role, ready, deleting, owner)
        if what == "put":
            store.put(PODS, raw)
        else:
            store.remove(PODS, raw)
            raw["metadata"]["uid"] += "'"
    for key in (KEY, JobKey("n", "neighbour")):
        counted = PodTally()
        for view in store.pods(key):
            counted.count(view, 1)
        assert store.tally(key) == counted


def test_what_changes_nothing_that_is_kept_is_no_news() -> None:
    store = JobStore()
    raw = pod("w0")
    assert store.put(PODS, raw) == KEY
    raw["metadata"]["resourceVersion"] = str(next(_versions))
    raw["metadata"]["managedFields"] = [{"manager": "kubelet"}]
    assert store.put(PODS, raw) is None
    raw["metadata"]["resourceVersion"] = str(next(_versions))
    raw["status"]["phase"] = "Failed"
    assert store.put(PODS, raw) == KEY
