"""A job that the operator of an older commit began on real nodes lives through the upgrade to keys, with the bits of a quiet run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from hack.cluster.images import write
from hack.cluster.pack import operator_image, runtime_image
from psjob.contract import WIRE
from tests.e2e import digits
from tests.e2e.digits import complete, final_weights, pod_of, pods_of, ready_to_kill
from tests.e2e.kube import Kube, condition, install, wait_for
from tests.support import older
from tests.support.cluster_fixtures import RUNTIME_IMAGE, Cluster
from tests.support.runkeys import get

pytestmark = [pytest.mark.soak, pytest.mark.serial]
OLD_OPERATOR, OLD_RUNTIME = "psjob.local/psjob-operator:before", "psjob.local/psjob-runtime:before"
HELM = ("--take-ownership", "--force-conflicts")
EPOCHS = 4 * digits.LONG_EPOCHS
"""Enough for a roll-out and a suspension."""


@pytest.fixture
def before(home: Kube, node_cluster: Cluster, tmp_path: Path) -> Iterator[older.Older]:
    """The older commit, its images on every node; after the test this checkout's operator is installed again."""
    made = older.unpacked(tmp_path / "before")
    archive = write(tmp_path / "before.tar", runtime_image(OLD_RUNTIME, made.folder), operator_image(OLD_OPERATOR, source=made.folder))
    node_cluster.load(archive)
    archive.unlink()
    yield made
    install(home, *HELM)


def images(kube: Kube, job: str) -> set[str]:
    return {str(item["image"]) for pod in pods_of(kube, job) for item in pod["spec"]["initContainers"] if item["name"] == "psjob-inject"}


def begins(kube: Kube, job: str) -> None:
    kube.apply(digits.job(job, args=[f"--epochs={EPOCHS}"], checkpoint={"periodSeconds": 3, "everySteps": 50}))


def has_a_checkpoint(kube: Kube, job: str) -> bool:
    """As a shard without keys tells whoever asks."""
    address = pod_of(kube, job, "shard", 0).get("status", {}).get("podIP")
    try:
        said = get(7071, "/status", host=address)[1] if address else {}
    except (OSError, ValueError):
        return False
    return bool(((said.get("coordinator") or {}).get("checkpoint") or {}).get("step"))


@pytest.mark.timeout(1800)
def test_a_run_that_began_without_keys_goes_on_after_a_suspension(kube: Kube, home: Kube, before: older.Older) -> None:
    install(home, *HELM, chart=before.chart, operator=OLD_OPERATOR, runtime=OLD_RUNTIME)
    begins(kube, "digits")
    wait_for("a checkpoint", lambda: has_a_checkpoint(kube, "digits"), 120, story=lambda: kube.story("digits"))
    install(home, *HELM)

    def held() -> bool:
        ready = condition(kube.status("digits"), "Ready") or {}
        return ready.get("reason") == "RunOfAnotherVersion" and "began without authentication" in str(ready.get("message"))

    wait_for("the hold", held, 60, story=lambda: kube.story("digits"))
    assert kube.status("digits")["phase"] == "Running" and images(kube, "digits") == {OLD_RUNTIME}, "what runs goes on"
    suspend(kube, True)
    wait_for("the suspension", lambda: kube.status("digits").get("phase") == "Suspended", 180, story=lambda: kube.story("digits"))
    suspend(kube, False)
    ready_to_kill(kube, "digits")
    pinned = kube.status("digits")["internal"]["pinned"]
    assert (pinned["runtimeImage"], pinned["wire"], pinned["key"]) == (RUNTIME_IMAGE, WIRE, 1)
    complete(kube, "digits", 600)
    assert images(kube, "digits") == {RUNTIME_IMAGE}
    begins(kube, "quiet")
    assert complete(kube, "quiet", 600)["restarts"]["total"] == 0
    disturbed, quiet = load_file(final_weights(kube, "digits")), load_file(final_weights(kube, "quiet"))
    assert disturbed.keys() == quiet.keys() and all((disturbed[key] == quiet[key]).all() for key in quiet)


def suspend(kube: Kube, wanted: bool) -> None:
    kube.kubectl("patch", "psj", "digits", "--type=merge", "-p", json.dumps({"spec": {"suspend": wanted}}))
