"""A shard with hundreds of workers that are a socket each: they join, step and leave. Its threads and memory do not follow their number."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.peers.light_clients import Crowd, status
from psjob import contract
from tests.live.live_shards import eventually
from tests.live.shard_processes import processes
from tests.runkeys import RUN
from tests.soaking import rotating, soak

STEPS = 3
BLOCKS, BLOCK = 2, 4096
CLIENT_KIB = 64
MEMORY = ("Threads", "RssAnon")
"""What is a shard's own: pages of libraries that it reads for the first time are not."""
DISABLED = {"intervalSeconds": 3600.0, "everySteps": None, "keep": 2, "disabled": True, "resumeFrom": None}


@pytest.mark.parametrize(("mode", "clients"), [("sync", 100), rotating("sync", 500), soak("async", 500)])
def test_many_clients_join_step_and_leave(tmp_path: Path, mode: str, clients: int) -> None:
    with processes(tmp_path, forked=True, shards=1, workers=clients, mode=mode, checkpoint=DISABLED) as run:
        shard = run.start(0)
        assert eventually(lambda: run.get(0, contract.STARTED_PATH)[0] == 200, 60.0)
        crowd = Crowd(("127.0.0.1", run.config["shards"][0]["port"]), "run-1", RUN["workers"], clients, mode, BLOCKS, BLOCK)
        try:
            _, before = status(shard.pid, MEMORY)
            crowd.join()
            for _ in range(STEPS):
                crowd.step()
            _, after = status(shard.pid, MEMORY)
            counters = run.get(0, seconds=20.0)[1]["counters"]
            assert (counters["applied"], counters["duplicatesRefused"]) == (clients * STEPS, 0)
            threads = 8 + max(2, len(os.sched_getaffinity(0)))
            assert eventually(lambda: status(shard.pid)[0] <= threads), "a status request has a thread of its own while it lasts"
            assert after - before <= clients * (CLIENT_KIB + BLOCKS * BLOCK // 1024), "KiB; a client's gradients are apart"
            crowd.leave()
            assert shard.wait(60) == 0
        finally:
            crowd.close()


def test_a_client_that_reads_nothing_holds_nobody_up(tmp_path: Path) -> None:
    """Answers to it wait in its own stream, while the others step."""
    with processes(tmp_path, forked=True, shards=1, workers=4, mode="async", checkpoint=DISABLED) as run:
        run.start(0)
        assert eventually(lambda: run.get(0, contract.STARTED_PATH)[0] == 200, 60.0)
        crowd = Crowd(("127.0.0.1", run.config["shards"][0]["port"]), "run-1", RUN["workers"], 4, "async", 8, 1 << 20)
        try:
            crowd.join()
            deaf = crowd.clients.pop()
            crowd.ignore(deaf)
            for _ in range(8):  # 64 MiB of answers, of which no system buffers the half
                crowd.push(deaf)
            for _ in range(4):
                crowd.step(30.0)
            assert run.get(0, seconds=20.0)[1]["counters"]["applied"] == 3 * 4 + 8
        finally:
            deaf.sock.close()
            crowd.close()
