"""What shards and workers of one host lend each other goes with those it was lent to: returns of a shard leave nothing of it behind."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.watched import Watched
from tests.e2e.workloads.running import faults, manifest
from tests.support.disks import mounted
from tests.support.soaking import rotating, soak

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(600)]
MB = 1_000_000
SECONDS = 60.0
HOLD = (7, 20)
KILLS = (8, 12, 16)


@pytest.mark.parametrize("mode", [rotating("sync"), soak("async")])
def test_returns_leave_no_lent_memory_behind(tmp_path: Path, mode: str) -> None:
    words = ["bulky.py", "8", "24", "--hold", ",".join(map(str, HOLD)), "--signs", str(tmp_path), "--pace", "0.2"]
    spec = {"training": {"mode": mode}, "checkpoint": {"everySteps": 2, "periodSeconds": 3600}, "runPolicy": {"backoffLimit": 10}}
    job_file = manifest(tmp_path, words, workers=1, **spec)
    with (
        mounted(tmp_path / "disk", 256 * MB) as volume,
        Watched(volume, tmp_path, job_file, *faults(*(f"kill:shard-1@step={step}" for step in KILLS))) as job,
    ):
        lent = []
        for hold in HOLD:
            job.until(f"the worker holds before step {hold}", SECONDS, lambda hold=hold: job.last.step == hold - 1)
            lent.append(regions(job.processes))
            job.go(hold)
        job.hurry()
        summary = job.end(SECONDS)
    assert summary["attempts"] == [1, 1 + len(KILLS)]
    before, after = lent
    assert before and sorted(before.values()) == sorted(after.values()), (before, after)


def regions(processes: Iterable[int]) -> dict[int, int]:
    """Bytes of each region of lent memory, by its inode, that one of them holds."""
    found = {}
    for pid in processes:
        with suppress(FileNotFoundError):  # the process has ended meanwhile
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):  # closed meanwhile
                    if "memfd:psjob" in os.readlink(fd):
                        about = fd.stat()
                        found[about.st_ino] = about.st_size
    return found
