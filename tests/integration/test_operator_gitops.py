"""What GitOps engines do to jobs, played against the real API server: actions, self-heal, pruning, a change that needs another object,
and the examples of docs/gitops.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from hack.argocd import SETTINGS
from tests.integration import recording
from tests.integration.gitops_engines import EXAMPLES, Engines, steady
from tests.integration.operator_harness import World, manifest

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def actions(gitops_programs: None) -> Iterator[Engines]:
    made = Engines(("actions", str(SETTINGS)))
    yield made
    made.close()


@pytest.fixture(scope="module")
def engine(gitops_programs: None, place: World) -> Iterator[Engines]:
    made = Engines(("diff", str(place.cluster.kubeconfig)))
    yield made
    made.close()


def trained(place: World, name: str, node: str, **spec: Any) -> dict[str, Any]:
    """A job from kubectl apply that trains; answers its manifest."""
    made = manifest(name, **spec)
    made["metadata"]["namespace"] = place.namespace
    place.apply(made)
    place.run(f"{name}-shard-0-a1", f"{name}-worker-0-r1", f"{name}-worker-1-r1", node=node, job=name)
    return made


def modified(place: World, engine: Engines, wanted: dict[str, Any]) -> list[str]:
    """The ways of comparing that find a difference between this manifest and the live object."""
    found = steady(place, wanted["metadata"]["name"], lambda live: engine.ask({"config": wanted, "live": live}))
    return list(found["modified"])


def test_actions_do_what_they_say_and_are_no_difference(place: World, actions: Engines, engine: Engines, node: str, name: str) -> None:
    """Each is sent as Argo CD sends it: a merge patch from the live object to what the script returns."""
    made = trained(place, name, node)

    def act(action: str) -> None:
        live = place.job(name)
        changed = actions.ask(live)[action]
        assert changed is not None, live["status"]
        place.cluster.api.merge(place.path("pstrainingjobs", name), recording.patch(live, changed))
        assert modified(place, engine, made) == []

    act("checkpoint")
    request = place.job(name)["spec"]["checkpoint"]["request"]
    config = place.path("configmaps", f"{name}-config")
    place.until("the request", lambda: f'"request": {request}' in place.cluster.api.get(config)["data"]["config.json"])
    act("suspend")
    place.take_off(*place.until_going(name))
    place.until_phase("Suspended", name)
    act("resume")
    assert "suspend" not in place.job(name)["spec"]
    place.run(f"{name}-shard-0-a2", f"{name}-worker-0-r2", f"{name}-worker-1-r2", node=node, job=name)


def test_self_heal_takes_a_change_back_and_restarts_nothing(place: World, engine: Engines, node: str, name: str) -> None:
    made = trained(place, name, node, runPolicy={"backoffLimit": 3})
    before = {pod: raw["metadata"]["uid"] for pod, raw in place.pods(name).items()}
    for way in ([], ["--server-side", "--field-manager=argocd-controller", "--force-conflicts"]):
        place.edit(name, runPolicy={"backoffLimit": 9})
        assert modified(place, engine, made) != []
        place.apply(made, *way)
        assert place.job(name)["spec"]["runPolicy"]["backoffLimit"] == 3
        assert modified(place, engine, made) == []
    generation = place.job(name)["metadata"]["generation"]
    place.until("the spec to be read", lambda: place.status(name)["observedGeneration"] == generation)
    assert {pod: raw["metadata"]["uid"] for pod, raw in place.pods(name).items()} == before
    assert (place.status(name)["phase"], place.status(name)["internal"]["term"]) == ("Running", 1)


def test_what_left_git_is_pruned_and_nothing_else(place: World, node: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """kubectl prunes what is of the set and no longer in it; children are of no set, so those of the job that stays, stay."""
    monkeypatch.setenv("KUBECTL_APPLYSET", "true")
    stays, goes = manifest(f"{name}a"), manifest(f"{name}b")
    words = ("apply", "-n", place.namespace, "--prune", f"--applyset={name}", "-f", "-")
    place.cluster.run_kubectl(*words, stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": [stays, goes]}))
    for job in (f"{name}a", f"{name}b"):
        place.run(f"{job}-shard-0-a1", f"{job}-worker-0-r1", f"{job}-worker-1-r1", node=node, job=job)
    kept = {pod: raw["metadata"]["uid"] for pod, raw in place.pods(f"{name}a").items()}
    pruned = place.cluster.run_kubectl(*words, stdin=json.dumps(stays)).stdout
    assert f"{name}b pruned" in pruned and f"{name}a pruned" not in pruned
    place.until_going(f"{name}b")
    assert {pod: raw["metadata"]["uid"] for pod, raw in place.pods(f"{name}a").items()} == kept
    assert not [pod for pod, raw in place.pods(f"{name}a").items() if raw["metadata"].get("deletionTimestamp")]
    claims = {claim["metadata"]["name"] for claim in place.items("persistentvolumeclaims")}
    assert {f"{name}a-checkpoints", f"{name}b-checkpoints"} <= claims


def test_a_change_of_what_cannot_change_is_refused_and_replaced_by_force(place: World, engine: Engines, node: str, name: str) -> None:
    """Replace=true,Force=true of Argo CD is `kubectl replace --force`: the object is deleted and made again."""
    made = trained(place, name, node)
    first = place.job(name)["metadata"]["uid"]
    changed = {**made, "spec": {**made["spec"], "shards": {"replicas": 2}}}
    refused = place.apply(changed, check=False)
    assert refused.returncode != 0 and "spec.shards" in refused.stderr, refused.stderr
    assert modified(place, engine, made) == []
    place.cluster.run_kubectl("replace", "--force", "--grace-period=0", "-n", place.namespace, "-f", "-", stdin=json.dumps(changed))
    assert place.job(name)["metadata"]["uid"] != first
    place.until("the new run", lambda: place.status(name).get("run") == place.job(name)["metadata"]["uid"])
    for pod in [f"{name}-shard-0-a1", f"{name}-worker-0-r1", f"{name}-worker-1-r1"]:
        place.remove(pod)
    place.until("a second shard", lambda: any(f"{name}-shard-1-" in pod for pod in place.pods(name)))
    assert modified(place, engine, changed) == []


def test_the_kustomize_example_is_built_and_applied(place: World, engine: Engines) -> None:
    built_text = place.cluster.run_kubectl("kustomize", str(EXAMPLES / "jobs")).stdout
    (job,) = yaml.safe_load_all(built_text)
    assert "ttlSecondsAfterFinished" not in job["spec"].get("runPolicy", {})
    assert "annotations" not in job["metadata"]
    assert job["spec"]["workers"] == yaml.safe_load((EXAMPLES / "jobs" / "digits.yaml").read_text())["spec"]["workers"]
    job["metadata"]["namespace"] = place.namespace
    place.apply(job, "--validate=strict")
    place.until("the pods", lambda: len(place.pods("digits")) == 6)
    assert modified(place, engine, job) == []


def test_the_settings_of_argo_cd_are_added_to_what_is_there(place: World) -> None:
    """The command of docs/gitops.md."""
    base = "/api/v1/namespaces"
    place.cluster.api.create(base, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "argocd"}})
    try:
        before = {"metadata": {"name": "argocd-cm"}, "data": {"url": "https://argocd.example"}}
        place.cluster.api.create(f"{base}/argocd/configmaps", {"apiVersion": "v1", "kind": "ConfigMap", **before})
        place.cluster.run_kubectl("patch", "configmap", "argocd-cm", "-n", "argocd", "--type", "merge", "--patch-file", str(SETTINGS))
        stored = place.cluster.api.get(f"{base}/argocd/configmaps/argocd-cm")["data"]
        assert stored == {**before["data"], **yaml.safe_load(SETTINGS.read_text())["data"]}
    finally:
        place.cluster.api.delete(f"{base}/argocd")
