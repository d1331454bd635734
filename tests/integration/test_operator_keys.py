"""The keys of a run on a real API server: its Secret is made once, before the first pod, and no operator ever reads one."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from psjob_operator import keys
from psjob_operator.render import objects
from tests.integration.operator_harness import World, manifest, world
from tests.support.cluster_fixtures import Cluster

pytestmark = pytest.mark.cluster


@pytest.fixture
def place(control_plane: Cluster, namespace: str, tmp_path: Path) -> Iterator[World]:
    with world(control_plane, namespace, tmp_path) as made:
        yield made


def asked(place: World) -> list[tuple[str, str, int]]:
    """(verb, resource, code) of this operator's requests for Secrets and to create pods, in the order of their answers."""
    events = [event for event in place.cluster.audit(user=place.user) if event["stage"] == "ResponseComplete"]
    about = [(event, event.get("objectRef") or {}) for event in events]
    return [
        (event["verb"], meant["resource"], event["responseStatus"]["code"])
        for event, meant in about
        if meant.get("resource") == "secrets" or (meant.get("resource") == "pods" and event["verb"] == "create")
    ]


def mounted(place: World, pod: str) -> list[str]:
    """Names of the Secrets that this pod mounts."""
    raw = place.until(f"pod {pod}", lambda: place.pods().get(pod))
    return [volume["secret"]["secretName"] for volume in raw["spec"]["volumes"] if "secret" in volume]


def test_the_secret_is_made_once_before_the_first_pod_and_never_read(place: World) -> None:
    node = place.node(f"{place.namespace}-n")
    operator = place.operator("--progress-seconds=3600")
    uid = place.create(manifest())["metadata"]["uid"]
    place.run("job-shard-0-a1", "job-worker-0-r1", "job-worker-1-r1", node=node)
    place.until_phase("Running")
    name = f"job-key-{uid[:8]}-1"
    assert mounted(place, "job-shard-0-a1") == mounted(place, "job-worker-1-r1") == [name]
    raw = place.cluster.api.get(place.path("secrets", name))
    assert raw["immutable"] is True and raw["metadata"]["ownerReferences"][0]["uid"] == uid
    run = place.run_keys()
    own = bytes.fromhex((place.folder / "operator.key").read_text())
    assert run["questions"] == keys.mac(own, f"questions:{uid}") and len(set(run.values())) == 3
    place.until("the audit log", lambda: len(asked(place)) == 4)
    assert asked(place) == [("create", "secrets", 201), *[("create", "pods", 201)] * 3]
    # The next operator makes no request for what runs, and one for what must be replaced: it cannot know that the Secret is there.
    operator.kill()
    operator.start()
    place.end("job-worker-0-r1", 1)
    assert mounted(place, "job-worker-0-r2") == [name]
    place.until("the audit log", lambda: len(asked(place)) == 6)
    assert asked(place)[4:] == [("create", "secrets", 409), ("create", "pods", 201)]
    assert place.run_keys() == run
    place.run("job-worker-0-r2", node=node)
    place.until_phase("Running")
    place.remove("job-worker-1-r1")
    place.until("the audit log", lambda: len(asked(place)) == 7)
    assert asked(place)[6:] == [("create", "pods", 201)], "it is known now"


