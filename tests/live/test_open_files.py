"""A shard may open as many files as the system allows, and says so where that cannot be enough."""

from __future__ import annotations

import resource
from pathlib import Path

from psjob import contract
from tests.live.live_shards import eventually
from tests.live.shard_processes import Processes, processes, serving


def limited(soft: int, hard: int) -> tuple[str, ...]:
    """A shard whose limits are these when it begins."""
    code = f"import resource, runpy; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))"
    return "-c", f"{code}; runpy.run_module('psjob.shard', run_name='__main__')"


def open_files(run: Processes) -> tuple[int, int]:
    """(soft, hard) of shard 0's process."""
    return resource.prlimit(serving(run.started[0]), resource.RLIMIT_NOFILE)


def test_the_soft_limit_is_raised_to_the_hard_one(tmp_path: Path) -> None:
    with processes(tmp_path, forked=True, shards=1) as run:
        run.start(0, program=limited(256, 900))
        assert eventually(lambda: run.get(0, contract.STARTED_PATH)[0] == 200, 60.0)
        assert open_files(run) == (900, 900)


def test_a_job_that_needs_more_files_than_there_may_be_is_refused(tmp_path: Path) -> None:
    with processes(tmp_path, forked=True, shards=1, workers=400, streams=3) as run:
        process = run.start(0, program=limited(256, 900))
        assert process.wait(60) == contract.EXIT_REFUSED
        assert "may open 900 files" in run.said(0)["error"] and "400 workers with 3 streams each need 1841" in run.said(0)["error"]
