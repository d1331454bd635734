"""An edit that an older CRD takes and the operator refuses: nothing is created, and what ends, suspends or deletes a job continues.

- What reaches a job's status of the log of a failed process.
- etcd or the API server stopped under running jobs: nothing of theirs is started again, and the operator continues by itself.
  A restart of the API server is in test_operator_apart.py.
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hack.cluster.api import ApiError
from tests.integration.operator_harness import World, manifest, until, world
from tests.integration.outages import answers, goes_on, running, uids, unharmed
from tests.integration.own_place import place as own_place
from tests.support.cluster_fixtures import Cluster
from tests.support.soaking import rotating, soak

__all__ = ["own_place"]

pytestmark = pytest.mark.cluster


def test_stalled_means_no_creates_and_nothing_else(place: World, node: str, name: str) -> None:
    """lrScaling: linear goes only with mode sync, and the mode of a running job may change."""
    paused, done, timed, mended = jobs = [f"{name}{what}" for what in ("paused", "done", "timed", "mended")]
    for job in jobs:
        place.trains(job, training={"mode": "sync", "lrScaling": "linear"}, runPolicy={"ttlSecondsAfterFinished": 1}, node=node)
    with without_the_rule(place):
        for job in jobs:
            place.edit(job, training={"mode": "async"})
    for job in jobs:
        place.until(f"{job} to be Stalled", lambda job=job: place.conditions(job).get("Stalled", {}).get("reason") == "SpecInvalid")
        assert "lrScaling" in place.conditions(job)["Ready"]["message"] and place.status(job)["phase"] == "Running"
    # Nothing is created.
    for job in (paused, mended):
        place.remove(f"{job}-worker-1-r1")
    time.sleep(4)
    assert not [pod for pod in place.pods(name) if pod.endswith("-r2")]
    # Suspension, success with its TTL, and the deadline come all the same.
    place.suspend(paused)
    for pod in ("worker-0-r1", "worker-1-r1", "shard-0-a1"):
        place.end(f"{done}-{pod}")
    place.edit(timed, runPolicy={"activeDeadlineSeconds": 1})
    for job in (done, timed):
        place.until(
            f"{job} to be deleted in its time", lambda job=job: job not in [it["metadata"]["name"] for it in place.items("pstrainingjobs")]
        )
    told = {
        event["involvedObject"]["name"]: event["reason"] for event in place.events() if event["reason"] in ("Completed", "DeadlineExceeded")
    }
    assert told == {done: "Completed", timed: "DeadlineExceeded"}
    # What the edit was taken back for continues.
    place.edit(mended, training={"mode": "sync"})
    place.until("the lost worker", lambda: f"{mended}-worker-1-r2" in place.pods())
    assert "Stalled" not in place.conditions(mended)


LOG = "Traceback\nLoginError: https://me:hunter2@host says no, token=hunter2"


@pytest.mark.parametrize(
    ("options", "said"),
    [((), "exit code 3: LoginError: https://[removed]@host says no, token=[removed];"), (("--no-log-tails",), "exit code 3;")],
)
def test_status_and_events_tell_no_credential_and_without_tails_no_word(own_place: World, options: tuple[str, ...], said: str) -> None:
    own_place.operator(*options)
    own_place.trains(workers=1, runPolicy={"backoffLimit": 0})
    own_place.end("job-worker-0-r1", 3, message=LOG)
    own_place.until_phase("Failed", "job")
    told = str(own_place.status("job")) + str(own_place.items("events"))
    assert said in told and "hunter2" not in told and (not options or "LoginError" not in told)


@pytest.fixture
def place_outage(fresh_control_plane: Callable[..., Cluster], tmp_path: Path) -> Iterator[World]:
    """A control plane of our own, with running jobs in it."""
    # Nobody answers at the pods' addresses here: a node that is taken for silent after the outage would be left.
    cluster = fresh_control_plane(grace=600.0)
    cluster.install_crd()
    with world(cluster, cluster.create_namespace("outage"), tmp_path) as made:
        running(made)
        yield made


@pytest.mark.parametrize("seconds", [rotating(8), soak(90)])
@pytest.mark.parametrize("component", ["etcd", "kube-apiserver"])
def test_it_is_stopped_for_a_while(place_outage: World, component: str, seconds: int) -> None:
    """Requests are taken and not answered, or answered with 500: no watch is given up for good."""
    before = uids(place_outage)
    pid = place_outage.cluster.pid(component)
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)
    until("the API server to answer", lambda: answers(place_outage), 60)
    time.sleep(3)
    unharmed(place_outage, before)
    print(f"{component} away {seconds} s: continued after {goes_on(place_outage):.1f} s")


@pytest.mark.soak
def test_it_is_gone_for_long(place_outage: World) -> None:
    """Connections are refused again and again for two minutes: longer than any retry lasts."""
    before, until_then = uids(place_outage), time.monotonic() + 120
    while time.monotonic() < until_then:
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.kill(place_outage.cluster.pid("kube-apiserver"), signal.SIGKILL)
        time.sleep(0.5)
    until("the API server to be back", lambda: answers(place_outage), 60)
    unharmed(place_outage, before)
    print(f"gone for 120 s: continued after {goes_on(place_outage):.1f} s")


CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/pstrainingjobs.psjob.dev"
LIMIT = "may be linear only"
FAULT = {"mode": "async", "lrScaling": "linear"}


@contextlib.contextmanager
def without_the_rule(place: World) -> Iterator[None]:
    """While it lasts the API server takes lrScaling: linear in every mode; this operator does not."""
    api = place.cluster.api
    versions = api.get(CRD)["spec"]["versions"]
    older = copy.deepcopy(versions)
    (rules,) = (training["x-kubernetes-validations"] for training in _training(older))
    assert any(rule["message"].startswith(LIMIT) for rule in rules)
    rules[:] = [rule for rule in rules if not rule["message"].startswith(LIMIT)]
    api.merge(CRD, {"spec": {"versions": older}})
    try:
        until("the older CRD to hold", lambda: _takes(place))
        yield
    finally:
        api.merge(CRD, {"spec": {"versions": versions}})
        until("this version's CRD to hold", lambda: not _takes(place))


def _training(versions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["training"] for version in versions]


def _takes(place: World) -> bool:
    path = f"/apis/psjob.dev/v1alpha1/namespaces/{place.namespace}/pstrainingjobs?dryRun=All"
    try:
        place.cluster.api.create(path, manifest("probe", training=FAULT))
    except ApiError as error:
        if error.status != 422:
            raise
        return False
    return True
