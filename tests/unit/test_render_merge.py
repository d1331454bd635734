"""Templates are laid over one another by the Pod API's own keys, and what a template's metadata says reaches its pods or is refused.

- Service, config and claim; and how templates are laid over each other.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psjob_operator import render
from psjob_operator.api.status import Pinned
from psjob_operator.cluster.pods import parse_pod
from psjob_operator.plan.actions import CreateProcess
from psjob_operator.plan.objects import cluster_config, config_digest, config_text, job_config
from psjob_operator.render.objects import LABEL_DIGEST, LABEL_JOB
from psjob_operator.render.shard import merge_templates
from tests.unit.plan_given import job

DATA = [{"name": "data", "containerPort": 7070}, {"name": "status", "containerPort": 7071}]
LOST = [
    {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
    for taint in ("not-ready", "unreachable")
]
ANYWAY = {"topologyKey": "kubernetes.io/hostname", "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}
NEVER = {"topologyKey": "kubernetes.io/hostname", "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule"}
CASES: dict[str, tuple[str, list[Any], list[Any], list[Any]]] = {
    "another protocol is another port": ("spec.containers[].ports", DATA, [{"name": "gossip", "containerPort": 7070, "protocol": "UDP"}],
        [*DATA, {"name": "gossip", "containerPort": 7070, "protocol": "UDP"}]),
    "no protocol is TCP": ("spec.containers[].ports", DATA[:1], [{"containerPort": 7070, "protocol": "TCP", "hostPort": 9}],
        [{"name": "data", "containerPort": 7070, "protocol": "TCP", "hostPort": 9}]),
    "a sidecar's ports too": ("spec.initContainers[].ports", [{"containerPort": 53}], [{"containerPort": 53, "protocol": "UDP"}],
        [{"containerPort": 53}, {"containerPort": 53, "protocol": "UDP"}]),
    "a constraint that holds stays beside one that prefers": ("spec.topologySpreadConstraints", [ANYWAY], [NEVER], [ANYWAY, NEVER]),
    "the same constraint is changed": ("spec.topologySpreadConstraints", [ANYWAY], [ANYWAY | {"maxSkew": 3}], [ANYWAY | {"maxSkew": 3}]),
    "two constraints of a template that differ": ("spec.topologySpreadConstraints", [], [ANYWAY, NEVER], [ANYWAY, NEVER]),
    "two variables of one name both stay": ("spec.containers[].env", [{"name": "A", "value": "0"}],
        [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}], [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]),
    "a list without keys is replaced": ("spec.containers[].envFrom", [{"prefix": "A"}], [{"prefix": "B"}], [{"prefix": "B"}]),
    "names that something else calls its own": ("spec.volumes[].projected.sources", [{"name": "a"}], [{"name": "b"}], [{"name": "b"}]),
    "finalizers are a set": ("metadata.finalizers", ["a/b"], ["c/d", "a/b"], ["a/b", "c/d"]),
    "a toleration of the template takes ours' place": ("spec.tolerations", LOST, [LOST[0] | {"tolerationSeconds": 300}],
        [LOST[1], LOST[0] | {"tolerationSeconds": 300}]),
    "one of all effects too": ("spec.tolerations", LOST, [{"key": LOST[1]["key"], "operator": "Exists"}],
        [LOST[0], {"key": LOST[1]["key"], "operator": "Exists"}]),
    "one of all taints stands beside ours": ("spec.tolerations", LOST, [{"operator": "Exists"}], [*LOST, {"operator": "Exists"}]),
    "one of another value": ("spec.tolerations", LOST[:1], [{"key": LOST[0]["key"], "value": "x"}],
        [LOST[0], {"key": LOST[0]["key"], "value": "x"}]),
    "affinity is added": ("spec.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution", [{"topologyKey": "a"}],
        [{"topologyKey": "a"}, {"topologyKey": "b"}], [{"topologyKey": "a"}, {"topologyKey": "b"}]),
    "what has no keys is left to the API server": ("spec.volumes", [{"name": "a"}], [{"nome": "a"}, 3], [{"name": "a"}, {"nome": "a"}, 3]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_list_merges_by_the_keys_of_the_pod_api(case: str) -> None:
    at, base, over, expected = CASES[case]
    *above, last = at.split(".")
    for step in reversed([*above, last]):
        if step.endswith("[]"):
            base, over, expected = ([{"name": "one", **_inside(inner)}] for inner in (base, over, expected))
            step = step[:-2]
        base, over, expected = ({step: inner} for inner in (base, over, expected))
    assert merge_templates(base, over) == expected


def _inside(inner: Any) -> dict[str, Any]:
    assert isinstance(inner, dict)
    return inner


def test_a_reference_is_replaced_whole() -> None:
    variable = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "optional": True}}}
    other = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "t", "key": "l"}}}
    merged = merge_templates(
        {"spec": {"containers": [{"name": "a", "env": [variable]}]}}, {"spec": {"containers": [{"name": "a", "env": [other]}]}}
    )
    assert merged["spec"]["containers"][0]["env"] == [other]


def test_a_shard_that_goes_beside_its_worker_tolerates_each_taint_once() -> None:
    given = {"tolerations": [LOST[0] | {"tolerationSeconds": 300}, {"key": "gpu", "operator": "Exists"}]}
    container = {"name": "worker", "image": "a", "command": ["python", "a.py"]}
    made = _shard(workers={"replicas": 2, "template": {"spec": {"containers": [container], **given}}}, shards={"placement": "Colocated"})
    assert made["spec"]["tolerations"] == [*LOST, given["tolerations"][1]]


def _shard(**spec: Any) -> dict[str, Any]:
    process = CreateProcess("shard", 1, 4, 5, "job-shard-1-a4", pinned=Pinned(runtime_image="r:1", container="worker", key=2))
    return render.pod(job(**spec), process)


METADATA = {
    "labels": {"app.kubernetes.io/name": "digits", "app.kubernetes.io/part-of": "vision", "team": "a"},
    "annotations": {"psjob.dev/waited-seconds": "300", "psjob.dev/container": "x", "kubectl.kubernetes.io/default-container": "logs"},
    "finalizers": ["example.com/keep"],
}


def test_what_a_template_says_of_its_pods_reaches_them() -> None:
    metadata = _shard(shards={"template": {"metadata": METADATA}})["metadata"]
    given = {key: value for key, value in metadata["labels"].items() if "psjob.dev/" not in key}
    shared = {"app.kubernetes.io/instance": "job", "app.kubernetes.io/component": "shard", "app.kubernetes.io/managed-by": "psjob-operator"}
    assert given == shared | METADATA["labels"]
    assert metadata["labels"]["psjob.dev/job-name"] == "job" and metadata["labels"]["psjob.dev/role"] == "shard"
    assert metadata["finalizers"] == ["example.com/keep"]
    assert metadata["annotations"]["kubectl.kubernetes.io/default-container"] == "logs"


def test_how_long_a_pod_was_held_back_is_not_taken_from_a_template() -> None:
    pod = _shard(shards={"template": {"metadata": METADATA}})
    pod["metadata"] |= {"uid": "u", "resourceVersion": "1"}
    view = parse_pod(pod)
    assert view is not None and view.process.waited == 0
    assert pod["metadata"]["annotations"]["psjob.dev/container"] == "shard"


def labels(role: str) -> dict[str, str]:
    process = CreateProcess("shard" if role == "shard" else "worker", 0, 1, 1, "name")
    made: dict[str, str] = render.pod(job(), process)["metadata"]["labels"]
    return made


def test_the_service_finds_this_runs_shards() -> None:
    made = render.service(job())
    assert made["metadata"]["name"] == "job-shards" and made["spec"]["clusterIP"] == "None" and made["spec"]["publishNotReadyAddresses"]
    assert made["spec"]["selector"].items() <= labels("shard").items()
    assert not made["spec"]["selector"].items() <= labels("worker").items()


def test_the_config_holds_what_the_contract_lists() -> None:
    snapshot = job(checkpoint={"periodSeconds": 90, "resumeFrom": {"run": "old-run"}}, training={"mode": "async", "seed": 7})
    made = render.config(snapshot, resumed_from="old-run")
    content = json.loads(made["data"]["config.json"])
    assert set(content) == {
        "format",
        "job",
        "run",
        "specHash",
        "mode",
        "seed",
        "updateAt",
        "updateRule",
        "ruleOptions",
        "backupWorkers",
        "staleness",
        "splits",
        "local",
        "reduction",
        "lrScaling",
        "warmupSteps",
        "maxGradNorm",
        "nonFinite",
        "maxPushNorm",
        "transport",
        "streams",
        "autoStreams",
        "gradientBytes",
        "stepTimeoutSeconds",
        "compression",
        "workers",
        "shards",
        "checkpoint",
        "successPolicy",
        "shardTimeoutSeconds",
        "connectSeconds",
        "encryption",
    }
    assert content["shards"][1] == {"host": "job-shard-1.job-shards", "port": 7070, "statusPort": 7071}
    assert content["checkpoint"] == {
        "intervalSeconds": 90.0,
        "everySteps": None,
        "request": None,
        "keep": 3,
        "disabled": False,
        "resumeFrom": {"path": "/psjob-checkpoints/old-run"},
    }
    assert (content["mode"], content["seed"], content["updateAt"], content["workers"]) == ("async", 7, None, 3)
    assert len(content["specHash"]) == 64
    assert made["metadata"]["labels"][LABEL_DIGEST] == config_digest(content) and len(made["metadata"]["labels"][LABEL_DIGEST]) <= 63
    assert config_text(content) == made["data"]["config.json"]


def test_the_local_config_differs_in_addresses_alone() -> None:
    local = job_config(job(), [("127.0.0.1", 4000, 4001), ("127.0.0.1", 4002, 4003)], checkpoints="/w/.psjob")
    assert local["shards"][1] == {"host": "127.0.0.1", "port": 4002, "statusPort": 4003}
    assert {key: value for key, value in local.items() if key != "shards"} == {
        key: value for key, value in cluster_config(job()).items() if key != "shards"
    }


def test_the_claim_outlives_the_job_unless_told() -> None:
    kept = render.claim(job())
    assert "ownerReferences" not in kept["metadata"] and kept["metadata"]["labels"][LABEL_JOB] == "job"
    assert kept["spec"] == {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "10Gi"}}}
    for policy, owned in ({}, False), ({"whenDeleted": "Retain"}, False), ({"whenDeleted": "Delete"}, True):
        made = render.claim(job(checkpoint={"persistentVolumeClaimRetentionPolicy": policy}))
        assert ("ownerReferences" in made["metadata"]) == owned


@pytest.mark.parametrize(
    ("spec", "made"),
    [
        ({}, {}),
        ({"accessModes": None, "resources": None, "storageClassName": None}, {}),
        ({"storageClassName": ""}, {"storageClassName": ""}),
        ({"accessModes": ["ReadWriteMany"]}, {"accessModes": ["ReadWriteMany"]}),
        ({"resources": {"requests": {"storage": "5Gi"}}}, {"resources": {"requests": {"storage": "5Gi"}}}),
        ({"resources": {"limits": {"storage": "50Gi"}}}, {"resources": {"limits": {"storage": "50Gi"}, "requests": {"storage": "10Gi"}}}),
        ({"selector": {"matchLabels": {"a": "b"}}, "volumeName": "v"}, {"selector": {"matchLabels": {"a": "b"}}, "volumeName": "v"}),
    ],
)
def test_what_a_claims_template_leaves_out_is_filled_in(spec: dict[str, Any], made: dict[str, Any]) -> None:
    default = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "10Gi"}}}
    assert render.claim(job(checkpoint={"volumeClaimTemplate": {"spec": spec}}))["spec"] == {**default, **made}


def test_a_claim_has_the_labels_and_annotations_of_its_template_and_psjobs_own() -> None:
    given = {"labels": {"team": "a", "app.kubernetes.io/name": "mine"}, "annotations": {"example.com/backup": "daily"}}
    made = render.claim(job(checkpoint={"volumeClaimTemplate": {"metadata": given}}))["metadata"]
    own = render.claim(job())["metadata"]
    assert made["labels"] == {**own["labels"], **given["labels"]} and made["labels"][LABEL_JOB] == "job"
    assert made["annotations"] == given["annotations"] and "annotations" not in own


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "name", "env", "tolerations"]), inner, max_size=4)
    ),
    max_leaves=6,
)


@settings(max_examples=40)
@given(
    st.dictionaries(st.sampled_from(["a", "env", "spec"]), json_values), st.dictionaries(st.sampled_from(["a", "env", "spec"]), json_values)
)
def test_merging_never_fails_and_changes_nothing_in_place(base: dict[str, Any], over: dict[str, Any]) -> None:
    before = copy.deepcopy((base, over))
    merged = merge_templates(base, over)
    assert (base, over) == before
    assert merge_templates(base, {}) == base
    assert all(merged[key] == value for key, value in over.items() if isinstance(value, int | str))
    assert not [key for key, value in over.items() if value is None and key in merged]
