"""The digits example as a job of a restricted namespace, and its accuracy by plain torch."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.kube import ROOT, Kube, phase, shard_status, wait_for
from tests.support.cluster_fixtures import WORKER_IMAGE

EXAMPLE = ROOT / "examples" / "digits"
SHORT_EPOCHS, LONG_EPOCHS = 16, 80
LABEL_JOB = "psjob.dev/job-name"
RESTRICTED_POD = {
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "runAsGroup": 1000,
    "fsGroup": 1000,
    "seccompProfile": {"type": "RuntimeDefault"},
}
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}


def job(
    name: str, *, image: str = WORKER_IMAGE, file: str = "job.yaml", workers: int = 2, args: list[str] | None = None, **spec: Any
) -> dict[str, Any]:
    """The example's manifest, made small enough for two cores and strict enough for a restricted namespace."""
    document: dict[str, Any] = copy.deepcopy(yaml.safe_load((EXAMPLE / file).read_text()))
    document["metadata"] = {"name": name}
    document["spec"]["workers"]["replicas"] = workers
    pod = document["spec"]["workers"]["template"]["spec"]
    pod["securityContext"] = {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "fsGroup": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    (container,) = pod["containers"]
    container |= {"image": image, "imagePullPolicy": "IfNotPresent", "securityContext": RESTRICTED}
    container["resources"] = {"requests": {"cpu": "50m", "memory": "600Mi"}, "limits": {"memory": "2Gi"}}
    own = [it for it in container.get("env", []) if it["name"] != "OMP_NUM_THREADS"]
    container["env"] = [*own, {"name": "OMP_NUM_THREADS", "value": "1"}]
    if args:
        container["args"] = [*container.get("args", []), *args]
    shard = {"name": "shard", "resources": {"requests": {"cpu": "50m", "memory": "600Mi"}, "limits": {"memory": "1500Mi"}}}
    document["spec"]["shards"]["template"] = {"spec": {"containers": [shard]}}
    for key, value in spec.items():
        document["spec"][key] = {**document["spec"].get(key, {}), **value} if isinstance(value, dict) else value
    return document


def pods_of(kube: Kube, job_name: str, role: str = "", index: int | None = None) -> list[dict[str, Any]]:
    """The job's pods, newest first, those being deleted left out."""
    labels = f"{LABEL_JOB}={job_name}"
    if role:
        labels += f",psjob.dev/role={role}"
    if index is not None:
        labels += f",psjob.dev/index={index}"
    found = [pod for pod in kube.list("pods", labels) if "deletionTimestamp" not in pod["metadata"]]
    return sorted(found, key=lambda pod: int(pod["metadata"]["labels"]["psjob.dev/number"]), reverse=True)


def pod_of(kube: Kube, job_name: str, role: str, index: int) -> dict[str, Any]:
    """The seat's newest pod. There is none for a moment between one that goes and its successor."""
    story = lambda: kube.story(job_name)  # noqa: E731
    return wait_for(
        f"a pod of {role} {index} of {job_name}", lambda: pods_of(kube, job_name, role, index) or None, 20, every=0.05, story=story
    )[0]


def claim_folder(kube: Kube, claim: str) -> Path:
    """Where the claim's files lie on this machine."""
    bound = wait_for(f"claim {claim} to be bound", lambda: ((kube.get("pvc", claim) or {}).get("spec") or {}).get("volumeName"), 30)
    volume = kube.get("pv", bound)
    assert volume is not None
    return Path(volume["spec"]["local"]["path"])


def coordinator(kube: Kube, job: str) -> dict[str, Any] | None:
    """What shard 0 says about the whole job, or None where it is out of reach."""
    shards = pods_of(kube, job, "shard", 0)
    said = shard_status(kube, shards[0]) if shards else None
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


def accuracy(weights: Path) -> float:
    """Test accuracy of those weights, by torch and scikit-learn in a process that never imports psjob."""
    script = """
import sys, types
sys.modules["psjob"] = types.ModuleType("psjob")  # the example imports it; nothing of it is used here
sys.path.insert(0, sys.argv[2])
import train
from safetensors.torch import load_file
from torch import nn
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
model.load_state_dict(load_file(sys.argv[1]))
print(train.score(model, train.digits()[1]))
"""
    words = [sys.executable, "-c", script, str(weights), str(EXAMPLE)]
    answer = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    return float(answer.stdout)
