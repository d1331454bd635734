"""An operator of several namespaces: one that is deleted, or may not be read any more, keeps no other waiting."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hack.cluster.api import ApiError
from tests.integration.operator_harness import Operator, World, until, world
from tests.integration.operator_proxy import Proxy
from tests.support.cluster_fixtures import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]
RBAC = "/apis/rbac.authorization.k8s.io/v1"
RUN_SECONDS = 10.0
"""A new job of the other namespace runs within this time, or within twice what a job took before, on a slow machine."""
MOST_SECONDS = 20.0
TRIES = 3
"""What else runs on the machine may hold one job up; a namespace that keeps others waiting holds up each."""
REST_SECONDS = 6.0


@pytest.fixture
def places(control_plane: Cluster, namespace: str, tmp_path: Path) -> Iterator[tuple[World, World]]:
    """One that stays, and one to which things happen."""
    with world(control_plane, namespace, tmp_path) as stays:
        other = World(control_plane, control_plane.create_namespace("harmed"), tmp_path, user=stays.user)
        other.allow()
        yield stays, other
        other.over.set()
        with contextlib.suppress(ApiError):
            control_plane.api.delete(f"/api/v1/namespaces/{other.namespace}")


@pytest.fixture
def proxy(places: tuple[World, World]) -> Iterator[Proxy]:
    stays, _ = places
    made = Proxy(stays.cluster.url, stays.cluster.ca, *stays.certificate())
    yield made
    made.close()


def runs(place: World, name: str, node: str) -> float:
    """A new job comes to run; seconds that took."""
    began = time.monotonic()
    place.trains(name, workers=1, node=node)
    return time.monotonic() - began


def soon_runs(place: World, name: str, node: str, before: float) -> bool:
    """Does a new job run as soon as one did before what happened to the other namespace?"""
    return any(runs(place, f"{name}{number}", node) < min(max(RUN_SECONDS, 2 * before), MOST_SECONDS) for number in range(TRIES))


def refused(operator: Operator) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{operator.port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return [line for line in lines if line.startswith("psjob_operator_namespace_refused{")]


def waits_for(operator: Operator) -> str:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{operator.port}/readyz", timeout=5)
    except urllib.error.HTTPError as error:
        return str(json.load(error)["waitingFor"])
    except OSError:
        return ""
    return ""


def writes(place: World) -> list[dict[str, Any]]:
    found = place.cluster.audit(place.user)
    return [it for it in found if it["verb"] in ("create", "patch", "update", "delete") and it["stage"] == "ResponseComplete"]


def at_rest(place: World) -> None:
    """Some seconds without a write."""
    deadline = time.monotonic() + 60
    while True:
        before = len(writes(place))
        time.sleep(REST_SECONDS)
        after = writes(place)
        if len(after) == before:
            return
        assert time.monotonic() < deadline, after[before:]


def harm(what: str, place: World) -> None:
    api = place.cluster.api
    if what == "the Role":
        api.delete(f"{RBAC}/namespaces/{place.namespace}/rolebindings/{place.user}")
    else:
        api.delete(f"/api/v1/namespaces/{place.namespace}")
        until("the namespace to go", lambda: _emptied(place) and not api.ok(f"/api/v1/namespaces/{place.namespace}"), 60)


def _emptied(place: World) -> bool:
    """No kubelet is here that would take the pods off."""
    for pod in place.pods():
        place.remove(pod)
    return True


@pytest.mark.parametrize("what", ["the Role", "the namespace"])
def test_one_namespace_is_lost_and_the_other_goes_on(places: tuple[World, World], proxy: Proxy, what: str) -> None:
    stays, other = places
    node = stays.node(f"{stays.namespace}-n")
    operator = stays.operator(f"--namespace={other.namespace}", url=proxy.url)
    before = runs(stays, "a", node)
    runs(other, "b", node)
    harm(what, other)
    proxy.gone()
    until("it to know", lambda: refused(operator), also=operator.log.read_text)
    assert refused(operator) == [f'psjob_operator_namespace_refused{{namespace="{other.namespace}"}} 1.0']
    time.sleep(25)  # longer than the watch of jobs bears a refusal
    assert operator.ready(), stays.story()
    assert soon_runs(stays, "c", node, before), stays.story()
    at_rest(stays)
    # A start finds it so, and is ready all the same.
    operator.kill()
    operator.start()
    assert soon_runs(stays, "d", node, before), stays.story()
    at_rest(stays)
    if what == "the Role":
        other.allow()
        until("it to see again", lambda: not refused(operator), also=operator.log.read_text)
        other.remove("b-worker-0-r1")
        other.until("the worker to start again", lambda: "b-worker-0-r2" in other.pods())
    assert operator.ready()


def test_without_the_right_to_watch_pods_it_is_not_ready(places: tuple[World, World]) -> None:
    stays, _ = places
    path = f"{RBAC}/namespaces/{stays.namespace}/roles/{stays.user}"
    rules = stays.cluster.api.get(path)["rules"]
    less = [{**rule, "verbs": [verb for verb in rule["verbs"] if verb != "watch" or "pods" not in rule["resources"]]} for rule in rules]
    stays.cluster.api.merge(path, {"rules": less})
    operator = stays.operator(ready=False)
    until("it to say why", lambda: f"watch pods in namespace {stays.namespace}" in waits_for(operator), also=operator.log.read_text)
    assert not operator.ready()
    stays.cluster.api.merge(path, {"rules": rules})
    until("it to be ready", operator.ready, 60)


def test_two_releases_that_write_one_policy_in_turns_come_to_rest_and_say_so(places: tuple[World, World]) -> None:
    place, _ = places
    node = place.node(f"{place.namespace}-n")
    for number in (1, 2):
        place.operator("--network-policy", json.dumps({"namespaceSelector": {"matchLabels": {"release": f"r{number}"}}}))
    before = runs(place, "a", node)
    place.until("a condition", lambda: "Contended" in place.conditions("a"))
    said = place.conditions("a")["Contended"]
    assert said["status"] == "True" and "NetworkPolicy/a-" in said["message"], said
    place.until("an Event", lambda: place.events("Contended", "a"))
    at_rest(place)
    pages = []
    for operator in place.operators:
        with urllib.request.urlopen(f"http://127.0.0.1:{operator.port}/metrics", timeout=5) as answer:
            pages.append(answer.read().decode())
    assert all(f'psjob_job_contended{{job="a",namespace="{place.namespace}"}} 1.0' in page for page in pages), pages[0][-3000:]
    # The job trains on, and new ones come to run beside it.
    assert place.status("a")["phase"] == "Running" and place.status("a")["restarts"]["total"] == 0
    assert soon_runs(place, "b", node, before), place.story()
    at_rest(place)
