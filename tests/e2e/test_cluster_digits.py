"""The digits example on a real node: real kubelet, containerd and torch, the operator installed by Helm under the restricted level."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_fixtures import OPERATOR_IMAGE, RUNTIME_IMAGE, Cluster
from tests.e2e import digits
from tests.e2e.digits import accuracy, claim_folder, pod_of, pods_of
from tests.e2e.kube import CHART, Kube, condition, kill, phase, restricted_namespace, shard_status, wait_for

pytestmark = [pytest.mark.cluster]
HOME = "psjob-system"
FAULTS = ("shard", "worker", "operator")
RECOVERY_SECONDS = 20.0
"""From SIGKILL of a shard to the first push applied in its new epoch."""


@pytest.fixture(scope="module")
def home(node_cluster: Cluster) -> Iterator[Kube]:
    """The operator, installed by Helm; its namespace."""
    kube = Kube(str(node_cluster.kubeconfig), HOME)
    restricted_namespace(kube)
    settings = [*image("image", OPERATOR_IMAGE), *image("runtimeImage", RUNTIME_IMAGE)]
    kube.helm("upgrade", "--install", "psjob", str(CHART), "--take-ownership", "--force-conflicts", *settings)
    kube.kubectl("rollout", "status", "deployment/psjob", "--timeout=120s", timeout=150)
    yield kube
    kube.helm("uninstall", "psjob", "--ignore-not-found")


@pytest.fixture
def kube(home: Kube, node_cluster: Cluster) -> Iterator[Kube]:
    """A restricted namespace of the test's own, with the operator running."""
    name = node_cluster.create_namespace("digits", {"pod-security.kubernetes.io/enforce": "restricted"}, isolated=False)
    yield Kube(home.kubeconfig, name)
    home.kubectl("delete", "namespace", name, "--wait=true", "--timeout=60s")


def image(value: str, reference: str) -> list[str]:
    repository, _, tag = reference.rpartition(":")
    return ["--set-string", f"{value}.repository={repository}", "--set-string", f"{value}.tag={tag}"]


# -- looking at a job -----------------------------------------------------------------------------------------------------------


def coordinator(kube: Kube, job: str) -> dict[str, Any] | None:
    """What shard 0 says about the whole job, or None where it is out of reach."""
    shards = pods_of(kube, job, "shard", 0)
    said = shard_status(shards[0]) if shards else None
    return (said or {}).get("coordinator")


def beyond_checkpoint(kube: Kube, job: str) -> dict[str, Any] | None:
    """The coordinator's words once a checkpoint with step > 0 is committed and a step behind it is done."""
    said = coordinator(kube, job)
    if not said or not said["checkpoint"] or not 0 < said["checkpoint"]["step"] < said["step"]:
        return None
    return said


def ready_to_kill(kube: Kube, job: str) -> int:
    """Wait for that moment; the step. Fails where the job is over before."""
    story = lambda: kube.story(job)  # noqa: E731
    said = wait_for(f"{job} to train beyond a checkpoint", lambda: beyond_checkpoint(kube, job), 120, story=story)
    assert said["totalSteps"] is None or said["step"] < said["totalSteps"], f"{job} was over before the fault: {said}"
    return int(said["step"])


def complete(kube: Kube, job: str, seconds: float = 300) -> dict[str, Any]:
    """Wait until the job is over; its status. Fails unless it is Complete."""
    ended = wait_for(f"{job} to end", phase(kube, job, "Complete", "Failed"), seconds, every=1, story=lambda: kube.story(job))
    assert ended == "Complete", kube.story(job)
    return kube.status(job)


def final_weights(kube: Kube, job: str) -> Path:
    """The one final.safetensors under the job's claim, in the folder of its run."""
    return claim_folder(kube, f"{job}-checkpoints") / str(kube.status(job)["run"]) / "final.safetensors"


# -- faults: each strikes and waits until it has been dealt with ------------------------------------------------------------------


