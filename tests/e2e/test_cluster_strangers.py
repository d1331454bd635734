"""A stranger's pod at a running job's shards, and keys that are rolled: it hears nothing, and the job has the bits of a quiet one.

- NetworkPolicies of a run on real nodes, by packets: strangers' pods come through to no port, and operator and training continue.

Who enforces them here is the stand-in of hack/cluster (policies.py, enforcer.py), not a network plugin that anybody runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from safetensors.numpy import load_file

from psjob.contract import keys
from psjob.wire import auth
from psjob.wire.frame import HEADER_BYTES, Kind, parse
from psjob.wire.frame import MAGIC as FRAME
from tests.e2e import digits
from tests.e2e.digits import RESTRICTED, RESTRICTED_POD, complete, final_weights, pods_of, ready_to_kill
from tests.e2e.kube import OPEN, ROOT, Kube, own_namespace, phase, wait_for
from tests.support.cluster_fixtures import WORKER_IMAGE, Cluster
from tests.support.statusport import run_keys

pytestmark = [pytest.mark.soak, pytest.mark.serial]
SCRIPT = (ROOT / "tests" / "e2e" / "workloads" / "stranger.py").read_text()
NAME = "digits"
KIND = 8
"""Where a header says what it is."""


def stranger(kube: Kube, name: str, *words: str) -> dict[str, bytes]:
    """What a pod of that namespace that is none of the job's heard, by attempt."""
    container = {
        "name": "stranger", "image": WORKER_IMAGE, "imagePullPolicy": "IfNotPresent", "securityContext": RESTRICTED,
        "command": ["python3", "-c", SCRIPT, f"{NAME}-shard-0.{NAME}-shards", *words],
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
    }  # fmt: skip
    spec = {"restartPolicy": "Never", "securityContext": RESTRICTED_POD, "automountServiceAccountToken": False, "containers": [container]}
    kube.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})
    ended = wait_for("the stranger to end", lambda: _phase(kube, name), 120, story=lambda: kube.kubectl("describe", "pod", name))
    said = kube.kubectl("logs", name)
    assert ended == "Succeeded", said
    return {attempt: bytes.fromhex(heard) for attempt, heard in json.loads(said).items()}


def _phase(kube: Kube, name: str) -> str | None:
    seen = ((kube.get("pod", name) or {}).get("status") or {}).get("phase")
    return seen if seen in ("Succeeded", "Failed") else None


def told_nothing(heard: dict[str, bytes], run: str) -> None:
    """A challenge, and errors that tell nothing of the run."""
    for attempt, raw in heard.items():
        rest = raw[auth.CHALLENGE_BYTES :] if raw.startswith(auth.MAGIC) else raw
        assert run.encode() not in raw, attempt
        while rest:
            assert rest.startswith(FRAME) and rest[KIND] == Kind.ERROR, (attempt, rest)
            if len(rest) < HEADER_BYTES:  # the shard hung up on what the stranger still said
                break
            rest = rest[HEADER_BYTES + parse(rest[:HEADER_BYTES], sealed=True).length :]


def words(run: dict[str, bytes]) -> list[str]:
    """Attempts with what a worker that was taken over has: its own key, as others."""
    own = keys.worker_key(run["workers"], 1, 1).hex()
    return [f"as another rank=0:0:1:{own}", f"as its next start=0:1:2:{own}", f"as a shard=1:1:1:{own}"]


@pytest.mark.timeout(900)
def test_a_strangers_pod_hears_nothing_and_rolled_keys_are_of_no_use(kube: Kube, node_cluster: Cluster) -> None:
    def begins(name: str) -> None:
        kube.apply(digits.job(name, args=[f"--epochs={2 * digits.LONG_EPOCHS}"], checkpoint={"periodSeconds": 2, "everySteps": 25}))
        ready_to_kill(kube, name)

    kube.apply(OPEN)  # keys keep the stranger out here, not the run's policies
    begins(NAME)
    status: dict[str, Any] = kube.status(NAME)
    run = str(status["run"])
    first = run_keys(node_cluster.api, kube.namespace, NAME, run)
    heard = stranger(kube, "stranger-1", run, *words(first))
    assert len(heard) >= 28
    told_nothing(heard, run)
    assert heard["no key over TLS"].startswith(auth.MAGIC), "shards speak TLS between nodes"
    assert b"streams to this process are encrypted" in heard["version 1 in clear text"]
    assert not any(auth.MAGIC in raw for attempt, raw in heard.items() if attempt.endswith("in clear text"))

    kube.kubectl("patch", "psj", NAME, "--type=merge", "-p", json.dumps({"spec": {"suspend": True}}))
    wait_for("the suspension", phase(kube, NAME, "Suspended"), 120, story=lambda: kube.story(NAME))
    kube.kubectl("patch", "psj", NAME, "--type=merge", "-p", json.dumps({"spec": {"suspend": False}}))
    ready_to_kill(kube, NAME)
    assert kube.status(NAME)["internal"]["pinned"]["key"] == status["internal"]["pinned"]["key"] + 1
    second = run_keys(node_cluster.api, kube.namespace, NAME, run, 2)
    assert not set(first.values()) & {second["workers"], second["shards"]}
    start = kube.status(NAME)["workers"]["start"]
    rolled = [f"{name} of rolled keys=0:0:{start}:{keys.worker_key(first[name], 0, start).hex()}" for name in ("workers", "shards")]
    heard = stranger(kube, "stranger-2", run, *rolled, f"the start before=0:0:1:{keys.worker_key(first['workers'], 0, 1).hex()}")
    told_nothing(heard, run)

    assert complete(kube, NAME)["restarts"]["counted"] == 0
    begins("quiet")
    complete(kube, "quiet")
    disturbed, quiet = load_file(final_weights(kube, NAME)), load_file(final_weights(kube, "quiet"))
    assert disturbed.keys() == quiet.keys() and all((disturbed[name] == quiet[name]).all() for name in quiet)


