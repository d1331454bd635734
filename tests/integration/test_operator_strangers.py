"""Nothing is adopted and nothing goes back: leftovers and strangers under our names, old status, two operators, foreign deletions.

- One tenant's manifests do not stop the operator for the others: nested as deep as the API server takes, and as large.
"""

from __future__ import annotations

import json
import os
import signal
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.integration.operator_harness import JOBS, World, manifest
from tests.integration.own_place import place as own_place
from tests.integration.together import together

__all__ = ["own_place"]

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("both", [False, True], ids=["the object is seen first", "both are seen at once"])
def test_a_status_of_another_run_gives_numbers_and_no_facts(place: World, node: str, name: str, both: bool) -> None:
    """A backup restored into a new object (Velero): what the old run had done is no fact, its numbers are passed.

    A restore writes the object and its status one after the other; the operator may see either first.
    """
    other = str(uuid.uuid4())
    kept = {
        "run": other,
        "phase": "Running",
        "internal": {"term": 5, "workerStart": 4},
        "observedGeneration": 1,
        "shards": [{"index": 0, "replica": 0, "attempt": 7, "state": "Finished", "pod": f"{name}-shard-0-a7"}],
        "workers": {"desired": 2, "ready": 2, "succeededIndexes": "0-1", "failedIndexes": ""},
        "restarts": {"total": 9, "causes": {"OOMKilled": 9}, "counted": 9},
        "checkpoint": {"step": 900, "time": "2026-01-01T00:00:00Z", "path": f"{other}/step-900"},
    }
    operator = place.operators[0]
    if both:
        os.kill(operator.pid, signal.SIGSTOP)
    try:
        place.create(manifest(name, suspend=True))
        if not both:
            place.until_phase("Suspended", name)
        restored = place.lay(name, **kept)
        assert restored["status"]["run"] == other and restored["status"]["checkpoint"]["step"] == 900, "as the backup has it"
    finally:
        os.kill(operator.pid, signal.SIGCONT)
    uid = place.job(name)["metadata"]["uid"]
    taken = place.until("the job to be the new run's", lambda: status if (status := place.status(name)).get("run") == uid else None)
    assert taken["phase"] == "Suspended" and taken["shards"][0]["attempt"] == 7 and taken["internal"]["workerStart"] == 4
    place.edit(name, suspend=None)
    place.until("all to start under numbers of their own", lambda: len(place.pods(name)) == 3)
    assert set(place.pods(name)) == {f"{name}-shard-0-a8", f"{name}-worker-0-r5", f"{name}-worker-1-r5"}, "nobody has succeeded yet"
    status = place.status(name)
    assert status["internal"]["term"] > 5 and status["restarts"].get("total", 0) == 0 and "checkpoint" not in status, status


def test_two_operators_make_no_pod_twice_and_come_to_rest(place: World, node: str, name: str) -> None:
    """They may pass each other's numbers, which costs a start; a name is made once, and one process a seat is left."""
    second = place.operator()
    try:
        names = [f"{name}{index}" for index in range(4)]
        for job in names:
            place.create(manifest(job, shards=2, workers=2))

        def settled() -> bool:
            for pod, raw in place.pods().items():
                if not pod.startswith(name):
                    continue
                if raw["metadata"].get("deletionTimestamp"):
                    place.remove(pod)
                elif not raw["spec"].get("nodeName"):
                    place.play(raw, node)
            return all(place.status(job).get("phase") == "Running" for job in names)

        place.until("all to run", settled, seconds=60)
        for job in names:
            there = [pod for pod, raw in place.pods(job).items() if not raw["metadata"].get("deletionTimestamp")]
            assert len({pod.rsplit("-", 1)[0] for pod in there}) == len(there) == 4, there
            assert place.status(job)["restarts"]["counted"] == 0
        made = [event["objectRef"]["name"] for event in place.cluster.audit(place.user, place.namespace) if _made(event)]
        made = [pod for pod in made if pod.startswith(name)]
        assert len(set(made)) == len(made)
    finally:
        second.kill()


def _made(event: dict[str, Any]) -> bool:
    return event["verb"] == "create" and event["objectRef"]["resource"] == "pods" and event["responseStatus"]["code"] == 201


@together
def test_a_strangers_pod_of_our_name_is_waited_for(place: World, name: str) -> None:
    uid = place.make("Pod", f"{name}-worker-0-r1", spec={"containers": [{"name": "c", "image": "x"}]})["metadata"]["uid"]
    place.create(manifest(name))
    place.until("NameConflict", lambda: "NameConflict" in str(place.status(name)))
    stranger = place.pods()[f"{name}-worker-0-r1"]
    assert stranger["metadata"]["uid"] == uid and "ownerReferences" not in stranger["metadata"], "untouched"
    place.remove(f"{name}-worker-0-r1")
    found = place.until("our own pod", lambda: place.pods().get(f"{name}-worker-0-r1"))
    assert found["metadata"]["ownerReferences"][0]["uid"] == place.job(name)["metadata"]["uid"]
    assert place.status(name)["internal"]["workerStart"] == 1


