"""Async, shards killed: nothing counts twice, and what is missing is what the shard reports as lost (measure 3).

- Kills and freezes drawn by seed: process, moment and number at once, in modes, codecs, transports and with tables (real processes).

A seed is one job in which one to five processes are struck at one moment or two. Where all go back together the final weights have the
bits of an undisturbed job. In every mode no push counts twice. In async and bounded what is missing is what the shards report as lost.
"""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from psjob.checkpoint.manifest import read_manifest
from tests.e2e.workloads import ledger, storm
from tests.e2e.workloads.running import Ran, check_recovery, check_torn, faults, manifest, train
from tests.support.soaking import rotating, soak

pytestmark = pytest.mark.timeout(1500)

WORKERS, SHARDS, STEPS = 2, 2, 220
CHECKPOINTS = {"everySteps": 25, "periodSeconds": 3600, "keep": 100}


def run(folder: Path, *what: str, gates: str, transport: str = "auto", codec: str = "none") -> Ran:
    training = {"mode": "async", "transport": transport, "compression": {"push": codec, "pull": codec}}
    words = ["ledger.py", str(STEPS), "0.02", gates]
    ran = train(folder, manifest(folder, words, workers=WORKERS, shards=SHARDS, training=training, checkpoint=CHECKPOINTS), *faults(*what))
    assert ran.summary["transport"] == ("tcp" if transport == "tcp" else "shared")
    return ran


@pytest.mark.parametrize(
    ("shard", "transport", "codec"),
    [
        (1, "auto", "none"),
        rotating(0, "auto", "none"),
        rotating(0, "tcp", "none"),
        rotating(1, "tcp", "bf16"),
        soak(1, "tcp", "none"),
    ],
)
def test_what_a_killed_shard_lost_is_what_is_missing(tmp_path: Path, shard: int, transport: str, codec: str) -> None:
    check(run(tmp_path, f"kill:shard-{shard}@step=88", gates="58:50", transport=transport, codec=codec), shard)


@pytest.mark.parametrize(
    ("shard", "transport"),
    [rotating(0, "tcp"), *(soak(shard, way) for shard, way in ((0, "auto"), (1, "auto"), (1, "tcp")))],
)
def test_a_shard_killed_while_it_writes_a_checkpoint_loses_what_it_says(tmp_path: Path, shard: int, transport: str) -> None:
    """It goes back to the checkpoint before; the workers, which had marked, are released."""
    ran = run(tmp_path, f"kill:shard-{shard}@checkpoint=3", gates="", transport=transport)
    check_torn(ran, shard)
    check(ran, shard)


def check(ran: Ran, shard: int) -> None:
    (recovery,) = ran.summary["recoveries"]
    check_recovery(recovery)
    assert sum(ran.summary["restarts"].values()) == 1, "only the killed shard was started again"
    table = ledger.counted(ran.weights(), WORKERS, SHARDS)
    done = dict.fromkeys(range(WORKERS), STEPS)
    for blocks in table.values():
        for block in blocks:
            assert all(count <= done[rank] for rank, count in enumerate(block)), f"a push counted twice: {table}"
    assert len(table[0]) > 1 and len(table[1]) > 1
    other = 1 - shard
    assert all(block == [STEPS] * WORKERS for block in table[other]), f"the shard that lived has lost something: {table[other]}"
    missing = {STEPS * WORKERS - sum(block) for block in table[shard]}
    assert len(missing) == 1, f"blocks of one shard lost differently: {table[shard]}"
    (lost,) = missing
    assert lost == lost_of(ran, shard) == ran.summary["updates_lost"] > 0
    assert lost_of(ran, other) == 0
    status = json.loads((ran.folder / "status.json").read_text())
    assert status["lastRecovery"]["updatesLost"] == status["restarts"]["updatesLost"] == lost, "the status tells another number"
    assert status["lastRecovery"]["durationSeconds"] > 0 and "interruption" not in status
    since = applied_since_the_cut(ran, recovery)
    print(f"lost {lost} of {since} updates that came after the checkpoint of step {recovery['checkpointStep']}")
    assert lost <= since


