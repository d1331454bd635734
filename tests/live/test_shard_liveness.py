"""What a shard's probes say of its process: alive while it makes progress, however slow the disk is, and not alive when it hangs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from psjob import contract
from tests.live.live_shards import eventually
from tests.live.shard_processes import Processes, processes, pushing, serving

TIMEOUT = 2.0
READS = 7.0
"""Seconds that the first read of a block's bytes takes: one system call."""
SLOW = f"""
import os, sys, time
read, left = os.readv, [{READS}]

def slow(fd, buffers):
    if ".safetensors" in os.readlink(f"/proc/self/fd/{{fd}}") and left:
        time.sleep(left.pop())
    return read(fd, buffers)

os.readv = slow
from psjob.shard.__main__ import main
sys.exit(main())
"""
HANGS = """
import os, sys, threading, time
from psjob.shard import control

made = control.Control.__init__

def init(self, *given):
    made(self, *given)
    threading.Thread(target=hang, args=(self,), daemon=True).start()

def hang(self):
    while not os.path.exists(os.environ["HANGS"]):
        time.sleep(0.05)
    self._handling.acquire()

control.Control.__init__ = init
from psjob.shard.__main__ import main
sys.exit(main())
"""
"""When a file is there, a lock is taken and never given back."""


def checkpointed(run: Processes) -> bool:
    coordinator = run.get(0)[1].get("coordinator") or {}
    return bool((coordinator.get("checkpoint") or {}).get("step"))


def test_a_shard_that_reads_for_longer_than_its_timeout_is_alive_and_says_how_far_it_is(tmp_path: Path) -> None:
    with processes(tmp_path, forked=True, shardTimeoutSeconds=TIMEOUT) as run:
        run.start(0)
        lost = run.start(1)
        with pushing(run):
            assert eventually(lambda: checkpointed(run), 60.0)
            lost.kill()
            lost.wait()
            run.start(1, attempt=2, term=2, program=("-c", SLOW))
            looks: list[tuple[int, int, dict[str, Any]]] = []

            def serves() -> bool:
                health, status, started = run.get(1, contract.HEALTH_PATH)[0], run.get(1)[1], run.get(1, contract.STARTED_PATH)[0]
                if health:
                    looks.append((health, started, status))
                time.sleep(0.1)
                return status.get("state") == "serving"

            assert eventually(serves, 60.0)
    assert {health for health, _, _ in looks} == {200}
    reading = [status for _, _, status in looks if (status.get("transfer") or {}).get("doing") == "reading"]
    assert len(reading) > 1 and {status["state"] for status in reading} == {"restoring"}
    assert max(status["transfer"]["total"] for status in reading) > 0
    after = [started for _, started, status in looks if status in reading]
    assert set(after) == {200}, "it is asked: from here on its health counts, and a restore may take hours"


def test_a_shard_that_nobody_could_ask_has_not_started(tmp_path: Path) -> None:
    with processes(tmp_path, forked=True) as run:
        run.start(1)
        assert eventually(lambda: run.get(1, contract.STARTED_PATH)[0] == 503, 60.0), "there is no coordinator"
        assert run.get(1, contract.HEALTH_PATH)[0] == 200
        run.start(0)
        assert eventually(lambda: run.get(1, contract.STARTED_PATH)[0] == 200, 60.0)
        assert run.get(0, contract.STARTED_PATH)[0] == 200


def test_a_shard_whose_control_hangs_on_a_lock_is_not_alive(tmp_path: Path) -> None:
    sign = tmp_path / "hang"
    with processes(tmp_path, forked=True, shardTimeoutSeconds=TIMEOUT) as run:
        run.start(0, program=("-c", HANGS), HANGS=str(sign))
        assert eventually(lambda: run.get(0, contract.HEALTH_PATH)[0] == 200, 60.0)
        sign.touch()
        assert eventually(lambda: run.get(0, contract.HEALTH_PATH)[0] == 503, 30.0)
        assert run.get(0, contract.HEALTH_PATH)[1] == {"alive": False}, "which is all that a stranger hears"
        assert "reports no progress; this shard answers" in run.log(0)


def test_a_stopped_shard_gives_no_answer_and_is_alive_again_when_it_goes_on(tmp_path: Path) -> None:
    with processes(tmp_path, forked=True, shardTimeoutSeconds=TIMEOUT) as run:
        process = run.start(0)
        assert eventually(lambda: run.get(0, contract.HEALTH_PATH)[0] == 200, 60.0)
        os.kill(serving(process), signal.SIGSTOP)
        assert run.get(0, contract.HEALTH_PATH)[0] == 0
        time.sleep(2 * TIMEOUT)
        os.kill(serving(process), signal.SIGCONT)
        assert eventually(lambda: run.get(0, contract.HEALTH_PATH)[0] == 200, 30.0)
        assert process.poll() is None
