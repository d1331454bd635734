"""A volume without room for a checkpoint costs checkpoints, never the job: it waits with a sentence, and continues when there is room.

- `psjob run` and a disk without room: refused at the start, told while it trains, with and without a display.
- A job whose checkpoints do not fit on its volume.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from psjob_client.local.run_folder import LEAST_ROOM, new_folder
from psjob_client.problems import BadInput
from tests.e2e.watched import Look, Watched, strays
from tests.e2e.workloads.running import Ran, faults, manifest, train
from tests.support.disks import Volume, mounted

pytestmark = pytest.mark.nodes

MEGABYTES, STEPS, PACE = 8.0, 300, 0.3
INTERVAL = 8.0
VOLUME_BYTES = 96_000_000
LITTLE = 3_000_000
"""Room for all that shard 0 writes, and too little for shard 1."""
COMES = 90.0
"""Seconds for what a busy machine does in a few."""
ENDS = 400.0
"""Seconds for hundreds of steps on a busy machine."""


def job_of(folder: Path, *words: str) -> Path:
    command = ["bulky.py", str(MEGABYTES), str(STEPS), "--uneven", *words]
    return manifest(folder, command, checkpoint={"periodSeconds": round(INTERVAL), "keep": 2})


FIRST_BYTES = 8_000_000
"""Of the checkpoint of step 0, in equal parts on two shards; later ones have as much on shard 1, and kilobytes on shard 0."""
SAID_SECONDS = 130.0
"""Conditions that follow progress are written once a minute, and one such write may find no room for itself."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The same training with room enough."""
    folder = tmp_path_factory.mktemp("plain")
    return train(folder, job_of(folder))


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Volume]:
    with mounted(tmp_path / "disk", VOLUME_BYTES) as made:
        yield made


@pytest.mark.timeout(900)
@pytest.mark.soak
@pytest.mark.parametrize("seconds", [25, 200])
def test_a_volume_that_is_full_for_a_while_costs_checkpoints_alone(tmp_path: Path, plain: Ran, volume: Volume, seconds: int) -> None:
    pace = PACE * max(1, seconds / 40)
    with Watched(volume, tmp_path, job_of(tmp_path, "--pace", str(pace), "--signs", str(tmp_path))) as job:
        job.until("a checkpoint above step 0 is committed", COMES, lambda: max(job.steps, default=0) > 0)
        fill_until_told(job)
        before = max(job.steps)
        full = job.stay(seconds)
        assert max(job.steps) == before, "there was no room for a checkpoint"
        assert all("full" in look.problem for look in full if look.coordinator), {look.problem for look in full}
        if seconds > SAID_SECONDS:
            ready = {told["type"]: told for told in job.status()["conditions"]}["CheckpointReady"]
            assert ready["status"] == "False" and "full" in ready["message"], ready
        assert_steps_go_on(full)
        assert_few_strays(full)
        volume.make_room()
        job.until(f"a checkpoint is committed within {INTERVAL} s of room", INTERVAL, lambda: max(job.steps) > before)
        job.until("nothing is said of a problem", 5, lambda: job.last.coordinator and "full" not in job.last.problem)
        job.hurry()
        summary = job.end(ENDS)
    assert summary["restarts"] == {} and summary["attempts"] == [1, 1]
    assert summary["weights_sha256"] == plain.sha


