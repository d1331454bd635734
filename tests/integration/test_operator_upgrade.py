"""Operators of several versions take a running job over from each other: it stays what it was begun as, and nothing of it is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from psjob_operator.contract import WIRE
from tests.integration.operator_harness import Operator, World, manifest, world
from tests.integration.own_place import place
from tests.support import older
from tests.support.cluster_fixtures import CRD, Cluster

__all__ = ["place"]

pytestmark = pytest.mark.cluster
OLD, NEW = "registry.example/psjob-runtime:old", "registry.example/psjob-runtime@sha256:" + "2" * 64


def image(place: World, pod: str) -> str:
    raw = place.until(f"pod {pod}", lambda: place.pods().get(pod))
    return str(next(item["image"] for item in raw["spec"]["initContainers"] if item["name"] == "psjob-inject"))


def replaced(before: Operator, after: Operator) -> None:
    """As a Deployment with strategy Recreate does it."""
    before.stop()
    after.start()


def up(place: World, node: str, *pods: str) -> None:
    place.run(*pods, node=node, job="job")


def config(place: World) -> dict[str, Any]:
    return dict(json.loads(place.cluster.api.get(place.path("configmaps", "job-config"))["data"]["config.json"]))


def test_another_runtime_image_comes_with_another_run(place: World) -> None:
    node = place.node(f"{place.namespace}-n")
    first = place.operator(f"--runtime-image={OLD}")
    place.create(manifest())
    up(place, node, "job-shard-0-a1", "job-worker-0-r1", "job-worker-1-r1")
    pinned = place.status()["internal"]["pinned"]
    begun = {"configFormat": 1, "wire": WIRE, "container": "worker", "encryption": "auto", "key": 1}
    assert pinned == {"runtimeImage": OLD, **begun, "templates": pinned["templates"]}
    second = place.operator(f"--runtime-image={NEW}", start=False)
    replaced(first, second)
    place.end("job-shard-0-a1", 1)
    place.end("job-worker-1-r1", 1)
    assert image(place, "job-shard-0-a2") == OLD and image(place, "job-worker-1-r2") == OLD
    up(place, node, "job-shard-0-a2", "job-worker-1-r2")
    place.edit("job", suspend=True)
    place.until("the pods to be told to end", lambda: all(raw["metadata"].get("deletionTimestamp") for raw in running(place).values()))
    for pod in place.pods():
        place.remove(pod)
    place.until_phase("Suspended")
    place.edit("job", suspend=False)
    assert image(place, "job-shard-0-a3") == NEW, "a resumed run is pinned anew"
    assert place.status()["internal"]["pinned"] == {**pinned, "runtimeImage": NEW, "key": 2}
    volumes = {volume["name"]: volume for volume in place.pods()["job-shard-0-a3"]["spec"]["volumes"]}
    assert volumes["psjob-secret"]["secret"]["secretName"] == f"job-key-{place.status()['run'][:8]}-2"
    assert len(set(place.run_keys().values())) == 3
    replaced(second, first)
    place.end("job-shard-0-a3", 1)
    assert image(place, "job-shard-0-a4") == NEW
    replaced(first, second)
    place.create(manifest("fresh"))
    assert image(place, "fresh-shard-0-a1") == NEW
    assert place.status("fresh")["internal"]["pinned"]["runtimeImage"] == NEW


def failed_turns(*operators: Operator) -> list[dict[str, Any]]:
    return [line for operator in operators for line in operator.lines() if "this turn failed" in line["message"]]


def running(place: World) -> dict[str, dict[str, Any]]:
    return {name: raw for name, raw in place.pods().items() if raw["status"].get("phase") not in ("Succeeded", "Failed")}


@pytest.mark.rotating
@pytest.mark.timeout(300)
def test_a_job_whose_fields_have_other_names_is_left_alone_and_a_new_one_begins(
    fresh_control_plane: Callable[..., Cluster], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As helm does it: the CRD with the operator. The operator before is the real one of an older commit."""
    before = older.unpacked(tmp_path_factory.mktemp("before"))
    cluster = fresh_control_plane()

    def crd(file: Path) -> None:
        cluster.run_kubectl("apply", "--server-side", "--force-conflicts", "-f", str(file))

    crd(before.crd)
    with world(cluster, "default", tmp_path) as place:
        node = place.node("n")
        first = place.operator(f"--runtime-image={OLD}", "--crd-seconds=0.3", launcher=before)
        spec = manifest()["spec"]
        place.create({**manifest(), "spec": {"ps": {"shards": spec["shards"]["replicas"]}, "workers": spec["workers"]}})
        began = {"job-ps-0-a1", "job-worker-0-r1", "job-worker-1-r1"}
        up(place, node, *began)
        was = config(place)
        crd(CRD)
        second = place.operator(f"--runtime-image={NEW}", start=False)
        replaced(first, second)
        place.until("the API server's words", lambda: any("no such key: shards" in line["message"] for line in second.lines()))
        place.end("job-worker-0-r1", 1)
        with pytest.raises(AssertionError, match="waited"):
            place.until("nothing", lambda: set(place.pods()) != began, seconds=2)
        assert config(place) == was and not [it for it in place.items("secrets") if "-key-" in it["metadata"]["name"]]
        place.create(manifest("anew"))
        assert image(place, "anew-shard-0-a1") == NEW
        assert not failed_turns(*place.operators)