KNOCKING = (ROOT / "tests" / "e2e" / "workloads" / "knocking.py").read_text()
JOB, BOARD = "digits", 6006
SMALL = {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "128Mi"}}

QUICK = {"terminationGracePeriodSeconds": 2}
"""The first process of a container passes over SIGTERM."""


def container(name: str, *command: str) -> dict[str, Any]:
    image = {"image": WORKER_IMAGE, "imagePullPolicy": "IfNotPresent", "securityContext": RESTRICTED, "resources": SMALL}
    return {"name": name, "command": ["python3", *command], **image}


@dataclass(frozen=True)
class Stranger:
    """A pod that knocks at every port of the job."""

    kube: Kube

    def begin(self, targets: list[str]) -> None:
        spec = {"restartPolicy": "Never", "securityContext": RESTRICTED_POD, "automountServiceAccountToken": False, **QUICK}
        spec["containers"] = [container("stranger", "-c", KNOCKING, *targets)]
        self.kube.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "stranger"}, "spec": spec})

    def reached(self) -> set[str] | None:
        """Where it came through in a round that begins from now on."""
        since = time.time()

        def told() -> list[str] | None:
            lines = [json.loads(line) for line in self.kube.kubectl("logs", "stranger", "--tail=5", check=False).splitlines()]
            return next((line["reached"] for line in lines if line["begun"] >= since), None)

        story = lambda: self.kube.kubectl("describe", "pod", "stranger", check=False)  # noqa: E731
        return set(wait_for("the stranger to knock", told, 60, story=story))


@pytest.fixture
def strangers(kube: Kube, home: Kube, node_cluster: Cluster) -> Iterator[tuple[Stranger, Stranger]]:
    """One in the job's namespace, one in another."""
    away = own_namespace(home, node_cluster, "strangers")
    yield Stranger(kube), Stranger(away)
    home.kubectl("delete", "namespace", away.namespace, "--wait=false")


def job() -> dict[str, Any]:
    """Workers have a port for people; shard 0 is asked every six seconds."""
    made = digits.job(JOB, args=[f"--epochs={2 * digits.LONG_EPOCHS}"], workers=2, checkpoint={"periodSeconds": 2, "everySteps": 25})
    made["spec"]["workers"]["progressDeadlineSeconds"] = 30
    pod = made["spec"]["workers"]["template"]["spec"]
    pod["containers"].append(container("board", "-m", "http.server", str(BOARD)))
    pod.update(QUICK)
    return made


def policies(kube: Kube) -> dict[str, str]:
    """Uids by name."""
    return {item["metadata"]["name"]: item["metadata"]["uid"] for item in kube.list("networkpolicy")}


def step(kube: Kube) -> int:
    return int((kube.status(JOB).get("progress") or {}).get("step") or 0)


@pytest.mark.timeout(900)
def test_strangers_reach_no_port_of_a_run_and_training_goes_on(kube: Kube, strangers: tuple[Stranger, Stranger]) -> None:
    kube.apply(job())
    ready_to_kill(kube, JOB)
    ports = {"shard": (7070, 7071), "worker": (BOARD,)}
    every = {f"{pod['status']['podIP']}:{port}" for role, of in ports.items() for pod in pods_of(kube, JOB, role) for port in of}
    assert len(every) == 6

    def all_reach(wanted: set[str]) -> Callable[[], bool]:
        return lambda: all(stranger.reached() == wanted for stranger in strangers)

    kube.apply(OPEN)
    for stranger in strangers:
        stranger.begin(sorted(every))
    wait_for("strangers to come through while a policy opens all", all_reach(every), 60)
    kube.kubectl("delete", "networkpolicy", "open")
    wait_for("strangers to come through nowhere", all_reach(set()), 30)
    for _ in range(3):
        assert all_reach(set())()

    before = policies(kube)
    assert set(before) == {f"{JOB}-shards", f"{JOB}-workers"}
    kube.kubectl("delete", "networkpolicy", *before)
    mended = lambda: (now := policies(kube)).keys() == before.keys() and not set(now.values()) & set(before.values())  # noqa: E731
    wait_for("policies to be made again", mended, 30, story=lambda: kube.story(JOB))
    wait_for("strangers to come through nowhere again", all_reach(set()), 30)

    known = step(kube)
    wait_for("the operator to hear of further steps", lambda: step(kube) > known, 90, story=lambda: kube.story(JOB))
    status = complete(kube, JOB)
    assert status["restarts"]["total"] == 0 and status["checkpoint"]["step"] > known
    kube.kubectl("delete", "psj", JOB)
    wait_for("the policies to go with the job", lambda: not policies(kube), 120)
