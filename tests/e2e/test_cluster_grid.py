"""Every fault at every role in every phase of a job on real nodes, with the outcome of each cell printed as a table.

`python -m pytest -s tests/e2e/test_cluster_grid.py -m soak`; `-k "oom and worker-0"` takes some cells. The cells of one fault in one phase
run side by side, each in a namespace of its own; where a node is lost, one after the other.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hack.cluster.api import ApiError
from hack.cluster.paths import program
from tests.e2e import digits
from tests.e2e.digits import accuracy, complete, coordinator, final_weights, pod_of, ready_to_kill
from tests.e2e.kube import ROOT, Kube, condition, kill, own_namespace, phase, processes, wait_for
from tests.e2e.node_faults import lose, taken
from tests.support.cluster_fixtures import Cluster

pytestmark = [pytest.mark.soak, pytest.mark.serial]
NAME = "digits"
SECRET = "grid"
ROLES = ("shard-0", "shard-1", "worker-0", "worker-1")
PROGRAMS = {"shard": "psjob.shard", "worker": "train.py"}


@dataclass(frozen=True)
class Place:
    """Where a cell happens."""

    kube: Kube
    home: Kube
    cluster: Cluster
    stopped: set[int]
    """Kubelets that were stopped; they continue after the test."""
    image: str
    """Of this cell's own name: it can be taken away from the nodes without another cell's."""
    seen: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Pods by role that are struck even while they are being deleted, or end by themselves."""

    def pod(self, role: str) -> dict[str, Any]:
        name, _, index = role.partition("-")
        return self.seen.get(role) or pod_of(self.kube, NAME, name, int(index))

    def kill(self, role: str) -> None:
        kill(self.pod(role), PROGRAMS[role.partition("-")[0]])


# -- phases: each waits until the job is there ------------------------------------------------------------------------------------


def starting(place: Place, role: str) -> None:
    """Its process runs and no step was made."""

    def begun() -> bool:
        name, _, index = role.partition("-")
        pods = digits.pods_of(place.kube, NAME, name, int(index))
        return bool(pods and processes(pods[0], PROGRAMS[name]))

    wait_for(f"the process of {role}", begun, 60, every=0.05, story=lambda: place.kube.story(NAME))


def training(place: Place, role: str) -> None:
    ready_to_kill(place.kube, NAME)


def recovering(place: Place, role: str) -> None:
    """Another one was killed a moment ago."""
    ready_to_kill(place.kube, NAME)
    wait_for("Running", phase(place.kube, NAME, "Running"), 60, every=0.1)  # a job that has not begun is Pending until it has
    place.kill("worker-1" if role.startswith("shard") else "shard-1")
    wait_for("the loss to be seen", phase(place.kube, NAME, "Recovering"), 60, every=0.1, story=lambda: place.kube.story(NAME))
    wait_for(f"a process of {role}", lambda: processes(place.pod(role), PROGRAMS[role.partition("-")[0]]), 60, every=0.1)


def suspending(place: Place, role: str) -> None:
    """It was asked to stop a moment ago; its pod is looked up before, since the operator deletes it at once."""
    ready_to_kill(place.kube, NAME)
    place.seen[role] = place.pod(role)
    place.kube.kubectl("patch", "pstrainingjob", NAME, "--type=merge", "-p", '{"spec":{"suspend":true}}')


def ending(place: Place, role: str) -> None:
    """Three quarters of the steps are done."""

    def late() -> bool:
        said = coordinator(place.kube, NAME)
        return bool(said and said["totalSteps"] and said["step"] >= 0.75 * said["totalSteps"])

    ready_to_kill(place.kube, NAME)
    place.seen[role] = place.pod(role)
    wait_for("the last steps", late, 180, every=0.1, story=lambda: place.kube.story(NAME))


PHASES: dict[str, Callable[[Place, str], None]] = {it.__name__: it for it in (starting, training, recovering, suspending, ending)}


# -- faults: each strikes, and answers what mends its cause afterwards --------------------------------------------------------------

Mend = Callable[[], None]


def nothing() -> None:
    """The cause has gone by itself."""


def killed(place: Place, role: str) -> Mend:
    place.kill(role)
    return nothing


