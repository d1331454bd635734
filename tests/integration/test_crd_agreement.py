"""Whatever is changed in a manifest, the API server and `psjob run` say yes or no together."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from psjob_operator.api.validate import validate_job
from tests.integration.api_client import Api
from tests.unit.api_manifest import GOOD

pytestmark = pytest.mark.cluster

TEXTS = ("a.b/c", "sync", "async", "server", "é", "a b", "/psjob/x")


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A dict with some of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


numbers = st.sampled_from(
    [-1, 0, 1, 2, 3, 10, 255, 256, 257, 999, 1000, 1001, 3600, 3601, 4000, 4001, 2**31 - 1, 2**31, 10**9, 10**9 + 1, 10**15]
)
texts = st.sampled_from(["", "a", "30s", "1h", "0s", "10Gi", "Never", "worker", "shard", "psjob-a", "PSJOB_A", *TEXTS])
plain = st.one_of(numbers, texts, st.booleans(), st.none(), st.just({}), st.just([]), st.just({"a": 1}), st.just(["a"]), st.just(1.5))
containers = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from(["worker", "shard", "a", "psjob-a"])},
        optional={
            "command": st.sampled_from([[], ["python"], "python"]),
            "args": st.sampled_from([[], ["a"]]),
            "env": st.lists(st.fixed_dictionaries({"name": texts}), max_size=2),
            "restartPolicy": st.sampled_from(["Never", "Always", ""]),
            "volumeMounts": st.lists(st.fixed_dictionaries({"mountPath": texts}), max_size=1),
            "resources": st.sampled_from([{}, {"limits": {"nvidia.com/gpu": 1}}, {"limits": {"cpu": 0.5}}]),
        },
    ),
    max_size=3,
)
pods = some(
    containers=containers,
    hostNetwork=st.one_of(st.booleans(), st.just("yes")),
    dnsPolicy=st.sampled_from(["ClusterFirstWithHostNet", "ClusterFirst"]),
    restartPolicy=st.sampled_from(["Never", "Always"]),
    subdomain=st.sampled_from(["", "a"]),
    volumes=st.lists(st.fixed_dictionaries({"name": st.sampled_from(["a", "b", "psjob-a"])}), max_size=2),
)
few = st.one_of(st.lists(st.sampled_from([0, 1, 9, 64, 65, 255, 256]), max_size=3), st.just([1] * 16), st.just([1] * 17), st.just([1] * 65))
failure_rules = st.lists(
    st.fixed_dictionaries(
        {"action": st.sampled_from(["FailJob", "Restart", "Ignore", "Count"])},
        optional={
            "role": st.sampled_from(["shard", "worker", "any", "ps", None]),
            "onExitCodes": st.one_of(
                plain, st.fixed_dictionaries({"operator": st.sampled_from(["In", "NotIn", "Exists"])}, optional={"values": few})
            ),
            "per": st.sampled_from(["Incident", "Process", "Node", None]),
            "onPodConditions": st.one_of(
                plain,
                st.lists(
                    st.fixed_dictionaries(
                        {"type": st.sampled_from(["DisruptionTarget", "example.com/Bad", "Ready", "a b", ""])},
                        optional={"status": st.sampled_from(["True", "False", "yes"])},
                    ),
                    max_size=2,
                ),
            ),
            "onSignals": st.one_of(few, plain),
            "onReasons": st.one_of(st.lists(st.sampled_from(["OOMKilled", "a b", "", "a" * 63, "a" * 64]), max_size=2), plain),
        },
    ),
    max_size=21,
)
workers_of_stages = st.sampled_from([0, 1, 2, 64, 255, 256, 257, 2**31])
stages = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from(["a", "b", "c", "A", ""])},
        optional={
            "cut": st.sampled_from(["layers.6", "", "a" * 256, "a" * 257, None]),
            "replicas": st.one_of(st.just(1), workers_of_stages),
            "template": st.one_of(plain, st.fixed_dictionaries({"spec": pods})),
        },
    ),
    max_size=4,
)
plain_stages = st.sampled_from(
    [[{"name": "a"}, {"name": "b", "cut": "1"}], [{"name": name} for name in "abc"], [{"name": "a", "replicas": 4}] * 65]
)
sizes = st.sampled_from(["10Gi", 5, 0, "0", "-1Gi", "ten", "", "1e3", 1.5, True, None])
labels = st.sampled_from([{"a": "b"}, {"psjob.dev/x": "y"}, {"a": 1}, None])
access_modes = st.lists(st.sampled_from(["ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod", "ReadOnlyMany"]), max_size=3)
resources = some(requests=st.one_of(plain, some(storage=sizes)))
of_claim = some(
    accessModes=st.one_of(plain, access_modes),
    storageClassName=st.sampled_from(["fast", "", 1, None]),
    volumeMode=st.sampled_from(["Filesystem", "Block", None]),
    resources=st.one_of(plain, resources),
)
claims = some(metadata=st.one_of(plain, some(labels=labels, name=st.just("x"))), spec=st.one_of(plain, of_claim))
PATHS = {
    "spec.workers": st.sampled_from([GOOD["spec"]["workers"], {"template": GOOD["spec"]["workers"]["template"]}]),
    "spec.stages": st.one_of(plain, plain_stages, stages),
    "spec.training.pipeline": st.one_of(plain, some(microbatches=numbers)),
    "spec.runPolicy.successPolicy": st.sampled_from(["AllWorkers", "FirstWorker", None]),
    "spec.training": some(
        mode=texts,
        seed=numbers,
        updateAt=st.sampled_from(["shard", "worker", None]),
        transport=texts,
        updateRule=st.sampled_from(["dana-slim", "dana-dc", "nog", None]),
        ruleOptions=st.sampled_from([{"lam": 1.0}, {"lr": 1}, {}, {"lam": "1"}, None]),
    ),
    "spec.training.mode": st.sampled_from(["sync", "async", "bounded"]),
    "spec.training.updateAt": st.sampled_from(["shard", "worker", None]),
    "spec.shards.replicas": plain,
    "spec.shards.progressDeadlineSeconds": plain,
    "spec.shards.template": st.one_of(plain, st.fixed_dictionaries({"spec": pods})),
    "spec.workers.replicas": plain,
    "spec.workers.template": st.one_of(plain, st.fixed_dictionaries({"spec": pods})),
    "spec.checkpoint": plain,
    "spec.checkpoint.periodSeconds": plain,
    "spec.checkpoint.everySteps": plain,
    "spec.checkpoint.keep": plain,
    "spec.checkpoint.request": plain,
    "spec.checkpoint.volume": st.sampled_from(
        [{"emptyDir": {}}, {"nfs": {}}, {"persistentVolumeClaim": {"claimName": "a"}}, {"persistentVolumeClaim": {"claimName": "A"}}, None]
    ),
    "spec.checkpoint.volumeClaimTemplate": st.one_of(plain, claims),
    "spec.checkpoint.persistentVolumeClaimRetentionPolicy": st.one_of(
        plain, some(whenDeleted=st.sampled_from(["Retain", "Delete", "Never", None]))
    ),
    "spec.checkpoint.resumeFrom": st.one_of(
        plain, some(job=st.sampled_from(["a", "digits", "A", None, 1]), run=st.sampled_from(["r", "R", None]))
    ),
    "spec.checkpoint.disabled": st.booleans(),
    "spec.runPolicy": plain,
    "spec.runPolicy.backoffLimit": plain,
    "spec.runPolicy.cleanPodPolicy": st.sampled_from(["All", "None", None, "none"]),
    "spec.runPolicy.backoffLimitPerRole": some(shard=plain, worker=numbers),
    "spec.runPolicy.podFailurePolicy.rules": st.one_of(plain, failure_rules),
    "spec.suspend": plain,
    "spec.managedBy": plain,
    "spec.injection": plain,
    "spec.colour": plain,
}
changes = st.lists(st.sampled_from(sorted(PATHS)).flatmap(lambda path: st.tuples(st.just(path), PATHS[path])), min_size=1, max_size=3)


SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=60, suppress_health_check=SLOW)
@given(change=changes)
def test_both_sides_agree(job_api: Api, change: list[tuple[str, Any]]) -> None:
    agree(job_api, change)


@pytest.mark.rotating
@settings(max_examples=400, suppress_health_check=SLOW)
@given(change=changes)
def test_both_sides_agree_on_more(job_api: Api, change: list[tuple[str, Any]]) -> None:
    agree(job_api, change)


def agree(job_api: Api, change: list[tuple[str, Any]]) -> None:
    """The API server says yes where we do, and no where we do for a reason that it can see."""
    manifest = _set(GOOD, change)
    job, problems = validate_job(manifest)
    code, answer = job_api.create("default", manifest, dry=True)
    assert code in (201, 400, 422), answer
    # What is admitted nevertheless the operator refuses after the API server has said yes.
    seen = [problem for problem in problems if not problem.admitted]
    assert (code == 201) == (not seen), (answer.get("message"), [str(problem) for problem in problems])
    if code == 201 and job is not None:
        back, again = validate_job(answer)
        assert again == []
        assert back is not None
        assert back.spec == job.spec


def _set(manifest: dict[str, Any], change: list[tuple[str, Any]]) -> dict[str, Any]:
    """As `changed`, but a way that an earlier change has blocked is left."""
    import copy

    made = copy.deepcopy(manifest)
    for path, value in change:
        *way, last = path.split(".")
        part: Any = made
        for step in way:
            part = part.setdefault(step, {}) if isinstance(part, dict) else None
        if isinstance(part, dict):
            part[last] = copy.deepcopy(value)
    return made
