"""The operator as a process: how it starts, waits, says what is wrong, sees again after a blind time, and ends.

- `psjob-operator check`, which `helm test` runs: an operator that works, and each thing that may be wrong.
- Words of the real API server that the operator goes by.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from psjob_operator.cluster.client import OTHER_UID
from psjob_operator.cluster.main import lease_holder
from tests.integration.api_client import Api
from tests.integration.operator_harness import World, manifest, psjob_operator, until
from tests.integration.operator_proxy import Proxy
from tests.integration.own_place import place
from tests.support.cluster_fixtures import Cluster
from tests.support.statusport import StatusPort

__all__ = ["place"]

pytestmark = pytest.mark.cluster


def test_help_shows_examples() -> None:
    """A process of its own from the start; those of other tests are forked from one that has imported all of it."""
    done = subprocess.run([sys.executable, "-m", "psjob_operator", "run", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "psjob-operator run --namespace team-a" in done.stdout


def test_a_kubeconfig_that_is_not_there_is_told_in_a_sentence(tmp_path: Path) -> None:
    code, told = psjob_operator(tmp_path, "run", f"--kubeconfig={tmp_path / 'none'}")
    assert code == 2
    assert f"--kubeconfig: there is no file {tmp_path / 'none'}" in told and "Traceback" not in told, told


def test_sigterm_ends_it_in_peace(place: World) -> None:
    operator = place.operator()
    assert operator.stop() == 0
    assert not [line for line in operator.lines() if line["level"] == "error"], operator.log.read_text()


def test_it_ends_when_a_right_is_missing(place: World) -> None:
    """kopf gives up a watch that is refused; a process that sees half of the world must not continue."""
    base = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{place.namespace}/rolebindings/{place.user}"
    place.cluster.api.delete(base)
    operator = place.operator(ready=False)
    until("it to end", lambda: not operator.alive(), 120, also=operator.log.read_text)
    assert any("forbidden" in line["message"].lower() for line in operator.lines())


def test_what_happened_while_it_was_away_is_caught_up(place: World) -> None:
    operator = place.operator()
    for name in ("a", "b", "c"):
        place.trains(name, workers=1)
    operator.kill()
    place.end("a-shard-0-a1", 1)
    place.cluster.api.delete(place.path("pstrainingjobs", "b"))
    place.end("c-worker-0-r1")
    place.end("c-shard-0-a1")
    place.create(manifest("d", workers=1))
    operator.start()
    place.until("a's shard", lambda: "a-shard-0-a2" in place.pods())
    place.until_phase("Complete", "c")
    place.until("d's pods", lambda: "d-worker-0-r1" in place.pods())
    assert "b-shard-0-a2" not in place.pods()


def test_what_vanished_unseen_is_missed_after_a_relist(place: World, proxy: Proxy) -> None:
    """Watches bring nothing while pods and a job go; then 410 Gone. kopf lists again and tells of none of them; our own list does."""
    place.operator(url=proxy.url)
    for name in ("a", "b"):
        place.trains(name, workers=1)
    proxy.blind()
    place.remove("a-worker-0-r1")
    place.cluster.api.delete(place.path("pstrainingjobs", "b"))
    place.remove("b-worker-0-r1")
    time.sleep(1)
    assert place.status("a")["internal"]["workerStart"] == 1
    proxy.gone()
    place.until("the worker to be started again", lambda: "a-worker-0-r2" in place.pods())
    assert "b-worker-0-r2" not in place.pods()


def test_who_waits_for_a_checkpoint_sees_in_the_status_that_the_request_is_answered(place: World) -> None:
    """`kubectl wait` on the field. Progress is written once a minute, an answer at once."""
    told: dict[str, Any] = {"step": 100, "request": None}
    keys: dict[str, bytes] = {}
    own: dict[str, Any] = {"index": 0, "attempt": 1, "term": 1, "state": "serving"}

    def says(_: str) -> dict[str, Any]:
        checkpoint = {"step": told["step"], "term": 1, "time": 1790000000.0, "age": 5.0, "bytes": 4096, "path": "x", "final": False}
        coordinator = {"step": 120, "checkpoint": {**checkpoint, "observedRequest": told["request"]}}
        return {**own, "coordinator": coordinator}

    def waits(number: int, seconds: float) -> bool:
        path = f"jsonpath={{.status.checkpoint.observedRequest}}={number}"
        words = ("wait", "psj", "job", "-n", place.namespace, f"--for={path}", f"--timeout={seconds:g}s")
        return place.cluster.run_kubectl(*words, check=False).returncode == 0

    with StatusPort(says, lambda: keys.get("questions", b"")).serve(place.address):
        job = manifest(workers=1)
        job["spec"]["workers"]["progressDeadlineSeconds"] = 5  # shard 0 is asked from the start
        own["run"] = place.create(job)["metadata"]["uid"]
        place.operator("--progress-seconds=0.5")
        place.until("the pods", lambda: len(place.pods()) == 2)
        keys.update(place.run_keys())
        place.run("job-shard-0-a1", "job-worker-0-r1")
        place.until("the checkpoint", lambda: place.status().get("checkpoint"))
        place.edit("job", checkpoint={"request": 7})
        told["step"] = 110
        assert not waits(7, 1), "one that was begun before answers nothing"
        told |= {"step": 140, "request": 7}
        assert waits(7, 20) and place.status()["checkpoint"]["step"] == 140
        place.edit("job", checkpoint={"request": 3})
        told |= {"step": 150, "request": 3}
        assert waits(3, 20)


def test_progress_is_pulled_from_shard_0_and_shown(place: World) -> None:
    """A loopback address stands for the pod's: the operator asks port 7071 of the pod IP that the API server names, and no other."""
    uid: dict[str, str] = {}
    keys: dict[str, bytes] = {}

    def told(_: str) -> dict[str, Any]:
        numbers = {"step": 120, "loss": 0.25, "rate": 10.5, "eta": 8.0, "totalSteps": 200, "metrics": {}, "workers": []}
        checkpoint = {"step": 100, "term": 1, "time": 1790000000.0, "bytes": 4096, "path": "x", "final": False}
        own = {"run": uid["run"], "index": 0, "attempt": 1, "term": 1, "state": "serving"}
        return {**own, "coordinator": {**numbers, "checkpoint": checkpoint}}

    port = StatusPort(told, lambda: keys.get("questions", b""))
    asked = port.asked
    with port.serve(place.address):
        uid["run"] = place.create(manifest())["metadata"]["uid"]
        operator = place.operator("--progress-seconds=0.5")
        place.until("the pods", lambda: len(place.pods()) == 3)
        place.run("job-shard-0-a1", "job-worker-0-r1", "job-worker-1-r1")
        place.until("the sentence", lambda: place.conditions().get("Ready", {}).get("reason") == "ProgressUnknown")
        assert "does not take this operator's key" in place.conditions()["Ready"]["message"] and place.status()["phase"] == "Running"
        keys.update(place.run_keys())
        place.until("the step in status", lambda: place.status().get("progress", {}).get("step"))
        status = place.status()
        assert status["progress"]["loss"] == 0.25 and status["checkpoint"]["step"] == 100
        assert place.conditions()["CheckpointReady"]["status"] == "True"
        assert set(asked) == {"/status"}
        version = place.job()["metadata"]["resourceVersion"]
        known = len(asked)
        place.until("more answers", lambda: len(asked) > known + 4)
        assert place.job()["metadata"]["resourceVersion"] == version, "the step moves all the time and is written once a minute"
        place.until("the sentence to go", lambda: place.conditions()["Ready"]["reason"] == "Running")
        operator.kill()
        known = len(asked)
        operator.start()
        place.until("an answer to the next operator", lambda: len(asked) > known)
        assert str(status["progress"]["step"]) in place.cluster.run_kubectl("get", "psj", "job", "-n", place.namespace).stdout