@pytest.mark.parametrize(
    ("kind", "child", "spec"),
    [
        ("Service", "shards", {"ports": [{"port": 80}], "selector": {"app": "theirs"}}),
        ("PersistentVolumeClaim", "checkpoints", {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}),
    ],
)
@together
def test_a_strangers_service_or_claim_is_not_taken_over(place: World, name: str, kind: str, child: str, spec: dict[str, Any]) -> None:
    child = f"{name}-{child}"
    before, path = place.make(kind, child, spec=spec), place.path(f"{kind.lower()}s", child)
    place.create(manifest(name))
    place.until("NameConflict", lambda: place.conditions(name)["Ready"]["reason"] == "NameConflict")
    assert child in place.conditions(name)["Ready"]["message"]
    assert not place.pods(name), "nothing runs on another's storage or name"
    after = place.cluster.api.get(path)
    assert after["spec"].get("selector") == before["spec"].get("selector")
    assert "labels" not in after["metadata"] and "ownerReferences" not in after["metadata"]
    assert not [entry for entry in after["metadata"]["managedFields"] if "psjob" in entry["manager"]]
    place.cluster.api.delete(path)
    place.until("the job to continue", lambda: len(place.pods(name)) == 3)


@together
def test_a_leftover_of_a_deleted_job_of_this_name(place: World, node: str, name: str) -> None:
    """Same names, same labels, another uid: the pod of the job before is not adopted, and its claim is used again."""
    pods = place.trains(name, node)
    old = {pod: raw["metadata"]["uid"] for pod, raw in place.pods(name).items()}
    claim = place.cluster.api.get(place.path("persistentvolumeclaims", f"{name}-checkpoints"))["metadata"]["uid"]
    place.cluster.run_kubectl("delete", "psj", name, "-n", place.namespace)
    place.until_going(name)
    place.create(manifest(name))
    place.until("NameConflict", lambda: "NameConflict" in str(place.status(name)))
    assert {pod: raw["metadata"]["uid"] for pod, raw in place.pods(name).items()} == old
    for pod in pods:
        place.remove(pod)
    uid = place.job(name)["metadata"]["uid"]
    place.until(
        "the new job's pods",
        lambda: {pod for pod, raw in place.pods(name).items() if raw["metadata"]["ownerReferences"][0]["uid"] == uid} == set(pods),
    )
    assert place.cluster.api.get(place.path("persistentvolumeclaims", f"{name}-checkpoints"))["metadata"]["uid"] == claim
    assert place.status(name)["run"] == uid


@together
def test_a_pod_whose_label_goes_and_returns_leaves_no_twin(place: World, node: str, name: str) -> None:
    pods = place.trains(name, node)
    lost = f"{name}-worker-1-r1"
    label = ["label", "pod", lost, "-n", place.namespace]
    place.cluster.run_kubectl(*label, "psjob.dev/job-name-")
    place.until("its successor", lambda: f"{name}-worker-1-r2" in place.pods(name))

    def told_to_end() -> bool:
        found = next((raw for raw in place.items("pods") if raw["metadata"]["name"] == lost), None)
        return found is None or bool(found["metadata"].get("deletionTimestamp"))

    place.until("the one out of sight to be told to end", told_to_end)
    place.cluster.run_kubectl(*label, f"psjob.dev/job-name={name}")
    place.remove(lost)
    place.run(f"{name}-worker-1-r2", node=node, job=name)
    assert set(place.pods(name)) == {*pods[:2], f"{name}-worker-1-r2"}
    assert place.status(name)["restarts"]["causes"] == {"Deleted": 1}


LEVELS = 9800
"""With those of the manifest around them just below what the API server takes."""
LIMIT = 256 << 20
"""Half of the chart's memory limit."""


def post(place: World, text: str) -> None:
    """Create a job from this text: a Python of usual settings cannot write it."""
    path = f"{JOBS}/namespaces/{place.namespace}/pstrainingjobs"
    place.cluster.run_kubectl("create", "--raw", path, "-f", "-", stdin=text)


@pytest.mark.timeout(300)
def test_a_job_that_is_nested_as_deep_as_can_be_is_one_jobs_problem(own_place: World) -> None:
    operator = own_place.operator()
    command = '"command": ["python", "train.py"]'
    text = json.dumps(manifest("deep"))
    assert command in text
    post(own_place, text.replace(command, f'{command}, "x": {"[" * LEVELS}{"]" * LEVELS}'))
    own_place.until("its problem", lambda: "nested deeper" in str(own_place.cluster.run_kubectl(
        "get", "psj", "deep", "-n", own_place.namespace, "-o", "jsonpath={.status.conditions}").stdout))  # fmt: skip
    own_place.create(manifest("after"))
    own_place.until("the pods of another job", lambda: len(own_place.pods("after")) == 3)
    operator.kill()
    operator.start()
    own_place.remove("after-worker-0-r1")
    own_place.until("the next operator to act", lambda: "after-worker-0-r2" in own_place.pods("after"))
    assert operator.alive() and not own_place.pods("deep")


@pytest.mark.timeout(300)
@pytest.mark.rotating
def test_large_manifests_take_no_more_memory_than_they_have_bytes(own_place: World) -> None:
    """Six of nearly a mebibyte, each fifty times as much as objects of Python."""
    operator = own_place.operator()
    own_place.create(manifest("first"))
    own_place.until("the pods", lambda: len(own_place.pods("first")) == 3)
    body = manifest("large")
    body["spec"]["workers"]["template"]["spec"]["x"] = [{}] * 330_000
    for number in range(6):
        body["metadata"]["name"] = f"large-{number}"
        post(own_place, json.dumps(body, separators=(",", ":")))
        # Its Event: to read the job itself again and again would cost more than all else here.
        own_place.until("it to be seen", lambda number=number: own_place.events("SpecInvalid", f"large-{number}"), 60)  # type: ignore[misc]
        assert own_place.status(f"large-{number}")["phase"] == "Failed"
    assert resident(operator.pid) < LIMIT
    own_place.remove("first-worker-0-r1")
    own_place.until("another job's pod again", lambda: "first-worker-0-r2" in own_place.pods("first"))


def resident(pid: int) -> int:
    """Bytes of memory that the process holds now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))
