"""A shard with hundreds of workers that are a socket each: they join, step and leave. Its threads and memory do not follow their number.

- A model of many small tensors: its table is longer than one frame of a hello.
- A model of one block on two shards: the second one holds nothing, and the job is as any other.
- A shard may open as many files as the system allows, and says so where that cannot be enough.
- The memory of a process is what the system says of it.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.peers.light_clients import Crowd, status
from psjob import contract
from psjob.api.attachable import MOST_TOLD, aliases, table_of
from psjob.checkpoint import manifest
from psjob.process.errors import Refused
from psjob.wire.frame import MAX_JSON, dump
from tests.live.live_shards import NEVER, Died, Shards, Worker, all_well, eventually, serving, together
from tests.live.shard_processes import Processes, processes
from tests.live.shard_processes import serving as files_serving
from tests.live.training import push_filled
from tests.support.runkeys import RUN
from tests.support.soaking import rotating, soak

pytestmark = pytest.mark.usefixtures("last_words")


STEPS = 3
BLOCKS, BLOCK = 2, 4096
CLIENT_KIB = 64
MEMORY = ("Threads", "RssAnon")
"""What is a shard's own: pages of libraries that it reads for the first time are not."""
DISABLED = {"intervalSeconds": 3600.0, "everySteps": None, "keep": 2, "disabled": True, "resumeFrom": None}


@pytest.mark.parametrize(("mode", "clients"), [("sync", 100), rotating("sync", 500), soak("async", 500)])
def test_many_clients_join_step_and_leave(tmp_path: Path, mode: str, clients: int) -> None:
    with processes(tmp_path, forked=True, shards=1, workers=clients, mode=mode, checkpoint=DISABLED) as run:
        shard = run.start_whole(0)
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
        run.start_whole(0)
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


NAME = "weight_of_a_rather_small_tensor"


class Many(nn.Module):
    """`count` parameters of two numbers each, the n-th of them n."""

    def __init__(self, count: int, name: str = NAME) -> None:
        super().__init__()
        for number in range(count):
            self.register_parameter(f"{name}_{number}", nn.Parameter(torch.full((2,), float(number))))


@pytest.mark.parametrize(("tensors", "name"), [(2_200, NAME * 16), rotating(12_000, NAME)], ids=["long names", "many tensors"])
def test_workers_with_a_table_of_many_frames_train(tmp_path: Path, tensors: int, name: str) -> None:
    models = [Many(tensors, name) for _ in range(2)]

    def act(worker: Worker) -> None:
        table = [spec.to_json() for spec in worker.session.layout.table]
        assert len(dump({"table": table})) > MAX_JSON
        push_filled(worker, 1.0)

    with serving(tmp_path, workers=2, shards=2) as shards:
        workers = [Worker(shards, rank, model, torch.optim.SGD(model.parameters(), lr=0.5)) for rank, model in enumerate(models)]
        all_well(workers, act)
    for model in models:
        assert [float(p[0]) for p in model.state_dict().values()] == [number - 0.5 for number in range(tensors)]


def test_a_table_that_no_hello_can_carry_is_refused_with_the_remedy() -> None:
    model = Many(60, "x" * (MOST_TOLD // 50))
    _, table = table_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(Refused, match=rf"of 60 parameters are \d+ bytes, at most {MOST_TOLD} can be sent .*shorter names"):
        aliases(model, table)


EVERY_2 = replace(NEVER, every_steps=2)
CLIENT_STEPS = 64


def counting(shards: Shards, rank: int) -> Worker:
    model = nn.Linear(10, 3)
    for p in model.parameters():
        nn.init.zeros_(p)
    return Worker(shards, rank, model, torch.optim.SGD(model.parameters(), lr=1.0))


def train(worker: Worker, killed_in: Shards | None = None) -> None:
    """To the end, or until a checkpoint is committed. A cut lies ahead of who is not waited for: nobody stands still for one."""
    for step in range(worker.session.clock, CLIENT_STEPS):
        worker.edge(step)
        if killed_in is not None:
            if committed(killed_in) >= 2:
                for one in killed_in.guests:
                    one.die()
                raise Died
            time.sleep(0.02)
        push_filled(worker, -1.0)


def committed(shards: Shards) -> int:
    newest, _ = manifest.newest_manifest(shards.folder, "first")
    return -1 if newest is None else newest.step


@pytest.mark.parametrize("mode", ["sync", "async", "bounded"])
def test_a_shard_without_a_block_takes_part_in_checkpoints_and_restores(tmp_path: Path, mode: str) -> None:
    with serving(tmp_path, shards=2, run="first", mode=mode, checkpoint=EVERY_2) as shards:
        raised = together([counting(shards, rank) for rank in range(2)], lambda worker: train(worker, shards))
        assert all(isinstance(error, Died) for error in raised), raised
        made, problems = manifest.newest_manifest(shards.folder, "first")
        assert made is not None and made.step >= 2 and not problems and set(made.assignment) == {0}
    with serving(tmp_path, shards=2, run="second", mode=mode, checkpoint=replace(EVERY_2, resume_from=str(shards.folder))) as again:
        workers = [counting(again, rank) for rank in range(2)]
        all_well(workers, train)
        assert again.wait_ended() == [0, 0]
        last, problems = manifest.newest_manifest(again.folder, "second")
    assert last is not None and last.final and not problems
    ended = {float(p.detach().flatten()[0]) for worker in workers for p in worker.model.parameters()}
    assert ended == {float(CLIENT_STEPS)} if mode == "sync" else max(ended) == 2.0 * CLIENT_STEPS


def limited(soft: int, hard: int) -> tuple[str, ...]:
    """A shard whose limits are these when it begins."""
    code = f"import resource, runpy; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))"
    return "-c", f"{code}; runpy.run_module('psjob.shard', run_name='__main__')"


def open_files(run: Processes) -> tuple[int, int]:
    """(soft, hard) of shard 0's process."""
    return resource.prlimit(files_serving(run.started[0]), resource.RLIMIT_NOFILE)


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


MIB = 1 << 20


ALONE = """
from psjob.process import system
before = system.resident_memory()
held = bytearray(b"x") * (64 << 20)
now, peak = system.resident_memory(), system.peak_memory()
del held
print(before, now, peak, system.resident_memory(), system.peak_memory())
"""


def test_memory_is_what_the_system_says() -> None:
    """Memory that is written to counts at once, and in the peak after it has gone. In a process without other threads."""
    told = subprocess.run([sys.executable, "-c", ALONE], check=True, capture_output=True, text=True, timeout=60).stdout
    before, now, peak, after, still = (int(number) for number in told.split())
    assert now >= before + 60 * MIB and peak >= now - MIB
    assert after < now - 56 * MIB and still >= peak - 4 * MIB  # kernels count in lots