def check(folder: Path, kubeconfig: Path, namespace: str, *words: str) -> tuple[int, str]:
    """Exit code and words."""
    asked = ["check", f"--kubeconfig={kubeconfig}", f"--namespace={namespace}", "--lease=turns", f"--lease-namespace={namespace}", *words]
    return psjob_operator(folder, *asked)


def test_an_operator_that_renews_passes_and_one_that_stands_still_does_not(place: World, tmp_path: Path) -> None:
    """It renews the Lease `turns`."""
    operator = place.operator("--lease=turns", f"--lease-namespace={place.namespace}", "--lease-seconds=6")
    code, told = check(tmp_path, place.cluster.kubeconfig, place.namespace, "--seconds=30")
    assert code == 0, told
    kind, jobs, lease = told.splitlines()
    assert kind == "PSTrainingJob is served as psjob.dev/v1alpha1" and jobs == f"0 jobs can be read in {place.namespace}"
    assert lease.startswith(f"Lease {place.namespace}/turns is renewed by ")
    operator.freeze()
    code, told = check(tmp_path, place.cluster.kubeconfig, place.namespace, "--seconds=3")
    assert code == 1
    assert f"Lease {place.namespace}/turns was not renewed within 3 s, so no operator acts; read: kubectl" in told


def test_without_an_operator_the_lease_does_not_exist(control_plane: Cluster, bare_namespace: str, tmp_path: Path) -> None:
    code, told = check(tmp_path, control_plane.kubeconfig, bare_namespace, "--seconds=1")
    assert code == 1 and "does not exist within 1 s" in told and "Traceback" not in told


def test_a_right_that_is_missing_is_told(control_plane: Cluster, bare_namespace: str, tmp_path: Path) -> None:
    code, told = check(tmp_path, control_plane.user_kubeconfig("mallory", folder=tmp_path), bare_namespace, "--seconds=1")
    assert code == 1 and "the API server refuses" in told and "rbac.create" in told


def lease(lease_holder: str | None, renewed: str | None) -> dict[str, dict[str, str | None]]:
    return {"spec": {"holderIdentity": lease_holder, "renewTime": renewed}}


@pytest.mark.parametrize(
    ("before", "after", "who"),
    [
        (lease("a", "1"), lease("a", "2"), "a"),
        (lease("a", "1"), lease("b", "2"), "b"),
        (lease("a", "1"), lease("a", "1"), None),
        (lease("a", "1"), lease("", "2"), None),
        (lease(None, None), lease("a", "1"), "a"),
        (lease("a", "1"), {}, None),
    ],
)
def test_a_lease_is_held_by_who_renewed_it(before: dict[str, object], after: dict[str, object], who: str | None) -> None:
    assert lease_holder(before, after) == who


@pytest.mark.parametrize("kind", ["pods", "configmaps"])
def test_a_delete_of_another_uid_says_so(control_plane: Cluster, namespace: str, kind: str) -> None:
    api = Api(control_plane.kubeconfig)
    path = f"/api/v1/namespaces/{namespace}/{kind}"
    spec = {"spec": {"containers": [{"name": "it", "image": "it:1"}]}} if kind == "pods" else {}
    code, made = api.call("POST", path, {"metadata": {"name": "it"}, **spec})
    assert code == 201, made
    code, said = api.call("DELETE", f"{path}/it", {"preconditions": {"uid": "another"}})
    assert code == 409 and all(word in said["message"] for word in OTHER_UID), said
    code, said = api.call("DELETE", f"{path}/it", {"preconditions": {"uid": made["metadata"]["uid"]}})
    assert code == 200, said
