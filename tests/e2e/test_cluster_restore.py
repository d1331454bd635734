"""The API server is restored from an older backup under a job: numbers were given twice, and nothing counts twice or is lost.

- A namespace is lost and restored by Velero itself: docs/backup.md's way, and what comes of a restore of all that was backed up.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hack.cluster.paths import Unavailable
from hack.velero import Velero
from tests.e2e import counting, node_faults
from tests.e2e.digits import beyond_checkpoint, complete, coordinator, final_weights, pod_of, ready_to_kill
from tests.e2e.kube import ROOT, Kube, condition, wait_for
from tests.support.cluster_fixtures import Cluster

pytestmark = [pytest.mark.nodes, pytest.mark.serial]
NAME = "counts"
WORKERS, STEPS, PACE = 2, 500, 0.05
MANY = ("shard", "worker", "worker", "worker", "worker", "shard")
"""Lost after the backup, one after the other."""


def lose(kube: Kube, role: str) -> None:
    """Worker 1 or shard 0 is deleted; training continues beyond a new checkpoint."""
    index = 1 if role == "worker" else 0
    pod = pod_of(kube, NAME, role, index)
    number, step = int(pod["metadata"]["labels"]["psjob.dev/number"]), (coordinator(kube, NAME) or {}).get("step", 0)
    kube.kubectl("delete", "pod", pod["metadata"]["name"], "--force", "--grace-period=0")

    def on() -> bool:
        said = beyond_checkpoint(kube, NAME)
        newest = pod_of(kube, NAME, role, index)
        there = int(newest["metadata"]["labels"]["psjob.dev/number"]) > number and newest["status"].get("phase") == "Running"
        return there and said is not None and len(counting.joined(kube, NAME)) == WORKERS and said["checkpoint"]["step"] > step

    wait_for(f"training to continue after the loss of {pod['metadata']['name']}", on, 120, story=lambda: kube.story(NAME))


@pytest.mark.timeout(900)
@pytest.mark.soak
@pytest.mark.parametrize("losses", [MANY, ("worker",)], ids=["many", "the next number is in use"])
def test_a_job_ends_right_after_its_api_server_was_restored(
    kube: Kube, node_cluster: Cluster, tmp_path: Path, losses: tuple[str, ...]
) -> None:
    kube.apply(counting.job(NAME, STEPS, PACE, WORKERS, runPolicy={"backoffLimit": 2}))
    ready_to_kill(kube, NAME)
    node_faults.backup(node_cluster, tmp_path / "etcd")
    old = kube.status(NAME)
    for role in losses:
        lose(kube, role)
    lost, said = kube.status(NAME), coordinator(kube, NAME)
    assert said is not None and said["step"] < STEPS
    assert lost["internal"]["workerStart"] > old["internal"]["workerStart"]
    term, start = lost["internal"]["term"], lost["internal"]["workerStart"]
    print(f"lost: term {term}, start {start}, step {said['step']}; restored: term {old['internal']['term']}, start 1")
    node_faults.restore(node_cluster, tmp_path / "etcd")
    assert kube.status(NAME)["internal"]["workerStart"] == old["internal"]["workerStart"] == 1
    status = complete(kube, NAME)
    print(f"term {status['internal']['term']}, start {status['internal']['workerStart']}, {status['restarts']['causes']}")
    if losses == MANY:
        assert status["restarts"]["causes"]["Fenced"] >= 2
        assert status["internal"]["term"] > lost["internal"]["term"] and status["internal"]["workerStart"] > lost["internal"]["workerStart"]
    assert status["restarts"]["counted"] <= 1, "pods that ended after the backup are told of once more, without their last words"
    counting.check(final_weights(kube, NAME), STEPS, WORKERS)


BACKUP = "psjob"
PAGE = ROOT / "docs" / "backup.md"


@pytest.fixture
def velero(node_cluster: Cluster, tmp_path: Path) -> Iterator[Velero]:
    try:
        made = Velero(node_cluster.api, node_cluster.kubeconfig, tmp_path)
        with made.serving():
            yield made
    except Unavailable as error:
        pytest.skip(str(error))


def lost(kube: Kube, velero: Velero) -> str:
    """Backs a training job's namespace up, and deletes it after more checkpoints; the run that was lost."""
    kube.apply(job())
    ready_to_kill(kube, NAME)
    velero.run("backup", "create", BACKUP, "--include-namespaces", kube.namespace, "--snapshot-volumes", "--wait")
    assert velero.phase("backups", BACKUP) == "Completed", velero.words("backups", BACKUP)
    kept, run = (coordinator(kube, NAME) or {})["checkpoint"]["step"], str(kube.status(NAME)["run"])

    def further() -> bool:
        said = beyond_checkpoint(kube, NAME)
        return said is not None and said["checkpoint"]["step"] > kept + 10

    wait_for("later checkpoints, which are lost", further, 60, story=lambda: kube.story(NAME))
    kube.kubectl("delete", "namespace", kube.namespace, "--timeout=90s")
    return run


def restored(velero: Velero, name: str, *options: str) -> None:
    velero.run("restore", "create", name, "--from-backup", BACKUP, *options, "--wait")
    assert velero.phase("restores", name) == "Completed", velero.words("restores", name)


def job(**checkpoint: Any) -> dict[str, Any]:
    return counting.job(NAME, STEPS, PACE, WORKERS, checkpoint={"everySteps": 10, "periodSeconds": 3600, "keep": 50, **checkpoint})


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_job_goes_on_from_the_volume_that_velero_restored(kube: Kube, velero: Velero) -> None:
    """The commands are those of docs/backup.md."""
    commands = [shlex.split(line)[3:] for line in PAGE.read_text().splitlines() if line.startswith("velero restore create ")]
    assert len(commands) == 2 and all(words[1:3] == ["--from-backup", BACKUP] for words in commands)
    run = lost(kube, velero)
    for words in commands:
        restored(velero, words[0], *words[3:])
    assert kube.names("pvc") == {f"{NAME}-checkpoints"} and not kube.list("pods") and not kube.list("pstrainingjob")
    kube.apply(job(resumeFrom={"run": run}))
    status = complete(kube, NAME)
    assert status["run"] != run and status["restarts"]["counted"] == 0
    weights = final_weights(kube, NAME)
    counting.check(weights, STEPS, WORKERS)
    steps = sorted(int(file.name.rpartition("-s")[2].split(".")[0]) for file in weights.parent.glob("manifest-*"))
    assert steps[0] > 0, f"it continued, and did not begin: {steps}"


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_job_that_velero_restored_with_all_it_had_tells_what_is_in_its_way(kube: Kube, velero: Velero) -> None:
    """Its objects are nobody's then: nothing of them is adopted, and deleted they are made anew."""
    run = lost(kube, velero)
    restored(velero, "all")

    def told() -> str:
        ready = condition(kube.status(NAME), "Ready")
        return ready["message"] if ready and ready["reason"] == "NameConflict" else ""

    words = wait_for("the reason", lambda: told() or None, 60, story=lambda: kube.story(NAME))
    assert "exists and is not this job's" in words and kube.status(NAME)["phase"] == "Pending", words
    kube.kubectl("delete", "pods,configmaps,services,networkpolicies", "-l", f"psjob.dev/job-name={NAME},psjob.dev/run={run}")
    assert complete(kube, NAME)["run"] != run
    counting.check(final_weights(kube, NAME), STEPS, WORKERS)