def test_keys_that_were_there_before_any_pod_are_not_used(place: World) -> None:
    """Whoever may create Secrets could make a run's under its name, which anybody can tell, and would know its keys."""
    node = place.node(f"{place.namespace}-n")
    place.operator()
    uid = place.create(manifest(suspend=True))["metadata"]["uid"]
    place.until_phase("Suspended")

    def stranger(number: int) -> None:
        metadata = {"name": f"job-key-{uid[:8]}-{number}"}
        place.cluster.api.create(place.path("secrets"), {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": {}})

    stranger(1)
    stranger(2)
    labels = {objects.LABEL_JOB: "job", objects.LABEL_ROLE: "worker", objects.LABEL_INDEX: "1", objects.LABEL_NUMBER: "7"}
    spec = {"containers": [{"name": "worker", "image": "none"}]}
    guest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "guest", "labels": labels}, "spec": spec}
    place.cluster.api.create(place.path("pods"), guest)
    place.edit("job", suspend=None)
    name = f"job-key-{uid[:8]}-3"
    assert mounted(place, "job-shard-0-a1") == mounted(place, "job-worker-1-r1") == [name]
    place.run("job-shard-0-a1", "job-worker-0-r1", "job-worker-1-r1", node=node)
    place.until_phase("Running")
    place.until("the Events", lambda: len(place.events("KeysTaken")) == 2)
    assert place.cluster.api.get(place.path("secrets", name))["metadata"]["ownerReferences"][0]["uid"] == uid
    # A later one, for the run that is resumed.
    stranger(4)
    place.edit("job", suspend=True)
    for pod in list(place.pods("job")):
        place.until("the pod to be told to end", lambda pod=pod: place.pods()[pod]["metadata"].get("deletionTimestamp"))  # type: ignore[misc]
        place.remove(pod)
    place.until_phase("Suspended")
    place.edit("job", suspend=None)
    assert mounted(place, "job-shard-0-a2") == [f"job-key-{uid[:8]}-5"]


def test_a_denial_holds_the_pods_and_is_told_in_the_api_servers_words(place: World) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": {"count/secrets": "0"}}}
    place.cluster.api.create(place.path("resourcequotas"), quota)
    place.until("the quota", lambda: place.cluster.api.get(place.path("resourcequotas", "none")).get("status", {}).get("hard"))
    place.operator()
    place.create(manifest())
    place.until("the refusal", lambda: place.conditions().get("Ready", {}).get("reason") == "CreateRefused")
    message = place.conditions()["Ready"]["message"]
    assert "-key-" in message and "exceeded quota: none" in message and not place.pods()
    place.cluster.api.delete(place.path("resourcequotas", "none"))
    place.until("the pods", lambda: len(place.pods()) == 3)
    place.until("the refusal to go", lambda: place.conditions()["Ready"]["reason"] != "CreateRefused")


def own_secret(key: bytes) -> dict[str, Any]:
    data = {"key": base64.b64encode(key.hex().encode()).decode()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "own"}, "data": data}


def test_an_operator_without_its_key_waits_for_the_file_and_begins_no_run(place: World) -> None:
    """Another operator has made the Secret, and the kubelet has not shown it yet."""
    own, file = bytes(range(32)), place.folder / "mounted" / "key"
    place.cluster.api.create(place.path("secrets"), own_secret(own))
    operator = place.operator(f"--key-file={file}", "--key-secret=own", f"--lease-namespace={place.namespace}")
    place.create(manifest())
    place.until("the hold", lambda: place.conditions().get("Ready", {}).get("reason") == "CreateRefused")
    assert f"the Secret {place.namespace}/own is there, and the kubelet has not shown it" in place.conditions()["Ready"]["message"]
    assert not place.pods() and "no run begins until it has one" in operator.log.read_text()
    file.parent.mkdir()
    file.write_text(own.hex())
    place.until("the pods", lambda: len(place.pods()) == 3)
    assert place.run_keys()["questions"] == keys.mac(own, f"questions:{place.job()['metadata']['uid']}")


def test_the_operator_that_takes_turns_makes_its_secret_and_has_its_key_at_once(place: World) -> None:
    file = place.folder / "mounted" / "key"
    place.operator(f"--key-file={file}", "--key-secret=own", f"--lease-namespace={place.namespace}")
    place.create(manifest())
    place.until("the pods", lambda: len(place.pods()) == 3)
    raw = place.cluster.api.get(place.path("secrets", "own"))
    own = bytes.fromhex(base64.b64decode(raw["data"]["key"]).decode())
    assert place.run_keys()["questions"] == keys.mac(own, f"questions:{place.job()['metadata']['uid']}")
    assert not file.exists() and [verb for verb, resource, _ in asked(place) if resource == "secrets"] == ["create", "create"]