@pytest.mark.timeout(900)
@pytest.mark.rotating
def test_a_job_that_starts_on_a_full_volume_waits_for_room(tmp_path: Path, plain: Ran, volume: Volume) -> None:
    """First not a byte can be written, then the claim of the run can, and the checkpoint of step 0 cannot."""
    with Watched(volume, tmp_path, job_of(tmp_path, "--signs", str(tmp_path))) as job:
        assert job.folder
        volume.fill()
        job.until("the job says that its volume is full", COMES, lambda: "full" in job.last.problem)
        job.stay(10)
        volume.make_room()
        volume.fill(leave=FIRST_BYTES * 3 // 4)
        job.until("the run is claimed", COMES, lambda: list(job.folder.glob("CLAIM-*")))
        job.until("the job says again that its volume is full", COMES, lambda: "full" in job.last.problem)
        waits = job.stay(15)
        assert job.steps == [] and "full" in waits[-1].problem
        assert_few_strays(waits)
        volume.make_room()
        job.until("the checkpoint of step 0 is committed", INTERVAL, lambda: 0 in job.steps)
        summary = job.end(ENDS)
    assert summary["restarts"] == {} and summary["attempts"] == [1, 1]
    assert summary["weights_sha256"] == plain.sha


@pytest.mark.timeout(900)
@pytest.mark.soak
def test_shard_0_returns_on_a_full_volume(tmp_path: Path, plain: Ran, volume: Volume) -> None:
    """Its claim is the first that a new coordinator writes."""
    held = 60
    words = ("--pace", str(PACE), "--hold", str(held), "--signs", str(tmp_path))
    with Watched(volume, tmp_path, job_of(tmp_path, *words), *faults(f"kill:shard-0@step={held}")) as job:
        job.until("the workers hold, after a checkpoint", COMES, lambda: job.last.step == held - 1 and max(job.steps) > 0)
        job.stay(3)
        volume.fill()
        job.go(held)
        struck = job.struck(f"kill:shard-0@step={held}", COMES)
        job.until("the new shard 0 says that its volume is full", COMES, lambda: job.last.at > struck and "full" in job.last.problem)
        job.stay(15)
        volume.make_room()
        job.hurry()
        summary = job.end(ENDS)
    assert sum(summary["restarts"].values()) == 1 and summary["attempts"] == [2, 1]
    assert summary["weights_sha256"] == plain.sha and summary["updates_lost"] == 0


def fill_until_told(job: Watched) -> None:
    """Leave a little room, again where a checkpoint that was on its way has freed some, until the job has noticed."""

    def told() -> bool:
        if not job.last.beyond:
            job.volume.fill(leave=LITTLE)
        return "full" in job.last.problem

    job.until("the job says that its volume is full", COMES, told)


def assert_steps_go_on(looks: list[Look]) -> None:
    """In each part of that time some step was made."""
    steps = [look.step for look in looks if look.step >= 0]
    parts = [steps[len(steps) * part // 5] for part in range(5)] + steps[-1:]
    assert all(earlier < later for earlier, later in pairwise(parts)), parts


def assert_few_strays(looks: list[Look]) -> None:
    """At most one cut's files lie beside the committed ones: one per shard."""
    found = strays(looks)
    assert all(len(files) <= 1 for files in found.values()), found


@pytest.mark.timeout(600)
def test_a_full_disk_is_refused_at_the_start(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", VOLUME_BYTES) as volume:
        volume.fill(leave=LEAST_ROOM // 2)
        with pytest.raises(BadInput, match=rf"bytes are free there, and a run needs {LEAST_ROOM}"):
            new_folder("digits", volume.folder)
        assert not list((volume.folder / ".psjob").glob("digits-*"))
        volume.make_room()
        assert new_folder("digits", volume.folder).path.is_dir()


@pytest.mark.timeout(600)
def test_a_disk_that_fills_up_is_told_without_a_display(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", VOLUME_BYTES) as volume, Watched(volume, tmp_path, job_of(tmp_path, "--signs", str(tmp_path))) as job:
        job.until("a checkpoint is committed", COMES, lambda: 0 in job.steps)

        def told() -> bool:
            if not job.last.beyond:
                volume.fill(leave=LITTLE)
            return "full" in job.last.problem

        job.until("the job says that its volume is full", COMES, told)
        job.until("the user is told", 10, lambda: "warning: checkpoints pause" in (tmp_path / "err").read_text())
        volume.make_room()
        job.until("the user is told that it is over", COMES, lambda: "checkpoints are written again" in (tmp_path / "err").read_text())
        job.hurry()
        job.end(ENDS)