def test_a_run_of_a_version_not_known_here_is_held_until_one_comes_that_knows_it(place: World) -> None:
    node = place.node(f"{place.namespace}-n")
    place.operator(f"--runtime-image={NEW}")
    place.create(manifest())
    up(place, node, "job-shard-0-a1", "job-worker-0-r1", "job-worker-1-r1")
    place.lay(internal={"pinned": {"configFormat": 99, "wire": 98}})
    place.until("the sentence", lambda: place.conditions()["Ready"]["reason"] == "RunOfAnotherVersion")
    assert "config format 99 and wire 98" in place.conditions()["Ready"]["message"]
    place.until("its event", lambda: place.events("RunOfAnotherVersion"))
    place.end("job-shard-0-a1", 1)
    place.end("job-worker-0-r1", 1)
    with pytest.raises(AssertionError, match="waited"):
        place.until("nothing", lambda: set(place.pods()) != {"job-shard-0-a1", "job-worker-0-r1", "job-worker-1-r1"}, seconds=2)
    assert place.status()["phase"] == "Running" and place.status()["internal"]["pinned"]["configFormat"] == 99
    place.lay(internal={"pinned": {"configFormat": 1, "wire": WIRE}})
    up(place, node, "job-shard-0-a2", "job-worker-0-r2")


def opened(part: Any) -> Any:
    """The schema without what a newer CRD would have more of: enums, and fields of status."""
    if isinstance(part, dict):
        return {key: opened(value) for key, value in part.items() if key != "enum"}
    return [opened(item) for item in part] if isinstance(part, list) else part


@pytest.mark.rotating
@pytest.mark.timeout(300)
def test_words_of_a_newer_operator_in_a_status_are_served_and_kept(fresh_control_plane: Callable[..., Cluster], tmp_path: Path) -> None:
    document = yaml.safe_load(CRD.read_text())
    properties = document["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    properties["status"] = opened(properties["status"])
    properties["status"]["x-kubernetes-preserve-unknown-fields"] = True
    known = properties["status"]["properties"]
    for field in (known["internal"]["properties"]["pinned"], known["workers"]):
        field["x-kubernetes-preserve-unknown-fields"] = True
    newer = tmp_path / "newer.yaml"
    newer.write_text(yaml.safe_dump(document))
    cluster = fresh_control_plane()
    cluster.run_kubectl("apply", "--server-side", "-f", str(newer))
    with world(cluster, "default", tmp_path) as place:
        node = place.node("n")
        operator = place.operator(f"--runtime-image={OLD}", "--crd-seconds=0.3")
        place.create(manifest())
        up(place, node, "job-shard-0-a1", "job-worker-0-r1", "job-worker-1-r1")
        operator.stop()
        status = place.status()
        at = status["conditions"][0]["lastTransitionTime"]
        status["shards"][0]["state"] = "Migrating"
        status["conditions"] += [{"type": "QuotaReserved", "status": "Perhaps", "reason": "Q", "message": "q", "lastTransitionTime": at}]
        laid = {"phase": "Tuning", "standby": [1], "internal": {"pinned": {"torch": "9"}}, "workers": {"zones": {"a": 1}}}
        place.lay(**laid, shards=status["shards"], conditions=status["conditions"])
        operator.start()
        place.end("job-shard-0-a1", 1)
        assert image(place, "job-shard-0-a2") == OLD
        up(place, node, "job-shard-0-a2")
        found = place.status()
        assert (found["standby"], found["internal"]["pinned"]["torch"], found["workers"]["zones"]) == ([1], "9", {"a": 1})
        assert place.conditions()["QuotaReserved"]["status"] == "Perhaps" and found["shards"][0]["state"] == "Serving"
        assert not failed_turns(operator)
