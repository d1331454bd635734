"""Gigabytes on a volume that takes minutes for them, in small: checkpoints commit, and a lost shard is back when it has read its own."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.watched import Look, Watched
from tests.e2e.workloads.running import faults, manifest, train
from tests.support.disks import mounted

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(3600)]
MB = 1_000_000
SHARD_TIMEOUT = 5
EVERY = 20
LAST = 30
"""Steps of a run with kills: one checkpoint is due between its begin and its end."""
KILLS = {23: ("shard-0", "shard-1"), 25: ("shard-0",), 27: ("shard-1",)}
"""By step: who is killed there. Those that die together come first, while a failure is answered soon: each one more doubles the wait."""
BACKOFF_SECONDS = 10.0
"""A failure is answered at once when the n before it are this long ago, times 2 to the power n - 1."""
STEP_SECONDS = 60.0
"""For a few steps of a small model, or a start, on a busy machine."""
START_SECONDS = 8.0
"""What a return may take beside its reading."""
LAST_WORD = 1.0
"""Seconds after a kill in which a step may still be told that was complete before it."""
SILENCE = 3.0
"""Seconds between two looks at a reading shard."""


@dataclass(frozen=True)
class Size:
    """How much is written and read, and how fast."""

    megabytes: int
    """Of weights."""
    rate: int
    """Bytes a second."""
    moments: int
    """The first so many of KILLS happen."""
    workers: int = 2
    adam: bool = False

    @property
    def kills(self) -> dict[int, tuple[str, ...]]:
        """By step."""
        return dict(islice(KILLS.items(), self.moments))

    @property
    def bytes(self) -> int:
        """Of a checkpoint: weights and momentum, with Adam two tensors more."""
        return self.megabytes * MB * (4 if self.adam else 2)

    @property
    def seconds(self) -> float:
        """To write or read a whole checkpoint."""
        return self.bytes / self.rate

    @property
    def steps_seconds(self) -> float:
        """For a few steps of this model, or a start, on a busy machine."""
        return STEP_SECONDS + self.megabytes / 10


SMALL = Size(100, 10 * MB, moments=2)
LARGE = Size(1500, 50 * MB, moments=3, workers=1, adam=True)
"""All processes of it fit in 18 GB; with SGD 6 GB of checkpoint would need 25."""


@pytest.mark.soak
@pytest.mark.serial
@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["200MB", "6GB"])
def test_killed_shards_are_back_when_they_have_read_their_own(tmp_path: Path, size: Size) -> None:
    (tmp_path / "plain").mkdir()
    plain = train(tmp_path / "plain", job_of(tmp_path / "plain", size))
    texts = [f"kill:{name}@step={step}" for step, names in size.kills.items() for name in names]
    words = ("--hold", ",".join(map(str, size.kills)), "--signs", str(tmp_path))
    with (
        mounted(tmp_path / "disk", 5 * size.bytes) as volume,
        Watched(volume, tmp_path, job_of(tmp_path, size, *words), *faults(*texts)) as job,
    ):
        job.until("the checkpoint of step 0 is committed", size.steps_seconds, lambda: 0 in job.steps)
        volume.limit(size.rate)
        limited = time.time()
        job.until(f"the checkpoint of step {EVERY} is committed", 1.5 * size.seconds + size.steps_seconds, lambda: EVERY in job.steps)
        writing = job.since(limited)
        own = {f"shard-{shard}": job.own_bytes(shard) for shard in (0, 1)}
        assert min(own.values()) > 0.45 * size.bytes, own
        failures, struck = 0, 0.0
        for step, names in size.kills.items():
            job.stay(max(0.0, struck + BACKOFF_SECONDS * 2**failures / 2 - time.time()))
            struck = kill_at(job, step, size.steps_seconds, allowed(size, own, names))
            failures += len(names)
        volume.limit(None)
        summary = job.end(2 * size.steps_seconds)
        looks = job.looks
    assert [recovery["fault"] for recovery in summary["recoveries"]] == texts
    wrong = unwritten(writing, 5)
    wrong += [sentence for recovery in summary["recoveries"] for sentence in slow_or_unseen(size, looks, recovery, own)]
    attempts = [1 + sum(name == f"shard-{shard}" for names in size.kills.values() for name in names) for shard in (0, 1)]
    if summary["attempts"] != attempts or sum(summary["restarts"].values()) != len(texts):
        wrong.append(f"one restart for each of {texts} was wanted: shards are at {summary['attempts']}, {summary['restarts']}")
    if summary["weights_sha256"] != plain.sha or summary["updates_lost"]:
        wrong.append(f"weights differ from those of an undisturbed run, {summary['updates_lost']} updates are lost")
    assert not wrong, "\n".join(wrong)


@pytest.mark.soak
def test_a_checkpoint_that_takes_more_than_a_minute_commits(tmp_path: Path) -> None:
    """Workers train meanwhile, and the job says how much is written."""
    rate, steps = 140_000, 500
    size = Size(5, rate, moments=0)
    words = ["bulky.py", str(size.megabytes), str(steps), "--pace", "0.3", "--signs", str(tmp_path)]
    path = manifest(
        tmp_path,
        words,
        checkpoint={"everySteps": EVERY, "periodSeconds": 3600, "keep": 2},
        of_shards={"progressDeadlineSeconds": SHARD_TIMEOUT},
    )
    with mounted(tmp_path / "disk", 256 * MB) as volume, Watched(volume, tmp_path, path) as job:
        job.until("the checkpoint of step 0 is committed", STEP_SECONDS, lambda: 0 in job.steps)
        volume.limit(rate)
        began = job.until("a shard writes", STEP_SECONDS, lambda: job.last.at if job.last.beyond else None)
        assert job.last.step >= 0
        job.until("a checkpoint is committed", 1.5 * size.seconds, lambda: max(job.steps) > 0)
        done = job.last.at
        during = job.since(began, done)
        assert done - began > 60, "this was to take longer than a minute"
        volume.limit(None)
        job.hurry()
        summary = job.end(STEP_SECONDS)
    assert during[-1].step - during[0].step > EVERY, "the workers waited for the disk"
    assert summary["restarts"] == {} and summary["attempts"] == [1, 1]
    assert not unwritten(during, 1)


def unwritten(looks: Sequence[Look], values: int) -> list[str]:
    """What was wrong with the words on a checkpoint's writing: of each shard at least so many different ones were to be heard."""
    wrong = []
    for shard in (0, 1):
        told = [entry for look in looks if (entry := look.progress(shard, "writing"))]
        done = [one for one, _ in told]
        if done != sorted(done) or len(set(done)) < values or any(one > total for one, total in told):
            wrong.append(f"shard-{shard}: of its writing was told {told}")
    return wrong