def oom(place: Place, role: str) -> Mend:
    """The kernel kills it at its own limit: memory that no process holds fills the container's cgroup.

    It is stopped meanwhile: a process that runs reads its libraries' pages back as fast as the kernel gives them up, for minutes.
    """
    name = role.partition("-")[0]
    victim = max(processes(place.pod(role), PROGRAMS[name]))  # the one that serves, which its keeper has started
    (line,) = [it for it in Path(f"/proc/{victim}/cgroup").read_text().splitlines() if ":memory:" in it]
    group = Path("/sys/fs/cgroup/memory") / line.rpartition(":")[2].lstrip("/")
    filler = Path(f"/dev/shm/psjob-grid-{victim}")
    os.kill(victim, signal.SIGSTOP)
    script = f"echo $$ > {group}/cgroup.procs && exec head -c 4G /dev/zero > {filler}"
    try:
        subprocess.run(["sh", "-c", script], timeout=60, check=False)
        wait_for(f"the kernel to kill {role}", lambda: not Path(f"/proc/{victim}").exists(), 30)
    finally:
        filler.unlink(missing_ok=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)
    return nothing


def evicted(place: Place, role: str) -> Mend:
    """Again where the API server says 429, as `kubectl drain` does: too many are away, or its budget is not counted yet."""
    name = place.pod(role)["metadata"]["name"]
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": place.kube.namespace}}

    def granted() -> bool:
        try:
            place.cluster.api.create(f"/api/v1/namespaces/{place.kube.namespace}/pods/{name}/eviction", body)
        except ApiError as error:
            if error.status != 429:
                raise
            return False
        return True

    wait_for(f"the eviction of {name} to be granted", granted, 60, story=lambda: place.kube.story(NAME))
    return nothing


def node_lost(place: Place, role: str) -> Mend:
    lose(place.cluster, [place.kube, place.home], place.pod(role)["spec"]["nodeName"], place.stopped)
    return nothing


def strike(place: Place, role: str, take: Callable[[], object]) -> None:
    """Take away what its next container needs, and kill it. One that suspends or ends is killed first: it may be over in a moment."""
    if place.seen:
        place.kill(role)
        take()
    else:
        take()
        place.kill(role)


def image_gone(place: Place, role: str) -> Mend:
    """It is killed, and no node has its image any more."""

    def take() -> None:
        for index in (1, 2):
            socket = place.cluster.state / f"node{index}" / "containerd.sock"
            command = [str(program("ctr")), f"--address={socket}", "--namespace=k8s.io", "images", "rm", "--sync", place.image]
            subprocess.run(command, check=True, capture_output=True, timeout=60)

    strike(place, role, take)
    return lambda: mended(place, lambda: place.cluster.load_worker(place.image, ROOT / "examples" / "digits"))


def config_error(place: Place, role: str) -> Mend:
    """It is killed, and a Secret that its environment needs is gone."""
    strike(place, role, lambda: place.kube.kubectl("delete", "secret", SECRET))
    return lambda: mended(place, lambda: place.kube.apply(secret()))


FAULTS: dict[str, Callable[[Place, str], Mend]] = {
    "kill": killed,
    "oom": oom,
    "evict": evicted,
    "node-lost": node_lost,
    "image-gone": image_gone,
    "config-error": config_error,
}


def mended(place: Place, act: Callable[[], Any]) -> None:
    """The job says what it waits for; then the cause goes."""
    words = ("ErrImagePull", "ImagePullBackOff", "CreateContainerConfigError")

    def told() -> bool:
        status = place.kube.status(NAME)
        said = condition(status, "Ready") or {}
        problems = status["workers"].get("problems") or []
        return said.get("reason") in words or any(it["reason"] in words for it in problems) or status["phase"] in ("Complete", "Suspended")

    wait_for("the status to say what is missing", told, 60, story=lambda: place.kube.story(NAME))
    act()


def whole(kube: Kube) -> bool:
    """One pod in each seat, the shards on one node; or the job is over. A successor need not wait until an evicted pod has gone."""
    status = kube.status(NAME)
    if status["phase"] == "Running" and status["shardsReady"] == "2/2":
        seats, homes = taken(kube, NAME)
        return max(seats.values(), default=0) == 1 and len(set(homes.values())) == 1
    return bool(status["phase"] == "Complete")


# -- the grid ------------------------------------------------------------------------------------------------------------------


def secret() -> dict[str, Any]:
    value = base64.b64encode(b"1").decode()
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "data": {"OMP_NUM_THREADS": value}}