def lost_of(ran: Ran, shard: int) -> int:
    """The shard's own counter, from its last words."""
    attempt = ran.summary["attempts"][shard]
    return int(ran.last_words(f"job-shard-{shard}-a{attempt}")["status"]["counters"]["updatesLost"])


def applied_since_the_cut(ran: Ran, recovery: dict[str, Any]) -> int:
    """Most updates that the dead shard can have applied since the last known checkpoint: what the workers had back, and one each."""
    (path,) = ran.folder.glob(f"manifest-v*-s{recovery['checkpointStep']:012d}.json")
    cut = {int(rank): int(entry["clock"]) for rank, entry in read_manifest(ran.folder, path.name).workers.items()}
    total = 0
    for rank in range(WORKERS):
        words = [line.split() for line in ran.log(f"job-worker-{rank}-").splitlines() if line.startswith("step ")]
        back = [int(step) for _, step, _, at in words if float(at) <= recovery["at"]]
        total += max(back) + 1 - cut[rank]
    return total


@pytest.mark.rotating
def test_the_ledger_of_a_killed_shard_is_right_with_overlap(tmp_path: Path) -> None:
    """What was sent before a step that never came counts nowhere."""
    words = ["ledger.py", str(STEPS), "0.02", "58:50", "overlap"]
    job = manifest(tmp_path, words, workers=WORKERS, shards=SHARDS, training={"mode": "async"}, checkpoint=CHECKPOINTS)
    check(train(tmp_path, job, *faults("kill:shard-1@step=88")), 1)


STORM_WORKERS, STORM_SHARDS, STORM_STEPS, PACE = 3, 2, 200, 0.02
MODES: list[dict[str, Any]] = [
    {"mode": "sync"}, {"mode": "async"}, {"mode": "bounded", "bounded": {"staleness": 3}}, {"mode": "sync"},
    {"mode": "async"}, {"mode": "local", "local": {"innerSteps": 10}}, {"mode": "softsync", "softsync": {"splits": 3}},
    {"mode": "sync", "sync": {"backupWorkers": 1}},
]  # fmt: skip
EXACT = ("none", "bf16", "fp16")
"""Codecs that carry the ledger's numbers whole."""
QUICK = (6, 7, 8, 9, 13, 34)
"""Each mode once."""
LONG = [seed for seed in range(180) if seed not in QUICK]
_undisturbed: dict[str, str] = {}


@dataclass(frozen=True)
class Plan:
    """What one seed does."""

    training: dict[str, Any]
    table: bool
    hits: tuple[str, ...]

    @property
    def repeats(self) -> bool:
        """Has an undisturbed job the same bits?"""
        return self.training["mode"] in ("sync", "local") and "sync" not in self.training

    @property
    def codec(self) -> str:
        return str(self.training["compression"]["push"])


def plan(seed: int) -> Plan:
    """Faults at one moment or two; those of one moment hit different processes."""
    rng = random.Random(7919 * seed + 1)
    training = dict(MODES[seed % len(MODES)])
    lossy = training["mode"] == "sync" and "sync" not in training
    codec = rng.choice(["none", "none", "bf16", "fp16", *(["int8", "topk", "randomk"] if lossy else [])])
    local = training["mode"] == "local"
    training["compression"] = {"push": "none" if local else codec, "pull": "none"}
    training["transport"] = rng.choice(["auto", "tcp"])
    targets = [f"shard-{index}" for index in range(STORM_SHARDS)] + [f"worker-{index}" for index in range(STORM_WORKERS)]
    hits: list[str] = []
    steps = sorted(rng.sample(range(40, 150), rng.randint(1, 2)))
    for moment, step in enumerate(steps):
        for target in rng.sample(targets, rng.randint(1, 3)):
            what = "stop" if target.startswith("shard") and rng.random() < 0.3 else "kill"
            saves = target.startswith("shard") and rng.random() < 0.25
            hits.append(f"{what}:{target}@checkpoint={moment + 2}" if saves else f"{what}:{target}@step={step // 10 if local else step}")
    tables = training["mode"] in ("sync", "async", "bounded") and "sync" not in training
    return Plan(training, tables and rng.random() < 0.5, tuple(hits))


