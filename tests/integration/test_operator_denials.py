"""Admission that says no for a while: a job waits, says whose words these are, continues when they are taken back, and counts nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.integration import denying
from tests.integration.operator_harness import World, manifest, world
from tests.support.cluster_fixtures import Cluster
from tests.support.soaking import rotating

pytestmark = pytest.mark.cluster
AGAIN_SECONDS = 60.0
"""From the end of the denial to the pod that was denied."""
LONG = 20.0
"""Denied for so long, the tries are as far apart as they ever are."""
SHORT = 1.0
Denial = Callable[[World, list[str], Path], AbstractContextManager[None]]
ONES_OWN: dict[str, tuple[Denial, str]] = {
    "policy 422": (lambda place, jobs, folder: denying.policy(place, jobs), "nothing new today"),
    "webhook 400 (no code)": (lambda place, jobs, folder: denying.webhook(place, jobs, folder, 0), "not from our registry"),
    "webhook 403": (lambda place, jobs, folder: denying.webhook(place, jobs, folder, 403), "not from our registry"),
    "webhook 409": (lambda place, jobs, folder: denying.webhook(place, jobs, folder, 409), "not from our registry"),
    "webhook 500": (lambda place, jobs, folder: denying.webhook(place, jobs, folder, 500), "not from our registry"),
    "webhook away": (lambda place, jobs, folder: denying.webhook(place, jobs, folder, None), "failed calling webhook"),
}
"""Denials of the pods of some jobs, which stand side by side in one namespace."""
TOO_SMALL = {"limits": [{"type": "Pod", "min": {"memory": "900Gi"}}]}
OF_ALL: dict[str, tuple[Denial, str]] = {
    "quota": (lambda place, jobs, folder: denying.inside(place, jobs, "ResourceQuota", {"hard": {"pods": "0"}}), "exceeded quota"),
    "limit range": (
        lambda place, jobs, folder: denying.inside(place, jobs, "LimitRange", TOO_SMALL),
        "minimum memory usage per Pod is 900Gi",
    ),
    "pod security": (lambda place, jobs, folder: denying.pod_security(place, jobs), 'violates PodSecurity "restricted:latest"'),
}
"""Denials of all pods of a namespace, each in one of its own."""
# Shards are restricted by themselves, unless their own template names root.
_ROOT = {"securityContext": {"runAsUser": 0}}
SPECS: dict[str, dict[str, Any]] = {"pod security": {"pod": _ROOT, "of_shards": {"template": {"spec": _ROOT}}}}


@dataclass
class Row:
    """One denial, and the three jobs that meet it: at first sight, at a worker's restart, at a shard's."""

    how: str
    place: World
    node: str
    deny: Denial
    words: str
    name: str
    spec: dict[str, Any]
    """Of each job: what this denial minds."""
    denied: ExitStack = field(default_factory=ExitStack)
    took: dict[str, float] = field(default_factory=dict)
    """Seconds from the end of the denial to the pod."""

    @property
    def wanted(self) -> dict[str, str]:
        """The pod that each job lacks."""
        new, worker, shard = (f"{self.name}-{what}" for what in ("new", "worker", "shard"))
        return {new: f"{new}-shard-0-a1", worker: f"{worker}-worker-1-r2", shard: f"{shard}-shard-0-a2"}

    def running(self) -> list[str]:
        """Those that run before the denial."""
        return list(self.wanted)[1:]

    def lose(self) -> None:
        """The first job comes, the second loses a worker, the third its shard."""
        new, worker, shard = self.wanted
        self.place.create(manifest(new, **self.spec))
        self.place.remove(f"{worker}-worker-1-r1")
        self.place.remove(f"{shard}-shard-0-a1")

    def told(self, job: str) -> bool:
        """The job says whose words keep it, and why."""
        ready = self.place.conditions(job).get("Ready", {})
        return ready.get("reason") == "CreateRefused" and self.words in str(ready.get("message"))

    def phases(self) -> list[str]:
        return [self.place.status(job)["phase"] for job in self.wanted]

    def look(self, since: float) -> bool:
        """Note which pods are there by now; True once all are."""
        there = self.place.pods(self.name)
        for job, pod in self.wanted.items():
            if pod in there:
                self.took.setdefault(job, time.monotonic() - since)
        return len(self.took) == len(self.wanted)


FEW = ("policy 422", "webhook 500", "quota")


@pytest.mark.parametrize(("ways", "held"), [(FEW, SHORT), rotating((*ONES_OWN, *OF_ALL), LONG, id="all-long")])
def test_a_denial_that_passes_costs_nothing_but_its_time(
    control_plane: Cluster, tmp_path: Path, name: str, ways: tuple[str, ...], held: float
) -> None:
    """Ways to deny, at the first creation, at a worker's restart and at a shard's, all at once."""
    with ExitStack() as stack:
        together = stack.enter_context(somewhere(control_plane, tmp_path / "own"))
        rows = []
        for number, how in enumerate(ways):
            deny, words = {**ONES_OWN, **OF_ALL}[how]
            place = together if how in ONES_OWN else stack.enter_context(somewhere(control_plane, tmp_path / str(number)))
            node = place.nodes[0] if place.nodes else place.node(f"{place.namespace}-n")
            rows.append(Row(how, place, node, deny, words, f"{name}{number}", SPECS.get(how, {})))
        for row in rows:
            for job in row.running():
                row.place.create(manifest(job, **row.spec))
        for row in rows:
            for job in row.running():
                row.place.run(f"{job}-shard-0-a1", f"{job}-worker-0-r1", f"{job}-worker-1-r1", node=row.node)
        for row in rows:
            for job in row.running():
                row.place.until_phase("Running", job)
            row.denied.enter_context(row.deny(row.place, list(row.wanted), tmp_path))
            stack.push(row.denied)
        for row in rows:
            row.lose()
        for row in rows:
            for job in row.wanted:
                row.place.until(f"{row.how}: {job} to tell why it waits", lambda row=row, job=job: row.told(job))
        time.sleep(held)
        for row in rows:
            assert row.phases() == ["Pending", "Recovering", "Recovering"], row.how
            assert all(row.told(job) for job in row.wanted), row.how
            assert not set(row.wanted.values()) & set(row.place.pods()), row.how
        ended = {}
        for row in rows:
            row.denied.close()
            ended[row.how] = time.monotonic()
        deadline = max(ended.values()) + 2 * AGAIN_SECONDS
        waiting = rows
        while waiting and time.monotonic() < deadline:
            waiting = [row for row in waiting if not row.look(ended[row.how])]
            time.sleep(0.2)
        print(table(rows))
        late = [(row.how, job) for row in rows for job in row.wanted if row.took.get(job, 1e9) > AGAIN_SECONDS]
        assert not late, f"{late}\n{table(rows)}"
        for row in rows:
            counts = [row.place.status(job).get("restarts", {}) for job in row.wanted]
            assert [it.get("counted", 0) for it in counts] == [0, 0, 0], row.how
            assert [it.get("total", 0) for it in counts] == [0, 1, 1], row.how


@pytest.mark.parametrize("held", [SHORT, rotating(LONG)])
def test_a_denial_of_what_stands_around_the_pods_is_waited_for_too(place: World, node: str, name: str, held: float) -> None:
    """Service, ConfigMap and claim at the first creation, the ConfigMap again at a change of mode, and the status itself."""
    kinds = {"services": f"{name}s", "configmaps": f"{name}c", "persistentvolumeclaims": f"{name}p"}
    edited, unseen, lost = f"{name}edit", f"{name}new", f"{name}lost"
    for job in (edited, lost):
        place.create(labelled(job))
        place.run(f"{job}-shard-0-a1", f"{job}-worker-0-r1", f"{job}-worker-1-r1", node=node, job=job)
    # For the probe alone: a job of another controller, under the label of the one to come.
    place.create(
        {
            **labelled(f"{name}probe", managedBy="example.com/nobody"),
            "metadata": {"name": f"{name}probe", "labels": {denying.LABEL: unseen}},
        }
    )
    with ExitStack() as stack:
        for kind, job in kinds.items():
            stack.enter_context(denying.policy(place, [job], denying.of_core(kind, "CREATE")))
        config = place.path("configmaps", f"{edited}-config") + "?dryRun=All"
        changed = denying.of_core("configmaps", "UPDATE")
        stack.enter_context(denying.policy(place, [edited], changed, lambda: place.cluster.api.merge(config, {"data": {"x": "y"}})))
        status = place.path("pstrainingjobs", f"{name}probe") + "/status?dryRun=All"
        note = {"status": {"observedGeneration": 1}}
        stack.enter_context(denying.policy(place, [unseen, lost], denying.STATUS, lambda: place.cluster.api.merge(status, note)))
        for job in (*kinds.values(), unseen):
            place.create(labelled(job))
        place.edit(edited, training={"mode": "async"})
        place.remove(f"{lost}-worker-1-r1")
        for job in (*kinds.values(), edited):
            place.until(f"{job} to tell why it waits", lambda job=job: said(place, job, "CreateRefused", "nothing new today"))
        assert place.status(edited)["phase"] == "Running", "training continues as it is"
        for job in (unseen, lost):
            place.until(f"an Event to tell of {job}", lambda job=job: told(place, job, "StatusRefused", "nothing new today"))
        time.sleep(held)
        assert not any(place.pods(job) for job in (*kinds.values(), unseen)) and f"{lost}-worker-1-r2" not in place.pods()
        assert len([event for event in place.events("StatusRefused") if event["involvedObject"]["name"] == lost]) == 1, "told once"
    ended = time.monotonic()
    for job in (*kinds.values(), unseen):
        place.until(f"the pods of {job}", lambda job=job: len(place.pods(job)) == 3, AGAIN_SECONDS)
    place.until("the new worker", lambda: f"{lost}-worker-1-r2" in place.pods(), AGAIN_SECONDS)
    mode = lambda: '"mode": "async"' in str(place.cluster.api.get(place.path("configmaps", f"{edited}-config"))["data"])  # noqa: E731
    place.until("the new config", mode, AGAIN_SECONDS)
    print(f"all continued within {time.monotonic() - ended:.1f} s")
    place.until("the words to be taken back", lambda: place.conditions(edited)["Ready"]["reason"] == "Running")
    assert all(place.status(job)["restarts"].get("counted", 0) == 0 for job in (*kinds.values(), edited, unseen, lost))


def test_a_denied_delete_holds_back_nobody(place: World, node: str, name: str) -> None:
    """A replaced pod that may not be deleted stays, and its successor starts all the same."""
    first, second, third = (f"{name}-worker-1-r{number}" for number in (1, 2, 3))
    place.create(labelled(name))
    place.run(f"{name}-shard-0-a1", f"{name}-worker-0-r1", first, node=node, job=name)
    # An ended pod is kept for its log until the next one of its seat has ended too.
    place.end(first, 1)
    place.run(second, node=node, job=name)
    probe = place.path("pods", f"{name}-worker-0-r1") + "?dryRun=All"
    with denying.policy(place, [name], denying.of_core("pods", "DELETE"), lambda: place.cluster.api.call("DELETE", probe)):
        place.end(second, 1)
        place.until("the third start", lambda: third in place.pods(), 30)
        assert not place.pods()[first]["metadata"].get("deletionTimestamp"), "its deletion is denied"
    place.until("the clean-up", lambda: goes(place, first), AGAIN_SECONDS)


def test_a_job_that_may_not_be_deleted_in_its_time_says_so(place: World, node: str, name: str) -> None:
    jobs = {"apiGroups": ["psjob.dev"], "apiVersions": ["v1alpha1"], "resources": ["pstrainingjobs"], "operations": ["DELETE"]}
    place.create(labelled(name, workers=1, runPolicy={"ttlSecondsAfterFinished": 1}))
    place.run(f"{name}-shard-0-a1", f"{name}-worker-0-r1", node=node, job=name)
    probe = place.path("pstrainingjobs", name) + "?dryRun=All"
    with denying.policy(place, [name], jobs, lambda: place.cluster.api.call("DELETE", probe)):
        place.end(f"{name}-worker-0-r1")
        place.end(f"{name}-shard-0-a1")
        place.until_phase("Complete", name)
        place.until("an Event", lambda: place.events("DeleteRefused", name), 30)
        (event,) = place.events("DeleteRefused", name)
        assert "ttlSecondsAfterFinished is over" in event["message"] and "nothing new today" in event["message"]
        time.sleep(12)
        assert len(place.events("DeleteRefused", name)) == 1, "once for these words"
    place.until("the job to go", lambda: all(job["metadata"]["name"] != name for job in place.items("pstrainingjobs")), AGAIN_SECONDS)


@contextlib.contextmanager
def somewhere(cluster: Cluster, folder: Path) -> Iterator[World]:
    """A namespace with an operator in it."""
    folder.mkdir()
    namespace = cluster.create_namespace("denials")
    with world(cluster, namespace, folder) as made:
        made.operator()
        yield made
    cluster.api.delete(f"/api/v1/namespaces/{namespace}")


def labelled(name: str, **spec: Any) -> dict[str, Any]:
    """A job that policies find by its name."""
    found = manifest(name, **spec)
    return {**found, "metadata": {**found["metadata"], "labels": {denying.LABEL: name}}}


def goes(place: World, pod: str) -> bool:
    found = place.pods().get(pod)
    return found is None or bool(found["metadata"].get("deletionTimestamp"))


def said(place: World, job: str, reason: str, words: str) -> bool:
    ready = place.conditions(job).get("Ready", {})
    return ready.get("reason") == reason and words in str(ready.get("message"))


def told(place: World, job: str, reason: str, words: str) -> bool:
    return any(event["involvedObject"]["name"] == job and words in event["message"] for event in place.events(reason))


def table(rows: list[Row]) -> str:
    """Seconds from the end of each denial to the pod that it kept out."""
    lines = ["seconds after the denial | first creation | a worker's restart | a shard's restart"]
    for row in rows:
        cells = (f"{row.took[job]:.1f}" if job in row.took else "never" for job in row.wanted)
        lines.append(f"{row.how:24} | {' | '.join(cells)}")
    return "\n".join(lines)