def job_of(folder: Path, size: Size, *words: str) -> Path:
    command = ["bulky.py", str(size.megabytes), str(LAST), *(["--adam"] if size.adam else []), *words]
    checkpoint = {"everySteps": EVERY, "periodSeconds": 3600, "keep": 2}
    return manifest(folder, command, workers=size.workers, checkpoint=checkpoint, of_shards={"progressDeadlineSeconds": SHARD_TIMEOUT})


def kill_at(job: Watched, step: int, steps_seconds: float, back_seconds: float) -> float:
    """Let the workers make `step`, at which shards die with nothing of the volume in memory; wait until the job has continued.

    Returns the unix time of the last death.
    """
    job.until(f"the workers hold before step {step}", steps_seconds, lambda: job.last.step == step - 1)
    job.volume.forget()
    job.go(step)
    struck = max(job.struck(f"kill:{name}@step={step}", steps_seconds) for name in KILLS[step])
    job.until(f"step {step + 1} is passed again", back_seconds + steps_seconds, lambda: job.last.passed(step + 1, struck + LAST_WORD))
    return struck


def allowed(size: Size, own: Mapping[str, int], names: Sequence[str]) -> float:
    """Seconds in which those who died together must be back: the volume gives its rate to all that they own."""
    return sum(own[name] for name in names) / size.rate * 1.2 + START_SECONDS


def slow_or_unseen(size: Size, looks: Sequence[Look], recovery: Mapping[str, Any], own: Mapping[str, int]) -> list[str]:
    """What was wrong with one return. From its start to its end shard 0's status is to say how much the lost shard has read."""
    fault, killed = recovery["fault"], recovery["at"]
    name = fault.removeprefix("kill:").partition("@")[0]
    most, took = allowed(size, own, KILLS[int(fault.partition("=")[2])]), recovery["secondsToFirstPush"] or float("inf")
    print(f"{fault}: first push after {took:.1f} s, allowed {most:.1f} s")
    wrong = [] if took <= most else [f"{fault}: the first push came after {took:.1f} s, allowed are {most:.1f} s"]
    if recovery["checkpointStep"] != EVERY:
        wrong.append(f"{fault}: it fell after the checkpoint of step {recovery['checkpointStep']}")
    seen = [
        (look.at - killed, *told) for look in looks if 0 < look.at - killed <= took and (told := look.progress(shard_of(name), "reading"))
    ]
    if not seen:
        return [*wrong, f"{fault}: nothing was said of its reading"]
    times, done, totals = zip(*seen, strict=True)
    end = times[-1] if done[-1] >= totals[-1] else took  # one that has all waits for the others
    if times[0] > START_SECONDS or max(later - earlier for earlier, later in pairwise([*times, end])) > SILENCE:
        wrong.append(f"{fault}: its reading was told only at {[round(at, 1) for at in times]} s of {took:.1f} s")
    if list(done) != sorted(done) or len(set(done)) < 5 or min(totals) < 0.95 * own[name]:
        wrong.append(f"{fault}: of {own[name]} bytes to read were told {list(zip(done, totals, strict=True))}")
    return wrong


def shard_of(name: str) -> int:
    return int(name.removeprefix("shard-"))
