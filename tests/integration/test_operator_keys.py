"""The keys of a run on a real API server: its Secret is made once, before the first pod, and no operator ever reads one.

What a person's client asks of a running job through the real API server's proxy, with the person's rights to the run's Secret.
"""

from __future__ import annotations

import asyncio
import base64
import socket
from pathlib import Path
from typing import Any

import pytest

from psjob_client.jobs import cluster
from psjob_client.jobs.cluster import ClusterJobs
from psjob_client.jobs.view import HistoryView, JobView
from psjob_operator import keys
from psjob_operator.render import objects
from tests.integration.operator_harness import World, allow, manifest
from tests.integration.own_place import place
from tests.support.statusport import StatusPort

__all__ = ["place"]

pytestmark = pytest.mark.cluster


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
    operator = place.operator("--progress-seconds=3600")
    uid = place.create(manifest())["metadata"]["uid"]
    place.run("job-shard-0-a1", "job-worker-0-r1", "job-worker-1-r1", job="job")
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
    place.run("job-worker-0-r2", job="job")
    place.remove("job-worker-1-r1")
    place.until("the audit log", lambda: len(asked(place)) == 7)
    assert asked(place)[6:] == [("create", "pods", 201)], "it is known now"


def test_keys_that_were_there_before_any_pod_are_not_used(place: World) -> None:
    """Whoever may create Secrets could make a run's under its name, which anybody can tell, and would know its keys."""
    place.operator()
    uid = place.create(manifest(suspend=True))["metadata"]["uid"]
    place.until_phase("Suspended")

    def stranger(number: int) -> None:
        place.make("Secret", f"job-key-{uid[:8]}-{number}")

    stranger(1)
    stranger(2)
    labels = {objects.LABEL_JOB: "job", objects.LABEL_ROLE: "worker", objects.LABEL_INDEX: "1", objects.LABEL_NUMBER: "7"}
    place.make("Pod", "guest", metadata={"labels": labels}, spec={"containers": [{"name": "worker", "image": "none"}]})
    place.edit("job", suspend=None)
    name = f"job-key-{uid[:8]}-3"
    assert mounted(place, "job-shard-0-a1") == mounted(place, "job-worker-1-r1") == [name]
    place.run("job-shard-0-a1", "job-worker-0-r1", "job-worker-1-r1", job="job")
    place.until("the Events", lambda: len(place.events("KeysTaken")) == 2)
    assert place.cluster.api.get(place.path("secrets", name))["metadata"]["ownerReferences"][0]["uid"] == uid
    # A later one, for the run that is resumed.
    stranger(4)
    place.suspend()
    place.edit("job", suspend=None)
    assert mounted(place, "job-shard-0-a2") == [f"job-key-{uid[:8]}-5"]


def test_a_denial_holds_the_pods_and_is_told_in_the_api_servers_words(place: World) -> None:
    place.make("ResourceQuota", "none", spec={"hard": {"count/secrets": "0"}})
    place.until("the quota", lambda: place.cluster.api.get(place.path("resourcequotas", "none")).get("status", {}).get("hard"))
    place.operator()
    place.create(manifest())
    place.until("the refusal", lambda: place.conditions().get("Ready", {}).get("reason") == "CreateRefused")
    message = place.conditions()["Ready"]["message"]
    assert "-key-" in message and "exceeded quota: none" in message and not place.pods()
    place.cluster.api.delete(place.path("resourcequotas", "none"))
    place.until("the pods", lambda: len(place.pods()) == 3)
    place.until("the refusal to go", lambda: place.conditions()["Ready"]["reason"] != "CreateRefused")


def test_an_operator_without_its_key_waits_for_the_file_and_begins_no_run(place: World) -> None:
    """Another operator has made the Secret, and the kubelet has not shown it yet."""
    own, file = bytes(range(32)), place.folder / "mounted" / "key"
    place.make("Secret", "own", stringData={"key": own.hex()})
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


def own_address() -> str:
    """One of this machine's that is not loopback: the API server's proxy goes to no other. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


def told(path: str) -> dict[str, Any]:
    if path == "/history":
        return {"entries": [{"time": 1790000000.0, "step": 20, "rate": 2.0, "metrics": {"loss": 0.5}}]}
    return {"index": 0, "attempt": 1, "coordinator": {"step": 123, "mode": "sync", "metrics": {}, "workers": []}}


def look(config: Path, namespace: str) -> tuple[JobView, HistoryView]:
    async def ask() -> tuple[JobView, HistoryView]:
        source = ClusterJobs(*await cluster.reach(None, namespace, str(config)))
        try:
            return await source.get("job"), await source.history("job")
        finally:
            await source.close()

    return asyncio.run(ask())


def person(place: World, *rules: dict[str, Any]) -> Path:
    """The kubeconfig of someone with these rights in the namespace."""
    name = f"person-{len(rules)}"
    allow(place.cluster.api, name, "Role", list(rules), place.namespace)
    folder = place.folder / name
    folder.mkdir()
    return place.cluster.user_kubeconfig(name, folder=folder)


def test_live_numbers_are_for_who_may_read_the_runs_secret(place: World) -> None:
    place.operator("--progress-seconds=3600")
    place.create(manifest())
    place.until("the pods", lambda: len(place.pods()) == 3)
    key = place.run_keys()["questions"]
    address = own_address()
    port = StatusPort(told, lambda: key)
    with port.serve(address):
        place.run("job-shard-0-a1", "job-worker-0-r1", "job-worker-1-r1", address=address, job="job")
        jobs = {"apiGroups": ["psjob.dev"], "resources": ["pstrainingjobs"], "verbs": ["get", "list"]}
        pods = {"apiGroups": [""], "resources": ["pods", "pods/proxy"], "verbs": ["get", "list"]}
        secrets = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}
        view, history = look(person(place, jobs, pods, secrets), place.namespace)
        assert view.fresh and view.progress.step == 123 and not view.limited
        assert history.of("loss") is not None and {"/status", "/history"} <= set(port.asked)
        asked = len(port.asked)
        view, history = look(person(place, jobs, pods), place.namespace)
        assert not view.fresh and view.phase == "Running" and len(port.asked) == asked
        assert "the right `get secrets` is missing" in view.limited and "-key-" in view.limited
        assert history.of("loss") is None and not history.complete
