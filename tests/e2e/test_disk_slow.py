"""Gigabytes on a volume that takes minutes for them, in small: checkpoints commit, and a lost shard is back when it has read its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.disks import mounted
from tests.e2e.watched import Look, Watched
from tests.e2e.workloads.running import faults, manifest, train

pytestmark = pytest.mark.timeout(3600)
MB = 1_000_000
SHARD_TIMEOUT = 5
EVERY = 20
LAST = 30
"""Steps of a run with kills: one checkpoint is due between its begin and its end."""
KILLS = {23: ("ps-0",), 25: ("ps-1",), 27: ("ps-0", "ps-1")}
"""By step: who is killed there."""
STEP_SECONDS = 60.0
"""For a few steps of a large model, or a start, on a busy machine."""
START_SECONDS = 8.0
"""What a return may take beside its reading."""
SILENCE = 3.0
"""Seconds between two looks at a reading shard."""


@dataclass(frozen=True)
class Size:
    """How much is written and read, and how fast."""

    megabytes: int
    """Of weights; a checkpoint with its momentum has twice as much."""
    rate: int
    """Bytes a second."""
    workers: int = 2

    @property
    def all_seconds(self) -> float:
        """For a whole checkpoint."""
        return 2 * self.megabytes * MB / self.rate


SMALL, LARGE = Size(100, 5 * MB), Size(3000, 50 * MB, workers=1)


@pytest.mark.serial
@pytest.mark.parametrize("size", [SMALL, pytest.param(LARGE, marks=pytest.mark.soak)], ids=["200MB", "6GB"])
def test_killed_shards_are_back_when_they_have_read_their_own(tmp_path: Path, size: Size) -> None:
    (tmp_path / "plain").mkdir()
    plain = train(tmp_path / "plain", job_of(tmp_path / "plain", size))
    texts = [f"kill:{name}@step={step}" for step, names in KILLS.items() for name in names]
    words = ("--hold", ",".join(map(str, KILLS)), "--signs", str(tmp_path))
    with (
        mounted(tmp_path / "disk", 8 * size.megabytes * MB) as volume,
        Watched(volume, tmp_path, job_of(tmp_path, size, *words), *faults(*texts)) as job,
    ):
        job.until("the checkpoint of step 0 is committed", STEP_SECONDS + size.megabytes / 50, lambda: 0 in job.steps)
        volume.limit(size.rate)
        job.until(f"the checkpoint of step {EVERY} is committed", 1.5 * size.all_seconds + STEP_SECONDS, lambda: EVERY in job.steps)
        own = {f"ps-{shard}": job.own_bytes(shard) for shard in (0, 1)}
        assert min(own.values()) > 0.9 * size.megabytes * MB, own
        for step, names in KILLS.items():
            job.until(f"the workers hold before step {step}", STEP_SECONDS, lambda step=step: job.last.step == step - 1)
            volume.forget()
            job.go(step)
            for name in names:
                job.struck(f"kill:{name}@step={step}", STEP_SECONDS)
            longest = allowed(size, own, names) + STEP_SECONDS
            job.until(f"step {step + 1} is passed after {names} died", longest, lambda step=step: job.last.step >= step + 1)
        volume.limit(None)
        summary = job.end(STEP_SECONDS + size.megabytes / 20)
        looks = job.looks
    assert summary["epochs"] == [3, 3] and sum(summary["restarts"].values()) == 4, summary["restarts"]
    assert summary["weights_sha256"] == plain.sha and summary["updates_lost"] == 0
    for recovery in summary["recoveries"]:
        assert recovery["checkpointStep"] == EVERY, recovery
        names = KILLS[int(recovery["fault"].partition("=")[2])]
        took, most = recovery["secondsToFirstPush"], allowed(size, own, names)
        print(f"{recovery['fault']}: first push after {took:.1f} s, allowed {most:.1f} s")
        assert took <= most, f"{recovery['fault']}: the first push came after {took:.1f} s, allowed are {most:.1f} s"
        assert_reading_seen(looks, recovery, own)


def test_a_checkpoint_that_takes_more_than_a_minute_commits(tmp_path: Path) -> None:
    """Workers train meanwhile, and the job says how much is written."""
    rate, steps = 140_000, 500
    size = Size(5, rate)
    words = ["bulky.py", str(size.megabytes), str(steps), "--pace", "0.3", "--signs", str(tmp_path)]
    path = manifest(tmp_path, words, checkpoint={"everySteps": EVERY, "interval": "1h"}, ps={"shardTimeoutSeconds": SHARD_TIMEOUT})
    with mounted(tmp_path / "disk", 64 * MB) as volume, Watched(volume, tmp_path, path) as job:
        job.until("the checkpoint of step 0 is committed", STEP_SECONDS, lambda: 0 in job.steps)
        volume.limit(rate)
        began = job.until("a shard writes", STEP_SECONDS, lambda: job.last.at if job.last.beyond else None)
        assert job.last.step >= 0
        job.until("a checkpoint is committed", 1.5 * size.all_seconds, lambda: max(job.steps) > 0)
        done = job.last.at
        during = job.since(began, done)
        assert done - began > 60, "this was to take longer than a minute"
        volume.limit(None)
        job.hurry()
        summary = job.end(STEP_SECONDS)
    assert during[-1].step - during[0].step > EVERY, "the workers waited for the disk"
    assert summary["restarts"] == {} and summary["epochs"] == [1, 1]
    for shard in (0, 1):
        told = [done for look in during if (done := look.progress(shard, "writing"))]
        assert [one for one, _ in told] == sorted(one for one, _ in told) and len(set(told)) >= 10, told
        assert all(0 <= one <= total for one, total in told)


def job_of(folder: Path, size: Size, *words: str) -> Path:
    command = ["bulky.py", str(size.megabytes), str(LAST), *words]
    checkpoint = {"everySteps": EVERY, "interval": "1h", "keep": 2}
    return manifest(folder, command, workers=size.workers, checkpoint=checkpoint, ps={"shardTimeoutSeconds": SHARD_TIMEOUT})


def allowed(size: Size, own: Mapping[str, int], names: Sequence[str]) -> float:
    """Seconds in which those who died together must be back: the volume gives its rate to all that they own."""
    return sum(own[name] for name in names) / size.rate * 1.2 + START_SECONDS


def assert_reading_seen(looks: Sequence[Look], recovery: Mapping[str, Any], own: Mapping[str, int]) -> None:
    """From its start to its return, shard 0's status says how much the lost shard has read."""
    name = recovery["process"].removeprefix("job-").rpartition("-")[0]
    killed, back = recovery["at"], recovery["at"] + recovery["secondsToFirstPush"]
    shard = int(name.removeprefix("ps-"))
    seen = [(look.at, told) for look in looks if killed < look.at <= back and (told := look.progress(shard, "reading"))]
    assert seen, f"{recovery['fault']}: nothing was said of its reading"
    times = [at for at, _ in seen]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times[0] - killed <= START_SECONDS and back - times[-1] <= SILENCE and max(gaps, default=0.0) <= SILENCE, (killed, times, back)
    done = [done for _, (done, _) in seen]
    assert done == sorted(done) and len(set(done)) >= 5, done
    assert all(total >= 0.95 * own[name] for _, (_, total) in seen), (seen[-1], own)
