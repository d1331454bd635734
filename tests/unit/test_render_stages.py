"""Pods of a model in stages: each worker is made of its stage's template, and says which stage it has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from psjob_client.cli.manifest_commands import documents
from psjob_client.doctor.fitting import pod_groups
from psjob_operator import contract, render
from psjob_operator.api.status import Pinned
from psjob_operator.api.validate import validate_job
from psjob_operator.plan.actions import CreateProcess, EnsureKey
from psjob_operator.plan.observed_state import ObservedState
from psjob_operator.plan.plan import plan
from psjob_operator.render.pod import Pods
from tests.unit.api_manifest import GOOD, REMOVED, changed
from tests.unit.plan_given import NOW, job

OWN: dict[str, Any] = {
    "metadata": {"labels": {"team": "b"}},
    "spec": {
        "nodeSelector": {"gpu": "a100"},
        "containers": [{"name": "logs"}, {"name": "worker", "image": "me/stage:1", "command": ["python", "stage.py"]}],
    },
}
STAGES: list[dict[str, Any]] = [
    {"name": "embed", "replicas": 2},
    {"name": "middle", "cut": "layers.0", "template": OWN},
    {"name": "head", "cut": "layers.6"},
]
PINNED = Pinned(runtime_image="psjob-runtime:1", container="main", key=1)


def staged(**overrides: Any) -> ObservedState:
    first = {"spec": {"containers": [{"name": "main", "image": "me/digits:1", "command": ["python", "train.py"]}]}}
    return job(workers={"replicas": None, "template": first}, stages=STAGES, **overrides)


def worker(rank: int) -> CreateProcess:
    return CreateProcess("worker", rank, 1, 1, f"job-worker-{rank}-r1", pinned=PINNED)


def test_the_workers_are_counted_through_the_stages() -> None:
    spec = staged().spec
    assert spec.workers.replicas == 4
    names = [stage.name if (stage := spec.stage_of(rank)) else None for rank in (-1, 0, 1, 2, 3, 4)]
    assert names == [None, "embed", "embed", "middle", "head", None]
    assert list(spec.worker_templates()) == ["spec.workers.template", "spec.stages[1].template"]
    assert job().spec.stage_of(0) is None and list(job().spec.worker_templates()) == ["spec.workers.template"]


def test_a_worker_is_made_of_its_stages_template() -> None:
    pods = Pods(staged())
    made = [pods.pod(worker(rank)) for rank in range(4)]
    assert [pod["metadata"]["labels"]["psjob.dev/stage"] for pod in made] == ["embed", "embed", "middle", "head"]
    assert [pod["metadata"]["annotations"]["psjob.dev/container"] for pod in made] == ["main", "main", "worker", "main"]
    assert [pod["spec"].get("nodeSelector") for pod in made] == [None, None, {"gpu": "a100"}, None]
    assert [pod["metadata"]["labels"].get("team") for pod in made] == [None, None, "b", None]
    commands = [next(one["command"][-1] for one in pod["spec"]["containers"] if one.get("command")) for pod in made]
    assert commands == ["train.py", "train.py", "stage.py", "train.py"]
    assert made[3] == render.pod(staged(), worker(3)), "in whatever order they are made"


def test_others_have_no_stage() -> None:
    shard = render.pod(staged(), CreateProcess("shard", 0, 1, 1, "job-shard-0-a1", volume_group=0, pinned=PINNED))
    assert shard["spec"]["containers"][0]["image"] == "me/digits:1" and "psjob.dev/stage" not in shard["metadata"]["labels"]
    alone = render.pod(job(), CreateProcess("worker", 0, 1, 1, "job-worker-0-r1", pinned=PINNED))
    assert "psjob.dev/stage" not in alone["metadata"]["labels"]


@pytest.mark.parametrize("on_nodes", [False, True])
def test_the_shards_take_streams_of_nodes_where_any_stage_is_on_their_network(on_nodes: bool) -> None:
    own = {"spec": {**OWN["spec"], "hostNetwork": on_nodes, "dnsPolicy": "ClusterFirstWithHostNet"}}
    snapshot = job(workers={"replicas": None}, stages=[{"name": name, "template": own} for name in "ab"])
    first, _ = render.policy(snapshot, "shard", [])["spec"]["ingress"]
    assert ("from" not in first) == on_nodes


def test_keys_come_with_a_certificate_for_each_worker() -> None:
    def certified(manifest: dict[str, Any]) -> set[str]:
        made, problems = validate_job(manifest)
        assert made is not None, problems
        (found,) = (one for one in documents(made) if one["kind"] == "Secret")
        return {name for name in found["data"] if name.endswith(".pem")}

    shards = {contract.AUTHORITY, "shard-0.pem", "shard-1.pem"}
    change = {"spec.workers.replicas": REMOVED, "spec.stages": STAGES}
    assert certified(GOOD) == shards
    assert certified(changed(GOOD, change)) == shards | {f"worker-{rank}.pem" for rank in range(4)}
    assert certified(changed(GOOD, {**change, "spec.training.encryption": "none"})) == set()


def test_the_plan_starts_all_of_them() -> None:
    actions = plan(replace(staged(), live=True), NOW).actions
    made = [action for action in actions if isinstance(action, CreateProcess) and action.role == "worker"]
    assert [action.index for action in made] == [0, 1, 2, 3] and any(isinstance(action, EnsureKey) for action in actions)


def test_the_pods_of_each_stage_are_fitted_by_themselves() -> None:
    made, problems = validate_job(changed(GOOD, {"spec.workers.replicas": REMOVED, "spec.stages": STAGES}))
    assert made is not None, problems
    found = [(one.words, one.count) for one in pod_groups(made, documents(made))]
    assert found == [
        ("shard pods", 2),
        ("worker pods of stage embed", 2),
        ("worker pods of stage middle", 1),
        ("worker pods of stage head", 1),
    ]