def kill_shard(kube: Kube, home: Kube, job: str) -> None:
    held = ready_to_kill(kube, job)
    at = kill(pod_of(kube, job, "shard", 1), "psjob.shard")

    def applied() -> float | None:
        newest = pod_of(kube, job, "shard", 1)
        said = shard_status(newest)
        if not said or said["epoch"] < 2:
            return None
        moment = said["counters"]["firstApplied"]
        return float(moment) if moment else None

    first = wait_for("a push applied in the new epoch", applied, 120, story=lambda: kube.story(job))

    def passed() -> float | None:
        said = coordinator(kube, job)
        return next((float(moment) for step, moment in said["passed"] if step > held and moment > first), None) if said else None

    again = wait_for(f"step {held} to be passed again", passed, 120, story=lambda: kube.story(job))
    print(f"\nshard killed at step {held}: first push applied after {first - at:.1f} s, step passed again after {again - at:.1f} s")
    assert first - at <= RECOVERY_SECONDS


def kill_worker(kube: Kube, home: Kube, job: str) -> None:
    ready_to_kill(kube, job)
    victim = pod_of(kube, job, "worker", 1)
    kill(victim, "train.py")

    def returned() -> bool:
        newest = pod_of(kube, job, "worker", 1)
        return newest["metadata"]["uid"] != victim["metadata"]["uid"] and newest["status"].get("phase") in ("Running", "Succeeded")

    wait_for("the worker to be started again", returned, 60, story=lambda: kube.story(job))


def kill_operator(kube: Kube, home: Kube, job: str) -> None:
    ready_to_kill(kube, job)
    (pod,) = home.list("pods", "app.kubernetes.io/component=operator")
    before = pod["status"]["containerStatuses"][0]["restartCount"]
    kill(pod, "psjob_operator")

    def back() -> bool:
        (status,) = home.list("pods", "app.kubernetes.io/component=operator")[0]["status"]["containerStatuses"]
        return bool(status["ready"]) and status["restartCount"] > before

    wait_for("the operator to be back", back, 120)


STRIKE = {"shard": kill_shard, "worker": kill_worker, "operator": kill_operator}


def run_with(kube: Kube, home: Kube, faults: tuple[str, ...], file: str = "job.yaml") -> dict[str, Any]:
    """The example with these faults in turn; its last status, looked at."""
    name = "digits"
    epochs = digits.LONG_EPOCHS if faults else digits.SHORT_EPOCHS
    kube.apply(digits.job(name, file=file, args=[f"--epochs={epochs}"], checkpoint={"interval": "3s", "everySteps": 50}))
    for fault in faults:
        STRIKE[fault](kube, home, name)
    status = complete(kube, name)
    reached = accuracy(final_weights(kube, name))
    print(f"\ntest accuracy {reached:.3f} after {', '.join(faults) or 'no'} faults; restarts {status.get('restarts')}")
    assert reached >= 0.95
    assert [shard["epoch"] for shard in status["shards"]] == [1, 2 if "shard" in faults else 1]
    assert status["workers"]["succeededIndexes"] == "0-1"
    assert status["restarts"]["total"] == len(set(faults) - {"operator"})
    assert (condition(status, "Complete") or {})["status"] == "True"
    assert (condition(status, "Ready") or {})["status"] == "True"
    assert condition(status, "Stalled") is None and condition(status, "Reconciling") is None
    return status


# -- the tests, in the order they run -------------------------------------------------------------------------------------------------


@pytest.mark.e2e
def test_the_example_trains_and_leaves_what_it_should(kube: Kube, home: Kube) -> None:
    run_with(kube, home, ())
    left = pods_of(kube, "digits")
    assert {pod["status"]["phase"] for pod in left} == {"Succeeded"}, "cleanPodPolicy Running leaves ended pods"
    job = kube.get("psj", "digits")
    assert job is not None
    assert job["metadata"]["generation"] == 1 and "finalizers" not in job["metadata"]
    assert set(job["metadata"]["annotations"]) == {"kubectl.kubernetes.io/last-applied-configuration"}
    kube.kubectl("delete", "psj", "digits", "--wait=true")
    wait_for("the job's children to go", lambda: not kube.names("pods,services,configmaps", f"{digits.LABEL_JOB}=digits"), 60)
    assert kube.get("pvc", "digits-checkpoints") is not None, "retain: true keeps the claim"


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_it_lives_through_every_kill_in_turn(kube: Kube, home: Kube) -> None:
    run_with(kube, home, FAULTS)


