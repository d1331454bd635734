"""A job that the operator of an older commit began on real nodes lives through an upgrade and a rollback, with the bits of a quiet run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from hack.cluster.images import write
from hack.cluster.pack import operator_image, runtime_image
from tests import older
from tests.cluster_fixtures import RUNTIME_IMAGE, Cluster
from tests.e2e import digits
from tests.e2e.digits import complete, final_weights, pod_of, pods_of, ready_to_kill
from tests.e2e.kube import Kube, install, kill, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.serial, pytest.mark.e2e_long]
OLD_OPERATOR, OLD_RUNTIME = "psjob.local/psjob-operator:before", "psjob.local/psjob-runtime:before"
HELM = ("--take-ownership", "--force-conflicts")
EPOCHS = 4 * digits.LONG_EPOCHS
"""Enough for two roll-outs and three kills."""
WORD = {"shard": "psjob.shard", "worker": "train.py"}


@pytest.fixture
def before(home: Kube, node_cluster: Cluster, tmp_path: Path) -> Iterator[older.Older]:
    """The older commit, its images on every node; after the test this checkout's operator is installed again."""
    made = older.unpacked(tmp_path / "before")
    archive = write(tmp_path / "before.tar", runtime_image(OLD_RUNTIME, made.folder), operator_image(OLD_OPERATOR, source=made.folder))
    node_cluster.load(archive)
    archive.unlink()
    yield made
    install(home, *HELM)


def replaced(kube: Kube, job: str, role: str, index: int) -> None:
    """SIGKILL to that process, and wait until another pod runs in its seat."""
    victim = pod_of(kube, job, role, index)
    kill(victim, WORD[role])

    def returned() -> bool:
        newest = pod_of(kube, job, role, index)
        return newest["metadata"]["uid"] != victim["metadata"]["uid"] and newest["status"].get("phase") == "Running"

    wait_for(f"another {role} {index}", returned, 120, story=lambda: kube.story(job))
    ready_to_kill(kube, job)


def images(kube: Kube, job: str) -> set[str]:
    return {str(item["image"]) for pod in pods_of(kube, job) for item in pod["spec"]["initContainers"] if item["name"] == "psjob-inject"}


def begins(kube: Kube, job: str) -> None:
    kube.apply(digits.job(job, args=[f"--epochs={EPOCHS}"], checkpoint={"interval": "3s", "everySteps": 50}))
    ready_to_kill(kube, job)


@pytest.mark.timeout(1800)
def test_upgrade_and_rollback_under_a_running_job(kube: Kube, home: Kube, before: older.Older) -> None:
    def as_before() -> None:
        install(home, *HELM, chart=before.chart, operator=OLD_OPERATOR, runtime=OLD_RUNTIME)

    as_before()
    begins(kube, "digits")
    install(home, *HELM)
    pinned = wait_for("the pins", lambda: kube.status("digits").get("pinned"), 60, story=lambda: kube.story("digits"))
    assert (pinned["runtimeImage"], pinned["configFormat"], pinned["wire"]) == (OLD_RUNTIME, 1, 1)
    replaced(kube, "digits", "shard", 1)
    replaced(kube, "digits", "worker", 1)
    as_before()
    replaced(kube, "digits", "worker", 0)
    status = complete(kube, "digits", 600)
    assert images(kube, "digits") == {OLD_RUNTIME}, f"no pod of the run was made of {RUNTIME_IMAGE}"
    assert status["restarts"]["total"] == 3, status["restarts"]
    begins(kube, "quiet")
    assert complete(kube, "quiet", 600)["restarts"]["total"] == 0
    disturbed, quiet = load_file(final_weights(kube, "digits")), load_file(final_weights(kube, "quiet"))
    assert disturbed.keys() == quiet.keys() and all((disturbed[key] == quiet[key]).all() for key in quiet)
