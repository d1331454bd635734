"""What reaches a job's status of the log of a failed process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster_fixtures import Cluster
from tests.integration.operator_harness import World, manifest, world

pytestmark = pytest.mark.cluster
LOG = "Traceback\nLoginError: https://me:hunter2@host says no, token=hunter2"


@pytest.fixture
def place(control_plane: Cluster, namespace: str, tmp_path: Path) -> Iterator[World]:
    with world(control_plane, namespace, tmp_path) as made:
        yield made


@pytest.mark.parametrize(
    ("options", "said"),
    [((), "exit code 3: LoginError: https://[removed]@host says no, token=[removed];"), (("--no-log-tails",), "exit code 3;")],
)
def test_status_and_events_tell_no_credential_and_without_tails_no_word(place: World, options: tuple[str, ...], said: str) -> None:
    place.operator(*options)
    node = place.node(f"{place.namespace}-n")
    place.create(manifest("job", shards=1, workers=1, runPolicy={"backoffLimit": 0}))
    place.until("its pods", lambda: {"job-ps-0-a1", "job-worker-0-r1"} <= set(place.pods()))
    place.run("job-ps-0-a1", "job-worker-0-r1", node=node)
    place.until_phase("Running", "job")
    place.end("job-worker-0-r1", 3, message=LOG)
    place.until_phase("Failed", "job")
    told = str(place.status("job")) + str(place.items("events"))
    assert said in told and "hunter2" not in told and (not options or "LoginError" not in told)
