"""Templates are laid over one another by the Pod API's own keys, and what a template's metadata says reaches its pods or is refused."""

from __future__ import annotations

from typing import Any

import pytest

from psjob_operator import render
from psjob_operator.api.status import Pinned
from psjob_operator.cluster.pods import parse
from psjob_operator.plan.actions import CreateProcess
from psjob_operator.render.merge import merge
from tests.unit.plan_given import job

DATA = [{"name": "data", "containerPort": 7070}, {"name": "status", "containerPort": 7071}]
LOST = [
    {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
    for taint in ("not-ready", "unreachable")
]
ANYWAY = {"topologyKey": "kubernetes.io/hostname", "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}
NEVER = {"topologyKey": "kubernetes.io/hostname", "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule"}
CASES: dict[str, tuple[str, list[Any], list[Any], list[Any]]] = {
    "another protocol is another port": (
        "spec.containers[].ports",
        DATA,
        [{"name": "gossip", "containerPort": 7070, "protocol": "UDP"}],
        [*DATA, {"name": "gossip", "containerPort": 7070, "protocol": "UDP"}],
    ),
    "no protocol is TCP": (
        "spec.containers[].ports",
        DATA[:1],
        [{"containerPort": 7070, "protocol": "TCP", "hostPort": 9}],
        [{"name": "data", "containerPort": 7070, "protocol": "TCP", "hostPort": 9}],
    ),
    "a sidecar's ports too": (
        "spec.initContainers[].ports",
        [{"containerPort": 53}],
        [{"containerPort": 53, "protocol": "UDP"}],
        [{"containerPort": 53}, {"containerPort": 53, "protocol": "UDP"}],
    ),
    "a constraint that holds stays beside one that prefers": ("spec.topologySpreadConstraints", [ANYWAY], [NEVER], [ANYWAY, NEVER]),
    "the same constraint is changed": ("spec.topologySpreadConstraints", [ANYWAY], [ANYWAY | {"maxSkew": 3}], [ANYWAY | {"maxSkew": 3}]),
    "two constraints of a template that differ": ("spec.topologySpreadConstraints", [], [ANYWAY, NEVER], [ANYWAY, NEVER]),
    "two variables of one name both stay": (
        "spec.containers[].env",
        [{"name": "A", "value": "0"}],
        [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}],
        [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}],
    ),
    "a list without keys is replaced": ("spec.containers[].envFrom", [{"prefix": "A"}], [{"prefix": "B"}], [{"prefix": "B"}]),
    "names that something else calls its own": ("spec.volumes[].projected.sources", [{"name": "a"}], [{"name": "b"}], [{"name": "b"}]),
    "finalizers are a set": ("metadata.finalizers", ["a/b"], ["c/d", "a/b"], ["a/b", "c/d"]),
    "a toleration of the template takes ours' place": (
        "spec.tolerations",
        LOST,
        [LOST[0] | {"tolerationSeconds": 300}],
        [LOST[1], LOST[0] | {"tolerationSeconds": 300}],
    ),
    "one of all effects too": (
        "spec.tolerations",
        LOST,
        [{"key": LOST[1]["key"], "operator": "Exists"}],
        [LOST[0], {"key": LOST[1]["key"], "operator": "Exists"}],
    ),
    "one of all taints stands beside ours": ("spec.tolerations", LOST, [{"operator": "Exists"}], [*LOST, {"operator": "Exists"}]),
    "one of another value": (
        "spec.tolerations",
        LOST[:1],
        [{"key": LOST[0]["key"], "value": "x"}],
        [LOST[0], {"key": LOST[0]["key"], "value": "x"}],
    ),
    "affinity is added": (
        "spec.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution",
        [{"topologyKey": "a"}],
        [{"topologyKey": "a"}, {"topologyKey": "b"}],
        [{"topologyKey": "a"}, {"topologyKey": "b"}],
    ),
    "what has no keys is left to the API server": ("spec.volumes", [{"name": "a"}], [{"nome": "a"}, 3], [{"name": "a"}, {"nome": "a"}, 3]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_list_merges_by_the_keys_of_the_pod_api(case: str) -> None:
    at, base, over, expected = CASES[case]
    *above, last = at.split(".")
    for step in reversed([*above, last]):
        if step.endswith("[]"):
            base, over, expected = ([{"name": "one", **_inside(inner)}] for inner in (base, over, expected))
            step = step[:-2]
        base, over, expected = ({step: inner} for inner in (base, over, expected))
    assert merge(base, over) == expected


def _inside(inner: Any) -> dict[str, Any]:
    assert isinstance(inner, dict)
    return inner


def test_a_reference_is_replaced_whole() -> None:
    variable = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "optional": True}}}
    other = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "t", "key": "l"}}}
    merged = merge({"spec": {"containers": [{"name": "a", "env": [variable]}]}}, {"spec": {"containers": [{"name": "a", "env": [other]}]}})
    assert merged["spec"]["containers"][0]["env"] == [other]


def test_a_shard_that_goes_beside_its_worker_tolerates_each_taint_once() -> None:
    given = {"tolerations": [LOST[0] | {"tolerationSeconds": 300}, {"key": "gpu", "operator": "Exists"}]}
    container = {"name": "worker", "image": "a", "command": ["python", "a.py"]}
    made = _shard(workers={"replicas": 2, "template": {"spec": {"containers": [container], **given}}}, ps={"placement": "colocated"})
    assert made["spec"]["tolerations"] == [*LOST, given["tolerations"][1]]


def _shard(**spec: Any) -> dict[str, Any]:
    process = CreateProcess("shard", 1, 4, 5, "job-ps-1-a4", pinned=Pinned(runtime_image="r:1", container="worker", key=2))
    return render.pod(job(**spec), process)


METADATA = {
    "labels": {"app.kubernetes.io/name": "digits", "app.kubernetes.io/part-of": "vision", "team": "a"},
    "annotations": {"psjob.dev/waited-seconds": "300", "psjob.dev/container": "x", "kubectl.kubernetes.io/default-container": "logs"},
    "finalizers": ["example.com/keep"],
}


def test_what_a_template_says_of_its_pods_reaches_them() -> None:
    metadata = _shard(ps={"template": {"metadata": METADATA}})["metadata"]
    given = {key: value for key, value in metadata["labels"].items() if "psjob.dev/" not in key}
    shared = {"app.kubernetes.io/instance": "job", "app.kubernetes.io/component": "shard", "app.kubernetes.io/managed-by": "psjob-operator"}
    assert given == shared | METADATA["labels"]
    assert metadata["labels"]["psjob.dev/job-name"] == "job" and metadata["labels"]["psjob.dev/role"] == "shard"
    assert metadata["finalizers"] == ["example.com/keep"]
    assert metadata["annotations"]["kubectl.kubernetes.io/default-container"] == "logs"


def test_how_long_a_pod_was_held_back_is_not_taken_from_a_template() -> None:
    pod = _shard(ps={"template": {"metadata": METADATA}})
    pod["metadata"] |= {"uid": "u", "resourceVersion": "1"}
    view = parse(pod)
    assert view is not None and view.process.waited == 0
    assert pod["metadata"]["annotations"]["psjob.dev/container"] == "shard"
