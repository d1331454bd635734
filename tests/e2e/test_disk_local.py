"""`psjob run` and a disk without room: refused at the start, told while it trains, with and without a display."""

from __future__ import annotations

from pathlib import Path

import pytest

from psjob_client.local.run_folder import LEAST_ROOM, new_folder
from psjob_client.problems import BadInput
from tests.e2e.little_disk import COMES, LITTLE, VOLUME_BYTES, job_of
from tests.e2e.watched import Watched
from tests.support.disks import mounted

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(600)]


def test_a_full_disk_is_refused_at_the_start(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", VOLUME_BYTES) as volume:
        volume.fill(leave=LEAST_ROOM // 2)
        with pytest.raises(BadInput, match=rf"bytes are free there, and a run needs {LEAST_ROOM}"):
            new_folder("digits", volume.folder)
        assert not list((volume.folder / ".psjob").glob("digits-*"))
        volume.make_room()
        assert new_folder("digits", volume.folder).path.is_dir()


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
        job.end(COMES)
