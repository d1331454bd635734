"""The digits example on a real node: real kubelet, containerd and torch, the operator installed by Helm under the restricted level."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from psjob_client.local.status import part
from tests.e2e import digits
from tests.e2e.digits import accuracy, complete, coordinator, final_weights, pod_of, pods_of, ready_to_kill
from tests.e2e.kube import Kube, condition, kill, phase, processes, shard_status, wait_for
from tests.e2e.node_faults import leader

pytestmark = [pytest.mark.nodes, pytest.mark.serial]
FAULTS = ("crash", "shard", "worker", "operator")
NO_RESTART = {"crash", "operator"}
RECOVERY_SECONDS = 20.0
"""From SIGKILL of a shard to the first push applied in its new attempt, on a machine that does nothing else."""
IMPORTS_SECONDS = 12.0
"""In which the fork servers of the workers have imported torch, so that a rewind does not."""


# -- faults: each strikes and waits until it has been dealt with ------------------------------------------------------------------


def kill_shard(kube: Kube, home: Kube, job: str, within: float) -> None:
    """`within`: seconds from SIGKILL to the first push that counts in the new attempt."""
    ready_to_kill(kube, job)
    if within < math.inf:
        time.sleep(IMPORTS_SECONDS)
    held = ready_to_kill(kube, job)
    at = kill(pod_of(kube, job, "shard", 1), "psjob.shard")

    def applied() -> float | None:
        newest = pod_of(kube, job, "shard", 1)
        said = shard_status(kube, newest)
        if not said or said["attempt"] < 2:
            return None
        moment = said["counters"]["firstApplied"]
        return float(moment) if moment else None

    first = wait_for("a push applied in the new attempt", applied, 120, story=lambda: kube.story(job))

    def passed() -> float | None:
        said = coordinator(kube, job)
        return next((float(moment) for step, moment in said["passed"] if step > held and moment > first), None) if said else None

    again = wait_for(f"step {held} to be passed again", passed, 120, story=lambda: kube.story(job))
    print(f"\nshard killed at step {held}: first push applied after {first - at:.1f} s, step passed again after {again - at:.1f} s")
    assert first - at <= within
    if within < math.inf:
        print(f"a pod that only imports torch: {bare_pod(kube, job):.1f} s")


def bare_pod(kube: Kube, job: str) -> float:
    """Seconds from the creation of a pod like a shard's, in which nothing of psjob runs, to its first line after `import torch`."""
    spec = pod_of(kube, job, "shard", 1)["spec"]
    container = {key: spec["containers"][0][key] for key in ("name", "image", "imagePullPolicy", "securityContext", "resources")}
    container["command"] = ["python", "-c", "import time, torch; print(time.time())"]
    kept = {key: spec[key] for key in ("securityContext", "nodeName") if key in spec}
    name = f"{job}-bare"
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"restartPolicy": "Never", "containers": [container], **kept},
    }
    at = time.time()
    kube.apply(pod)
    wait_for("a bare pod to end", phase_of_pod(kube, name, "Succeeded"), 120)
    said = float(kube.kubectl("logs", name))
    kube.kubectl("delete", "pod", name, "--wait=false")
    return said - at


def phase_of_pod(kube: Kube, name: str, wanted: str) -> Callable[[], bool]:
    return lambda: (kube.get("pod", name) or {}).get("status", {}).get("phase") == wanted


def crash_shard(kube: Kube, home: Kube, job: str, within: float) -> None:
    """The process that serves, and not the first one of its pod: training continues from memory, in the same attempt."""
    held = ready_to_kill(kube, job)
    pod = pod_of(kube, job, "shard", 0)
    before = (shard_status(kube, pod) or {})["counters"]["crashes"]
    first, *rest = sorted(processes(pod, "psjob.shard"))
    assert len(rest) == 1, "the keeper, and the process that serves"
    os.kill(rest[0], signal.SIGKILL)

    def goes_on() -> bool:
        said, told = shard_status(kube, pod), coordinator(kube, job)
        return bool(said and told) and said["counters"]["crashes"] == before + 1 and told["step"] > held + 1

    wait_for("training to continue from memory", goes_on, 120, story=lambda: kube.story(job))
    now = pod_of(kube, job, "shard", 0)
    assert now["metadata"]["uid"] == pod["metadata"]["uid"] and now["status"]["containerStatuses"][0]["restartCount"] == 0
    assert processes(now, "psjob.shard")[0] == first and (shard_status(kube, now) or {})["attempt"] == 1


def kill_worker(kube: Kube, home: Kube, job: str, within: float) -> None:
    ready_to_kill(kube, job)
    victim = pod_of(kube, job, "worker", 1)
    kill(victim, "train.py")

    def returned() -> bool:
        newest = pod_of(kube, job, "worker", 1)
        return newest["metadata"]["uid"] != victim["metadata"]["uid"] and newest["status"].get("phase") in ("Running", "Succeeded")

    wait_for("the worker to be started again", returned, 60, story=lambda: kube.story(job))


def kill_operator(kube: Kube, home: Kube, job: str, within: float) -> None:
    """The replica that acts; the other continues."""
    ready_to_kill(kube, job)
    pod = leader(home)
    assert pod is not None
    name = pod["metadata"]["name"]
    before = pod["status"]["containerStatuses"][0]["restartCount"]
    kill(pod, "psjob_operator")

    def back() -> bool:
        (status,) = (home.get("pod", name) or {})["status"]["containerStatuses"]
        return bool(status["ready"]) and status["restartCount"] > before

    wait_for("the operator to be back", back, 120)


