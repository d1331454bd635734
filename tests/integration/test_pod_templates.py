"""A template means in a job what it means to the API server: its pods differ from bare ones only in what docs/operations.md says.

Workers' pods are compared with a bare pod of the template, shards' pods with what server-side apply lays over psjob's own.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from hack.cluster.api import ApiError
from psjob_client.cli.manifest_commands import documents
from psjob_operator.api.validate import validate_job
from psjob_operator.render.shard import KEYED, merge_templates
from tests.integration.pod_templates import Template, templates
from tests.support.cluster_fixtures import Cluster
from tests.unit.api_manifest import MANY_NODES

pytestmark = pytest.mark.cluster
COUNT = 120
BASE = {"name": "worker", "image": "me/digits:1", "command": ["python", "train.py"]}
OVERHEAD = {
    "apiVersion": "node.k8s.io/v1",
    "kind": "RuntimeClass",
    "metadata": {"name": "sandbox"},
    "handler": "runsc",
    "overhead": {"podFixed": {"cpu": "250m", "memory": "120Mi"}},
}
LOST = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
POWERLESS = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
TOKEN = "kube-api-access"


@pytest.fixture(scope="module")
def place(control_plane: Cluster) -> Iterator[str]:
    name = control_plane.create_namespace("templates")
    control_plane.api.create("/apis/node.k8s.io/v1/runtimeclasses", OVERHEAD)
    yield name
    control_plane.api.delete("/apis/node.k8s.io/v1/runtimeclasses/sandbox")
    control_plane.api.delete(f"/api/v1/namespaces/{name}")


def test_a_worker_is_its_template_and_what_psjob_adds(control_plane: Cluster, place: str) -> None:
    differ = {}
    for name, part in templates("worker", COUNT).items():
        template = merge_templates({"spec": {"containers": [BASE]}}, part)
        made = _made(control_plane, _pods(place, template, {})[1])
        bare = _made(control_plane, _bare(place, template, made))
        differ[name] = _difference(_without_ours(made, "worker"), bare)
    assert len(differ) == COUNT
    assert not {name: told for name, told in differ.items() if told}


def test_a_shard_is_what_server_side_apply_lays_over_psjobs_own(control_plane: Cluster, place: str) -> None:
    differ = {}
    plain = {"spec": {"containers": [BASE]}}
    placements = ({"placement": "Spread"}, {"placement": "Packed"})
    own = [_pods(place, plain, ps)[0] for ps in placements]
    for number, pod in enumerate(own):
        _apply(control_plane, place, f"base-{number}", "base", pod)
    for number, (name, over) in enumerate(templates("shard", COUNT).items()):
        which = number % len(placements)
        made = _made(control_plane, _pods(place, plain, {**placements[which], "template": over})[0])
        merged = _apply(control_plane, place, f"base-{which}", "over", over, "&dryRun=All")
        expected = _made(control_plane, _documented(merged, own[which], over, made))
        differ[name] = _difference(_without_ours(made, "shard"), _without_ours(expected, "shard"))
    assert len(differ) == COUNT
    assert not {name: told for name, told in differ.items() if told}


def test_what_the_api_server_takes_of_no_new_pod_is_refused_by_name() -> None:
    debug = {"spec": {"containers": [BASE], "ephemeralContainers": [{"name": "debug", "image": "busybox"}]}}
    _, problems = validate_job(_job("ns", debug, {}))
    assert [problem.field for problem in problems] == ["spec.workers.template.spec.ephemeralContainers"]


def _job(namespace: str, template: Template, ps: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "psjob.dev/v1alpha1",
        "kind": "PSTrainingJob",
        "metadata": {"name": "job", "namespace": namespace},
        "spec": {
            "shards": {"replicas": 2, **ps},
            "workers": {"replicas": 1, "template": template},
            "checkpoint": MANY_NODES,
        },
    }


def _pods(namespace: str, template: Template, ps: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pods of shard 0 and of the worker."""
    job, problems = validate_job(_job(namespace, template, ps))
    assert job is not None, [str(problem) for problem in problems]
    pods = [document for document in documents(job, "psjob-runtime:test") if document["kind"] == "Pod"]
    return pods[0], pods[-1]


def _made(cluster: Cluster, pod: dict[str, Any]) -> dict[str, Any]:
    """The pod as the API server would store it."""
    path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods?dryRun=All&fieldValidation=Strict"
    try:
        made = cluster.api.call("POST", path, pod)
    except ApiError as error:
        raise AssertionError(f"{json.dumps(pod['spec'])[:2000]}: {error}") from error
    return _nameless(dict(made))


def _nameless(made: dict[str, Any]) -> dict[str, Any]:
    """The token's volume under a name that is not drawn."""
    drawn = [volume["name"] for volume in made["spec"].get("volumes", []) if volume["name"].startswith(TOKEN)]
    found: dict[str, Any] = json.loads(json.dumps(made).replace(drawn[0], TOKEN)) if drawn else made
    return found


