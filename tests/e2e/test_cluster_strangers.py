"""A stranger's pod at a running job's shards, and keys that are rolled: it hears nothing, and the job has the bits of a quiet one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from safetensors.numpy import load_file

from psjob.contract import keys
from psjob.wire import auth
from psjob.wire.frame import HEADER_BYTES, Kind, parse
from psjob.wire.frame import MAGIC as FRAME
from tests.e2e import digits
from tests.e2e.digits import RESTRICTED, RESTRICTED_POD, complete, final_weights, ready_to_kill
from tests.e2e.kube import OPEN, ROOT, Kube, phase, wait_for
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
    own = keys.worker(run["workers"], 1, 1).hex()
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
    rolled = [f"{name} of rolled keys=0:0:{start}:{keys.worker(first[name], 0, start).hex()}" for name in ("workers", "shards")]
    heard = stranger(kube, "stranger-2", run, *rolled, f"the start before=0:0:1:{keys.worker(first['workers'], 0, 1).hex()}")
    told_nothing(heard, run)

    assert complete(kube, NAME)["restarts"]["counted"] == 0
    begins("quiet")
    complete(kube, "quiet")
    disturbed, quiet = load_file(final_weights(kube, NAME)), load_file(final_weights(kube, "quiet"))
    assert disturbed.keys() == quiet.keys() and all((disturbed[name] == quiet[name]).all() for name in quiet)