def job(image: str) -> dict[str, Any]:
    """The digits; every container, shards' too, takes a number from the Secret."""
    made = digits.job(NAME, image=image, args=[f"--epochs={digits.LONG_EPOCHS}"], checkpoint={"periodSeconds": 2, "everySteps": 25})
    from_secret = {"name": "GRID", "valueFrom": {"secretKeyRef": {"name": SECRET, "key": "OMP_NUM_THREADS"}}}
    for template in (made["spec"]["workers"]["template"], made["spec"]["shards"]["template"]):
        (container,) = template["spec"]["containers"]
        container.setdefault("env", []).append(from_secret)
    return made


@pytest.fixture(scope="module")
def table() -> Iterator[dict[tuple[str, str, str], str]]:
    """Outcome by (role, phase, fault); printed when the last cell is done."""
    cells: dict[tuple[str, str, str], str] = {}
    yield cells
    faults = [name for name in FAULTS if any(name == fault for _, _, fault in cells)]
    print("\n" + f"{'':22}" + "".join(f"{name:>16}" for name in faults))
    for role in ROLES:
        for name in PHASES:
            row = [cells.get((role, name, fault), "-") for fault in faults]
            if set(row) != {"-"}:
                print(f"{role + ' ' + name:22}" + "".join(f"{cell:>16}" for cell in row))


@pytest.fixture(scope="module")
def images(node_cluster: Cluster) -> dict[str, str]:
    """An image by role."""
    return {role: node_cluster.load_worker(f"psjob.local/grid-{role}:dev", ROOT / "examples" / "digits") for role in ROLES}


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(len(ROLES)) as made:
        yield made


@pytest.fixture(scope="module")
def begun() -> dict[tuple[str, str, str], Future[str]]:
    """The cells that were begun, by (role, phase, fault)."""
    return {}


def cell(home: Kube, cluster: Cluster, stopped: set[int], images: dict[str, str], role: str, when: str, fault: str) -> str:
    """One fault, until the job is Complete: as accurate as undisturbed, one process a seat, and at most the struck process and the first
    one counted. How long it took."""
    kube = own_namespace(home, cluster, "grid")
    place = Place(kube, home, cluster, stopped, images[role])
    try:
        kube.apply(secret())
        kube.apply(job(place.image))
        PHASES[when](place, role)
        began = time.monotonic()
        mend = FAULTS[fault](place, role)
        mend()
        if when == "suspending":
            wait_for("Suspended", phase(kube, NAME, "Suspended"), 120, story=lambda: kube.story(NAME))
            kube.kubectl("patch", "pstrainingjob", NAME, "--type=merge", "-p", '{"spec":{"suspend":false}}')
        else:
            wait_for("one process a seat", lambda: whole(kube), 120, story=lambda: kube.story(NAME))
        status = complete(kube, NAME)
        took = time.monotonic() - began
        assert status["restarts"]["counted"] <= 2, json.dumps(status["restarts"])
        assert accuracy(final_weights(kube, NAME)) >= 0.95
    except Exception as error:  # told at once: the whole grid takes an hour and a half
        print(f"\n{role} {when} {fault}: {error!s:.600}", flush=True)
        raise
    finally:
        cluster.api.delete(f"/api/v1/namespaces/{kube.namespace}")
    return f"{took:.0f} s"


def beside(request: pytest.FixtureRequest, when: str, fault: str) -> list[str]:
    """The roles of that phase and fault that this run was asked for."""
    asked = [
        it.callspec.params for it in request.session.items if isinstance(it, pytest.Function) and it.originalname == "test_a_job_ends_well"
    ]
    return [it["role"] for it in asked if (it["when"], it["fault"]) == (when, fault)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("when", PHASES)
def test_a_job_ends_well(
    request: pytest.FixtureRequest,
    home: Kube,
    node_cluster: Cluster,
    nodes: set[int],
    images: dict[str, str],
    pool: ThreadPoolExecutor,
    begun: dict[tuple[str, str, str], Future[str]],
    table: dict[tuple[str, str, str], str],
    role: str,
    when: str,
    fault: str,
) -> None:
    """See `cell`."""
    table[role, when, fault] = "FAILED"
    if (role, when, fault) not in begun:
        for other in [role] if fault == "node-lost" else beside(request, when, fault):
            begun[other, when, fault] = pool.submit(cell, home, node_cluster, nodes, images, other, when, fault)
    table[role, when, fault] = begun[role, when, fault].result()