def job(folder: Path, made: Plan) -> Path:
    every = 2 if made.training["mode"] == "local" else 20
    words = ["storm.py", str(STORM_STEPS), str(PACE), *(["table"] if made.table else [])]
    # A busy machine takes longer to answer, so it is asked for an answer soon only if a shard is stopped.
    of_shards = {"progressDeadlineSeconds": 3} if any(hit.startswith("stop:") for hit in made.hits) else {}
    return manifest(
        folder, words, workers=STORM_WORKERS, shards=STORM_SHARDS, training={"seed": 3, **made.training}, of_shards=of_shards,
        checkpoint={"everySteps": every, "periodSeconds": 3600}, runPolicy={"backoffLimit": 50},
    )  # fmt: skip


def undisturbed(tmp_path: Path, made: Plan) -> str:
    """The bits of the same job without a fault."""
    words = {key: value for key, value in made.training.items() if key != "transport"}
    key = repr((sorted(words.items(), key=str), made.table))
    if key not in _undisturbed:
        _undisturbed[key] = train(tmp_path / "calm", job(tmp_path / "calm", made)).sha
    return _undisturbed[key]


def lost(ran: Ran) -> int:
    return int(ran.summary["updates_lost"])


def check_storm(ran: Ran, made: Plan) -> None:
    """The ledger: nothing twice; nothing missing that was not told."""
    mode = made.training["mode"]
    if mode not in ("sync", "async", "bounded") or "sync" in made.training or made.codec not in EXACT:
        return
    weights = ran.weights()
    counts = storm.counted(weights, STORM_WORKERS, STORM_SHARDS, made.table, scale=STORM_WORKERS if mode == "sync" else 1)
    for (shard, rank), found in counts.items():
        assert len(found) == 1, f"blocks of shard {shard} hold different numbers of pushes of worker {rank}: {found}"
    missing = {place: STORM_STEPS - found.pop() for place, found in counts.items()}
    assert all(count >= 0 for count in missing.values()), f"a push counted twice: {missing}"
    struck = [hit.partition(":")[2].partition("@")[0] for hit in made.hits if ":shard-" in hit]
    if mode == "sync":
        assert not any(missing.values()) and lost(ran) == 0, missing
    elif len(set(struck)) == len(struck):  # of a shard that is struck twice, the first loss may be told by nobody
        assert sum(missing.values()) == lost(ran), f"missing by (shard, rank): {missing}; told: {lost(ran)}"
    if made.table and mode == "sync":
        rows = weights["counts.weight"].flatten()
        assert rows[:STORM_WORKERS].tolist() == [STORM_STEPS] * STORM_WORKERS and int(rows[storm.SHARED]) == STORM_WORKERS * STORM_STEPS


def survive(tmp_path: Path, seed: int) -> list[float]:
    """One seed; returns the seconds to the first push of each fault."""
    made = plan(seed)
    print(f"seed {seed}: {made}")
    ran = train(tmp_path / "hit", job(tmp_path / "hit", made), *faults(*made.hits))
    assert ran.summary["result"] == "Complete"
    check_storm(ran, made)
    if made.repeats:
        assert ran.sha == undisturbed(tmp_path, made), "the bits of an undisturbed job"
    return [recovery["secondsToFirstPush"] for recovery in ran.summary["recoveries"] if recovery["secondsToFirstPush"] is not None]


@pytest.mark.parametrize("seed", [rotating(seed) for seed in QUICK])
def test_faults_in_every_mode_lose_nothing_and_count_nothing_twice(tmp_path: Path, seed: int) -> None:
    survive(tmp_path, seed)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mode", ["sync", "async", "others"])
def test_five_hundred_faults(tmp_path: Path, mode: str) -> None:
    """Prints the median time to the first push, by mode."""
    seconds: list[float] = []
    for seed in LONG:
        name = plan(seed).training["mode"]
        if (name if name in ("sync", "async") else "others") == mode:
            seconds += survive(tmp_path / str(seed), seed)
    print(f"{mode}: {len(seconds)} faults, first push after {statistics.median(seconds):.2f} s (median)")
