"""Service, config and claim; and how templates are laid over each other."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psjob_operator import render
from psjob_operator.plan.actions import CreateProcess
from psjob_operator.plan.objects import cluster_config, config_digest, config_text, job_config
from psjob_operator.render.merge import merge
from psjob_operator.render.objects import LABEL_DIGEST, LABEL_JOB
from tests.unit.plan_given import job


def labels(role: str) -> dict[str, str]:
    process = CreateProcess("shard" if role == "shard" else "worker", 0, 1, 1, "name")
    made: dict[str, str] = render.pod(job(), process)["metadata"]["labels"]
    return made


def test_the_service_finds_this_runs_shards() -> None:
    made = render.service(job())
    assert made["metadata"]["name"] == "job-ps" and made["spec"]["clusterIP"] == "None" and made["spec"]["publishNotReadyAddresses"]
    assert made["spec"]["selector"].items() <= labels("shard").items()
    assert not made["spec"]["selector"].items() <= labels("worker").items()


def test_the_config_holds_what_the_contract_lists() -> None:
    snapshot = job(checkpoint={"interval": "1m30s", "resumeFrom": {"run": "old-run"}}, training={"mode": "async", "seed": 7})
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
    assert content["shards"][1] == {"host": "job-ps-1.job-ps", "port": 7070, "statusPort": 7071}
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
        (
            {"resources": {"limits": {"storage": "50Gi"}}},
            {"resources": {"limits": {"storage": "50Gi"}, "requests": {"storage": "10Gi"}}},
        ),
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
    merged = merge(base, over)
    assert (base, over) == before
    assert merge(base, {}) == base
    assert all(merged[key] == value for key, value in over.items() if isinstance(value, int | str))
    assert not [key for key, value in over.items() if value is None and key in merged]
