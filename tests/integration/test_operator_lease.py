"""Two operators and one Lease on a real API server: whatever befalls the one that acts, the other continues, and no pod is made twice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.operator_harness import Operator, World, manifest, until, world
from tests.integration.operator_proxy import Proxy
from tests.integration.own_place import place
from tests.support.cluster_fixtures import Cluster
from tests.support.soaking import rotating

__all__ = ["place"]

pytestmark = pytest.mark.cluster
LEASE = 4
"""Seconds: a third of the operator's own choice, so that tests wait less. The holder stops at two thirds."""
FAILOVER = 60.0
AWAY = 10.0
"""Longer than a Lease."""
LEASES = "/apis/coordination.k8s.io/v1"


@pytest.fixture
def proxies(place: World) -> Iterator[Callable[[], Proxy]]:
    made: list[Proxy] = []

    def start() -> Proxy:
        made.append(Proxy(place.cluster.url, place.cluster.ca, *place.certificate()))
        return made[-1]

    yield start
    for proxy in made:
        proxy.close()


def options(place: World, seconds: int | None = LEASE) -> tuple[str, ...]:
    """None: the operator's own choice."""
    return ("--lease=psjob", f"--lease-namespace={place.namespace}", *((f"--lease-seconds={seconds}",) if seconds else ()))


def lease(place: World) -> dict[str, Any]:
    found = place.cluster.api.get(f"{LEASES}/namespaces/{place.namespace}/leases/psjob")
    return dict(found["spec"])


def pair(place: World, proxies: Callable[[], Proxy], seconds: int | None = LEASE) -> list[tuple[Operator, Proxy]]:
    """Two operators, the one that acts first."""
    made = []
    for _ in range(2):
        proxy = proxies()
        operator = place.operator(*options(place, seconds), url=proxy.url)
        until("one to act", lambda: any(one.role() == "leader" for one in place.operators))
        made.append((operator, proxy))
    assert [operator.role() for operator, _ in made] == ["leader", "standby"], "who stands by is ready too"
    return made


def lives(place: World, name: str) -> dict[str, set[str]]:
    """Role and index -> names of its pods that have neither ended nor been told to."""
    found: dict[str, set[str]] = {}
    for pod, raw in place.pods(name).items():
        if not raw["metadata"].get("deletionTimestamp") and raw["status"].get("phase") not in ("Failed", "Succeeded"):
            found.setdefault(pod.rsplit("-", 1)[0], set()).add(pod)
    return found


