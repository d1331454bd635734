"""`psjob run` with the real runtime: shards killed and stopped, a run stopped and resumed, and nothing lost that was promised."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.local_job import Ended, end, manifest, run, show, start

STEPS = 150
"""Of scripts/hard.py with two workers: 10 epochs of 15 rounds."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = run(folder, manifest(folder, "hard.py"))
    assert ended.code == 0 and ended.summary["steps"] == STEPS, ended.told
    return ended


def struck_behind_a_checkpoint(ended: Ended) -> None:
    """Each fault fell after two manifests with a step above 0 and with a step acknowledged behind the last."""
    for recovery in ended.summary["recoveries"]:
        assert recovery["manifests"] >= 2, recovery
        assert min(recovery["acknowledged"].values()) > recovery["checkpointStep"] > 0, recovery


def test_sync_weights_are_the_same_to_the_last_bit_after_both_shards_were_killed(undisturbed: Ended, tmp_path: Path) -> None:
    ended = run(tmp_path, manifest(tmp_path, "hard.py"), "--fault", "kill:ps-1@step=50", "--fault", "kill:ps-0@step=110")
    show(ended)
    assert ended.code == 0, ended.told
    assert ended.summary["epochs"] == [2, 2] and ended.summary["view"] == 3 and ended.summary["steps"] == STEPS
    struck_behind_a_checkpoint(ended)
    assert all(recovery["secondsToPassStep"] is not None for recovery in ended.summary["recoveries"])
    assert ended.summary["weights_sha256"] == undisturbed.summary["weights_sha256"] is not None
    assert [worker["rewinds"] for worker in ended.summary["workers"]] == [2, 2]


def test_a_stopped_shard_is_replaced_and_the_weights_are_the_same(undisturbed: Ended, tmp_path: Path) -> None:
    job = manifest(tmp_path, "hard.py")
    ended = run(tmp_path, job, "--fault", "stop:ps-1@step=50", "--set", "spec.ps.shardTimeoutSeconds=4")
    show(ended)
    assert ended.code == 0, ended.told
    assert ended.summary["epochs"] == [1, 2] and ended.summary["restarts"] == {"Unresponsive": 1}
    assert ended.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]


def test_a_killed_worker_comes_back_and_the_weights_are_the_same(undisturbed: Ended, tmp_path: Path) -> None:
    ended = run(tmp_path, manifest(tmp_path, "hard.py"), "--fault", "kill:worker-1@step=50")
    show(ended)
    assert ended.code == 0, ended.told
    assert ended.summary["epochs"] == [1, 1] and sum(ended.summary["restarts"].values()) == 1
    assert ended.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]


def test_ctrl_c_and_resume_end_with_the_weights_of_one_run(undisturbed: Ended, tmp_path: Path) -> None:
    job = manifest(tmp_path, "hard.py", "0.1", every=1000)
    process = start(tmp_path, job)
    limit = time.monotonic() + 200
    while (step(tmp_path) or 0) < 1:
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    stopped = end(tmp_path, process, 100)
    assert stopped.code == 130 and stopped.summary["result"] == "Suspended", stopped.told
    checkpoint = stopped.summary["checkpoint"]
    assert 0 < checkpoint["step"] < STEPS and checkpoint["step"] == stopped.summary["steps"], "the last checkpoint holds the last step"
    last = stopped.told.splitlines()[-1].split()
    assert last[:3] == ["psjob", "run", str(job)] and last[3] == "--resume"
    ended = run(tmp_path, job, "--resume", last[4])
    assert ended.code == 0 and ended.summary["run"] != stopped.summary["run"], ended.told
    assert ended.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]


def step(folder: Path) -> int | None:
    """Step of the job in `folder`, as its status tells."""
    try:
        (path,) = (folder / ".psjob").glob("*/status.json")
        progress = json.loads(path.read_text()).get("progress")
    except ValueError:
        return None
    return progress and int(progress["step"])


@pytest.mark.parametrize("shard", [0, 1])
def test_async_counts_nothing_twice_and_tells_what_was_lost(tmp_path: Path, shard: int) -> None:
    steps = 200
    job = manifest(tmp_path, "ledger.py", str(steps), "0.02", mode="async", every=25)
    ended = run(tmp_path, job, "--fault", f"kill:ps-{shard}@step=90")
    show(ended)
    assert ended.code == 0, ended.told
    struck_behind_a_checkpoint(ended)
    booked = ended.weights
    assert set(booked) == {"a", "b", "c", "d"}
    assert all(set(column.tolist()) <= {0.0, 1.0} for column in booked.values()), "a push counted twice"
    missing = {name: int((column == 0).sum()) for name, column in booked.items()}
    lost = ended.summary["updates_lost"]
    (recovery,) = ended.summary["recoveries"]
    since = sum(clock - recovery["checkpointStep"] for clock in recovery["acknowledged"].values())
    assert 0 < lost <= since + 2 * 10, "more was lost than was applied since the cut (and in the moment between look and kill)"
    assert sorted(set(missing.values())) == [0, lost], f"missing by tensor {missing}, told {lost}"