def _bare(namespace: str, template: Template, made: Mapping[str, Any]) -> dict[str, Any]:
    """A pod of the template, with the defaults that are psjob's."""
    pod = copy.deepcopy(template)
    pod["metadata"] = {**pod.get("metadata", {}), "name": "bare", "namespace": namespace}
    shared = {key: value for key, value in made["metadata"]["labels"].items() if key.startswith("app.kubernetes.io/")}
    pod["metadata"]["labels"] = shared | pod["metadata"].get("labels", {})
    defaults = {"restartPolicy": "Never", "automountServiceAccountToken": False, "enableServiceLinks": False}
    pod["spec"] = defaults | pod["spec"]
    pod["spec"]["containers"][0].setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    return pod


def _without_ours(pod: Mapping[str, Any], trained: str) -> dict[str, Any]:
    """The pod without what psjob adds to each."""
    made = copy.deepcopy(dict(pod))
    spec, metadata = made["spec"], made["metadata"]
    for word in ("hostname", "subdomain"):
        assert spec.pop(word)
    for word in ("volumes", "initContainers"):
        spec[word] = [item for item in spec.get(word, []) if not item["name"].startswith("psjob-")]
    container = next(item for item in spec["containers"] if item["name"] == trained)
    container["env"] = [item for item in container["env"] if not item["name"].startswith("PSJOB_")]
    container["volumeMounts"] = [item for item in container["volumeMounts"] if not item["name"].startswith("psjob-")]
    assert container["command"][:4:3] == ["/psjob/bin/sh", "psjob"]
    container["command"] = container["command"][4:]
    for word in ("labels", "annotations"):
        metadata[word] = {key: value for key, value in metadata[word].items() if not key.startswith("psjob.dev/")}
    metadata["annotations"].pop("kubectl.kubernetes.io/default-container")
    return made


def _apply(cluster: Cluster, namespace: str, name: str, manager: str, template: Mapping[str, Any], more: str = "") -> dict[str, Any]:
    """Server-side apply of a PodTemplate, which is the API's own pod template and can be laid over."""
    metadata = {key: value for key, value in template.get("metadata", {}).items() if key in ("labels", "annotations", "finalizers")}
    body = {
        "apiVersion": "v1",
        "kind": "PodTemplate",
        "metadata": {"name": name},
        "template": {"metadata": metadata, "spec": template.get("spec", {})},
    }
    path = f"/api/v1/namespaces/{namespace}/podtemplates/{name}?fieldManager={manager}&force=true&fieldValidation=Strict{more}"
    answer = cluster.api.call("PATCH", path, body, "application/apply-patch+yaml")
    return dict(answer["template"])


def _documented(
    merged: dict[str, Any], own: Mapping[str, Any], over: Mapping[str, Any], made: Mapping[str, Any]
) -> dict[str, Any]:  # fmt: skip
    """The pod that server-side apply makes, with the differences that docs/operations.md names: tolerations, affinity, no powers."""
    spec, given = merged["spec"], over.get("spec", {})
    named = {toleration.get("key") for toleration in given.get("tolerations", [])}
    kept = [toleration for toleration in own["spec"]["tolerations"] if toleration["key"] in LOST and toleration["key"] not in named]
    spec["tolerations"] = [*kept, *given.get("tolerations", [])]
    for kind in ("podAffinity", "podAntiAffinity"):
        for when in ("required", "preferred"):
            terms = [
                (it.get("affinity") or {}).get(kind, {}).get(f"{when}DuringSchedulingIgnoredDuringExecution", [])
                for it in (own["spec"], given)
            ]
            if any(terms):
                spec["affinity"][kind][f"{when}DuringSchedulingIgnoredDuringExecution"] = [*terms[0], *terms[1]]
    for container in (*spec.get("initContainers", []), *spec["containers"]):
        container["securityContext"] = {**container.get("securityContext", {}), **POWERLESS}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**merged["metadata"], "name": "merged", "namespace": made["metadata"]["namespace"]},
        "spec": spec,
    }


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """If two pods differ, apart from what each object has of its own; lists with keys are compared by them."""
    left, right = _plain(one), _plain(other)
    return [f"{at}: {left.get(at)!r} is not {right.get(at)!r}" for at in sorted({*left, *right}) if left.get(at) != right.get(at)]


def _plain(pod: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {word: pod["metadata"].get(word) or None for word in ("labels", "annotations", "finalizers")}
    return dict(_leaves({"metadata": metadata, "spec": pod["spec"]}, "", ""))


def _leaves(value: Any, at: str, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{at}.{key}".removeprefix("."), f"{path}.{key}".removeprefix("."))
    elif isinstance(value, list) and value:
        keys = KEYED.get(path, ())
        names = ["/".join(str(item[key]) for key in keys) if keys else "" for item in value]
        for number, item in enumerate(value):
            # The second of one name is another item than the first.
            yield from _leaves(item, f"{at}[{names[number]}#{names[:number].count(names[number])}]", f"{path}[]")
    elif value not in (None, [], {}):
        yield at, value