def never_double(place: World, name: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert all(len(pods) <= 1 for pods in lives(place, name).values()), place.story()
        time.sleep(0.1)


@pytest.mark.parametrize(("how", "seconds"), [("frozen", LEASE), ("cut off", LEASE), rotating("killed", None)])
def test_the_other_acts(place: World, proxies: Callable[[], Proxy], how: str, seconds: int | None) -> None:
    """The leader goes just as a pod of a running job is lost; the other replaces the pod; the first one comes back and does no harm."""
    (first, wire), (second, other_wire) = pair(place, proxies, seconds)
    place.trains("job")
    assert not other_wire.writes[1:], other_wire.writes  # a Lease that it tried to take, at most
    place.edit("job", runPolicy={"podFailurePolicy": {"rules": [{"action": "Count", "per": "Process", "onReasons": ["Error"]}]}})
    {"killed": first.kill, "frozen": first.freeze, "cut off": lambda: wire.away(True)}[how]()
    began = time.monotonic()
    place.end("job-worker-1-r1", 1, message="fault")
    # Where its first pod found no answer of a busy API server it has a number more: that pod counts as missing.
    again = place.until("the worker to be started again", lambda: "".join(lives(place, "job").get("job-worker-1", ())), FAILOVER)
    print(f"leader {how}: the other replaced a pod after {time.monotonic() - began:.1f} s")
    place.run(again, job="job")
    assert second.role() == "leader" and lease(place)["leaseTransitions"] == 1
    count = len(wire.writes)
    if how == "killed":
        first.start()
    elif how == "frozen":
        first.thaw()
    else:
        wire.away(False)
    until("the first to stand by", lambda: first.role() == "standby", 30, also=place.story)
    place.end("job-shard-0-a1", 1, message="fault")
    place.until("the shard to be started again", lambda: "job-shard-0-a2" in place.pods())
    place.run("job-shard-0-a2")
    never_double(place, "job", 1)
    place.until_phase("Running")
    assert second.role() == "leader" and first.role() == "standby"
    later = [write for write in wire.writes[count:] if not write.endswith("/events")]  # one of before may have been on its way
    assert not later, f"who stands by writes nothing: {later}"
    assert place.status()["restarts"]["counted"] == 2, "each fault is counted once"
    assert second.stop() == 0
    if how != "killed":
        until("the first to act again, in the same process", lambda: first.role() == "leader", 60, also=place.story)


def test_a_leader_that_goes_gives_the_lease_back(place: World, proxies: Callable[[], Proxy]) -> None:
    (first, _), (second, _) = pair(place, proxies)
    place.trains("job")
    began, holder = time.monotonic(), lease(place)["holderIdentity"]
    assert first.stop() == 0
    assert lease(place).get("holderIdentity") != holder, "the other need not wait until the Lease has run out"
    until("the other to act", lambda: second.role() == "leader", also=place.story)
    print(f"leader told to end: the other acts after {time.monotonic() - began:.1f} s")
    assert not [line for line in first.lines() if line["level"] == "error"], first.log.read_text()
    place.end("job-worker-1-r1", 1, message="fault")
    place.until("the worker to be started again", lambda: "job-worker-1-r2" in place.pods())
    assert second.stop() == 0
    assert not lease(place).get("holderIdentity")


def test_without_the_right_it_says_so_and_acts_alone(place: World) -> None:
    base = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{place.namespace}/roles/{place.user}"
    rules = [rule for rule in place.cluster.api.get(base)["rules"] if rule["resources"] != ["leases"]]
    place.cluster.api.merge(base, {"rules": rules})
    operator = place.operator(*options(place, 3))
    until("it to act alone", lambda: operator.role() == "alone", 20, also=place.story)
    assert any("takes turns without it: run one replica, or give the right" in line["message"] for line in operator.lines())
    place.create(manifest())
    place.until("its pods", lambda: len(place.pods()) == 3)


@pytest.mark.rotating
def test_an_api_server_that_is_away_for_longer_than_a_lease(fresh_control_plane: Callable[..., Cluster], tmp_path: Path) -> None:
    """The API server is killed and not there for a while, under running jobs and two operators: the processes live on, none acts, then one
    does, no pod is started again, and a pod that is lost afterwards is."""
    cluster = fresh_control_plane()
    cluster.install_crd()
    with world(cluster, "default", tmp_path) as place:
        operators = [place.operator(*options(place)) for _ in range(2)]
        until("one to act", lambda: any(one.role() == "leader" for one in operators), 30, also=place.story)
        for name in ("a", "b"):
            place.trains(name)
        before = {name: pod["metadata"]["uid"] for name, pod in place.pods().items()}
        pids = [operator.pid for operator in operators]
        went = time.monotonic()
        server = _down(cluster)
        time.sleep(LEASE)
        assert not any(operator.role() == "leader" for operator in operators), "nobody acts who cannot renew"
        assert all(operator.answers("/readyz") and operator.answers("/livez") for operator in operators)
        time.sleep(max(0.0, went + AWAY - time.monotonic()))
        os.kill(server, signal.SIGCONT)
        until("the API server to be back", lambda: _answers(cluster), 60)
        began = time.monotonic()
        until("one to act", lambda: any(one.role() == "leader" for one in operators), 60, also=place.story)
        print(f"API server back: an operator acts after {time.monotonic() - began:.1f} s")
        never_double(place, "a", 5)
        assert {name: pod["metadata"]["uid"] for name, pod in place.pods().items()} == before, "no pod was started again"
        assert place.status("a")["phase"] == place.status("b")["phase"] == "Running"
        place.end("b-worker-0-r1", 1, message="fault")
        place.until("the worker to be started again", lambda: "b-worker-0-r2" in place.pods(), 30)
        assert [operator.pid for operator in operators] == pids and all(operator.alive() for operator in operators)
        assert sorted(operator.role() for operator in operators) == ["leader", "standby"]


@pytest.mark.rotating
def test_a_gateway_that_says_503_for_a_while(place: World, proxies: Callable[[], Proxy]) -> None:
    """As a load balancer does before API servers that are away: the process lives on with what it knows, and acts again."""
    proxy = proxies()
    operator = place.operator(*options(place), url=proxy.url)
    until("it to act", lambda: operator.role() == "leader", also=place.story)
    place.trains("job")
    pid = operator.pid
    proxy.away(True, said=True)
    place.end("job-worker-1-r1", 1, message="fault")
    time.sleep(AWAY)
    assert operator.alive() and operator.role() == "standby", operator.log.read_text()[-3000:]
    proxy.away(False)
    place.until("the worker to be started again", lambda: "job-worker-1-r2" in place.pods(), 90)
    assert operator.alive() and operator.pid == pid and operator.role() == "leader"


def _down(cluster: Cluster) -> int:
    """End the API server; the one that is started in its place is held before it listens. Answers the process to let continue."""
    server = cluster.pid("kube-apiserver")
    os.kill(server, signal.SIGKILL)
    until("it to be started again", lambda: cluster.pid("kube-apiserver") != server, 20)
    server = cluster.pid("kube-apiserver")
    os.kill(server, signal.SIGSTOP)
    assert not _answers(cluster)
    return server


def _answers(cluster: Cluster) -> bool:
    try:
        return bool(cluster.api.ok("/readyz"))
    except OSError:
        return False