@pytest.mark.e2e_long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", FAULTS)
def test_it_lives_through_one_kill(kube: Kube, home: Kube, fault: str) -> None:
    run_with(kube, home, (fault,))


@pytest.mark.e2e_long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("faults", [(), ("shard",)], ids=["undisturbed", "shard"])
def test_the_async_example(kube: Kube, home: Kube, faults: tuple[str, ...]) -> None:
    run_with(kube, home, faults, file="async.yaml")


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_suspend_takes_a_checkpoint_and_resume_goes_on_from_it(kube: Kube) -> None:
    name = "digits"
    kube.apply(digits.job(name, args=[f"--epochs={digits.LONG_EPOCHS}"], checkpoint={"interval": "3s", "everySteps": 50}))
    step = ready_to_kill(kube, name)
    kube.kubectl("patch", "psj", name, "--type=merge", "-p", '{"spec":{"suspend":true}}')
    wait_for("the job to be suspended", phase(kube, name, "Suspended"), 120, story=lambda: kube.story(name))
    assert not pods_of(kube, name)
    status = kube.status(name)
    assert (condition(status, "Suspended") or {})["status"] == "True"
    kube.kubectl("patch", "psj", name, "--type=merge", "-p", '{"spec":{"suspend":false}}')
    said = wait_for("it to train on", lambda: coordinator(kube, name), 120, story=lambda: kube.story(name))
    assert said["step"] >= step, "a last checkpoint was taken, so nothing done is done again"
    status = complete(kube, name)
    assert accuracy(final_weights(kube, name)) >= 0.95
    assert status["restarts"]["counted"] == 0


@pytest.mark.e2e
def test_the_rights_of_the_chart_are_those_that_were_used(home: Kube, node_cluster: Cluster) -> None:
    """Of all that the tests before made the operator do: nothing was refused to it."""
    user = f"system:serviceaccount:{HOME}:psjob"
    asked = node_cluster.audit(user=user)
    assert asked, "the operator made no request at all"
    refused = {(event["verb"], event["requestURI"]) for event in asked if event.get("responseStatus", {}).get("code") == 403}
    # In a namespace that is going, creates are refused to everybody.
    assert {uri for verb, uri in refused if verb != "create"} == set()


@pytest.mark.e2e
def test_uninstall_leaves_jobs_running_and_a_new_install_takes_them_up(kube: Kube, home: Kube) -> None:
    name = "digits"
    kube.apply(digits.job(name, args=[f"--epochs={digits.SHORT_EPOCHS}"]))
    wait_for("the job to run", phase(kube, name, "Running"), 120, story=lambda: kube.story(name))
    home.helm("uninstall", "psjob", "--wait")
    assert kube.get("psj", name) is not None and kube.get("crd", "pstrainingjobs.psjob.dev") is not None
    workers = pods_of(kube, name, "worker")
    assert len(workers) == 2
    wait_for("the workers to end without an operator", lambda: all(ended(kube, pod) for pod in workers), 180, every=1)
    assert kube.status(name)["phase"] == "Running", "nobody was there to say otherwise"
    settings = [*image("image", OPERATOR_IMAGE), *image("runtimeImage", RUNTIME_IMAGE)]
    home.helm("install", "psjob", str(CHART), *settings)
    complete(kube, name, 120)
    assert accuracy(final_weights(kube, name)) >= 0.95


def ended(kube: Kube, pod: dict[str, Any]) -> bool:
    now = kube.get("pod", pod["metadata"]["name"])
    return now is not None and now["status"]["phase"] == "Succeeded"