STRIKE = {"crash": crash_shard, "shard": kill_shard, "worker": kill_worker, "operator": kill_operator}


def run_with(kube: Kube, home: Kube, faults: tuple[str, ...], file: str = "job.yaml", within: float = math.inf) -> dict[str, Any]:
    """The example with these faults in turn; its last status, looked at."""
    name = "digits"
    epochs = digits.LONG_EPOCHS if faults else digits.SHORT_EPOCHS
    kube.apply(digits.job(name, file=file, args=[f"--epochs={epochs}"], checkpoint={"periodSeconds": 3, "everySteps": 50}))
    for fault in faults:
        STRIKE[fault](kube, home, name, within)
    status = complete(kube, name)
    reached = accuracy(final_weights(kube, name))
    print(f"\ntest accuracy {reached:.3f} after {', '.join(faults) or 'no'} faults; restarts {status.get('restarts')}")
    assert reached >= 0.95
    assert [shard["attempt"] for shard in status["shards"]] == [1, 2 if "shard" in faults else 1]
    assert status["workers"]["succeededIndexes"] == "0-1"
    assert status["restarts"]["total"] == len(set(faults) - NO_RESTART)
    assert (condition(status, "Complete") or {})["status"] == "True"
    assert (condition(status, "Ready") or {})["status"] == "True"
    assert condition(status, "Stalled") is None and condition(status, "Reconciling") is None
    return status


def go_over(kube: Kube, job: str, mode: str) -> None:
    """Ask a running job for another mode, and wait until it trains in that."""
    asked = coordinator(kube, job)
    kube.kubectl("patch", "psj", job, "--type=merge", "-p", json.dumps({"spec": {"training": {"mode": mode}}}))

    def runs() -> bool:
        said = coordinator(kube, job)
        return said is not None and said["mode"].partition(":")[0] == mode and said["step"] > asked["step"]

    assert asked is not None
    wait_for(f"{job} to train in mode {mode}", runs, 120, story=lambda: kube.story(job))


# -- the tests, in the order they run -------------------------------------------------------------------------------------------------


@pytest.mark.soak
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
    assert kube.get("pvc", "digits-checkpoints") is not None, "the claim outlives the job"


@pytest.mark.timeout(900)
def test_it_lives_through_every_kill_in_turn(kube: Kube, home: Kube) -> None:
    run_with(kube, home, FAULTS)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", FAULTS)
def test_it_lives_through_one_kill(kube: Kube, home: Kube, fault: str) -> None:
    run_with(kube, home, (fault,), within=RECOVERY_SECONDS)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("faults", [(), ("shard",)], ids=["undisturbed", "shard"])
def test_the_async_example(kube: Kube, home: Kube, faults: tuple[str, ...]) -> None:
    run_with(kube, home, faults, file="async.yaml")


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_job_goes_over_to_other_modes_is_suspended_and_goes_on_from_its_checkpoint(kube: Kube) -> None:
    name = "digits"
    # At the example's own lr async with momentum spoils the weights, whatever mode comes after it.
    args = [f"--epochs={digits.LONG_EPOCHS}", "--lr=0.05"]
    kube.apply(digits.job(name, args=args, checkpoint={"periodSeconds": 3, "everySteps": 50}))
    ready_to_kill(kube, name)
    before = {pod["metadata"]["uid"] for pod in pods_of(kube, name)}
    began = time.monotonic()
    for mode in ("bounded", "async", "sync"):
        go_over(kube, name, mode)
    print(f"\nthree other modes in {time.monotonic() - began:.1f} s")
    assert {pod["metadata"]["uid"] for pod in pods_of(kube, name)} == before, "no pod is restarted for that"
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
    reached = accuracy(final_weights(kube, name))
    print(f"\ntest accuracy {reached:.3f} after three switches and a pause")
    assert reached >= 0.95
    assert status["restarts"]["counted"] == 0


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_job_goes_on_from_another_one_by_its_name(kube: Kube) -> None:
    """On the other's claim; the other is deleted before it trains."""
    args, kept = [f"--epochs={digits.LONG_EPOCHS}"], {"periodSeconds": 3, "everySteps": 50}
    kube.apply(digits.job("first", args=args, checkpoint=kept))
    step = ready_to_kill(kube, "first")
    kube.kubectl("patch", "psj", "first", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    wait_for("the other to be suspended", phase(kube, "first", "Suspended"), 120, story=lambda: kube.story("first"))
    run = kube.status("first")["run"]
    mine = {"resumeFrom": {"job": "first"}, "volume": {"persistentVolumeClaim": {"claimName": "first-checkpoints"}}}
    kube.apply(digits.job("second", args=args, checkpoint={**kept, **mine}))
    story = lambda: kube.story("second")  # noqa: E731
    pinned = lambda: part(kube.status("second"), "internal", "pinned")  # noqa: E731
    wait_for("the run to be found", lambda: pinned().get("resumedFrom") == run, 60, story=story)
    kube.kubectl("delete", "psj", "first", "--wait=true")
    said = wait_for("it to train", lambda: coordinator(kube, "second"), 120, story=story)
    assert said["step"] >= step, "nothing done is done again"
    complete(kube, "second")
    (final,) = digits.claim_folder(kube, "first-checkpoints").glob("*/final.safetensors")
    assert final.parent.name == kube.status("second")["run"] != run
    reached = accuracy(final)
    print(f"\ntest accuracy {reached:.3f} on from step {step}")
    assert reached >= 0.95 and pinned()["resumedFrom"] == run
