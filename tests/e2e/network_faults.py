"""Faults of a network as phases of a job, and the jobs that meet them."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.e2e.workloads.running import Ran, manifest, train
from tests.support.netjob import STEPS_ON, NetJob, Phase, Went, members, play
from tests.support.netns import Dropped, Network

WORKERS, SHARDS = 2, 2
PACE = 0.1
GOES_ON = 15.0
"""Seconds within which a job must continue."""
HOLDS = 2.0
"""A worker that makes no step for so many seconds, while nothing is wrong, holds its pushes."""
TRAINING = {"transport": "tcp", "seed": 3}
CHECKPOINTS = {"periodSeconds": 1}


def partition(one: str, other: str, **how: object) -> Phase:
    return Phase(f"{one} and {other} parted", lambda job: job.network.partition(one, other), **how)  # type: ignore[arg-type]


def cut(source: str, target: str, **how: object) -> Phase:
    return Phase(f"nothing from {source} to {target}", lambda job: job.network.cut(source, target), **how)  # type: ignore[arg-type]


def half_open(name: str, peer: str, **how: object) -> Phase:
    """Connections end only at `name`, and the reset that would tell `peer` is lost."""

    @contextlib.contextmanager
    def fault(job: NetJob) -> Iterator[Dropped]:
        with job.network.no_ends(name) as dropped:
            assert job.network.abort(name, peer) > 0, f"{name} has no connection with {peer}"
            yield dropped

    return Phase(f"{name} lost its connections with {peer} unheard", fault, seconds=0, **how)  # type: ignore[arg-type]


def half_open_while_held(rank: int, shard: int, other: int, **how: object) -> Phase:
    """As `half_open`, of a worker that holds its pushes for a checkpoint until rank `other`, which makes no step, has come too."""
    worker, peer = f"worker-{rank}", f"shard-{shard}"

    @contextlib.contextmanager
    def fault(job: NetJob) -> Iterator[Dropped]:
        with job.network.no_ends(peer) as dropped:
            with job.paused(other):
                job.wait_for(f"{worker} to hold its pushes", lambda: time.time() - max(at for _, at in job.steps(rank)) > HOLDS)
                assert job.network.abort(peer, worker) > 0, f"{peer} has no connection with {worker}"
            yield dropped

    return Phase(f"{peer} lost its connections with {worker}, which holds its pushes, unheard", fault, seconds=0, **how)  # type: ignore[arg-type]


def killed(shard: int, **how: object) -> Phase:
    """The process of a shard dies and nobody hears of it; the time counts from when its successor, which has the same address, serves."""
    name = f"shard-{shard}"

    @contextlib.contextmanager
    def fault(job: NetJob) -> Iterator[Dropped]:
        with job.network.no_ends(name) as dropped:
            before = job.network[name].processes()
            job.kill(name)
            job.wait_for(
                f"a successor of {name}",
                lambda: not before & job.network[name].processes() and job.status(shard).get("state") == "serving",
            )
            yield dropped

    return Phase(f"{name} killed unheard", fault, seconds=0, **how)  # type: ignore[arg-type]


def lossy(percent: int, **how: object) -> Phase:
    """Of a hundred packets between any two members so many are lost."""

    @contextlib.contextmanager
    def fault(job: NetJob) -> Iterator[Dropped]:
        with job.network.loss(percent, *pairs()) as dropped:
            yield dropped

    return Phase(f"{percent} % of the packets lost", fault, **how)  # type: ignore[arg-type]


def late(seconds: float, **how: object) -> Phase:
    """Every packet between two members comes so much later."""
    return Phase(f"every packet {seconds} s late", lambda job: job.network.delayed(seconds, *pairs()), drops=False, **how)  # type: ignore[arg-type]


def narrow(name: str, bits: int, **how: object) -> Phase:
    """The link of one process carries so many bits a second."""
    return Phase(f"{name} at {bits / 1e6} Mbit/s", lambda job: job.network.limited(name, bits), drops=False, **how)  # type: ignore[arg-type]


def pairs() -> list[tuple[str, str]]:
    return list(itertools.combinations(members(SHARDS, WORKERS), 2))


def job(network: Network, folder: Path, mode: str, *words: str) -> NetJob:
    """A job of linked.py; in async each worker counts its steps."""
    command = ["linked.py", str(PACE), *words, *(["--ledger"] if mode == "async" else [])]
    training = {**TRAINING, "mode": mode}
    return NetJob(network, folder, manifest(folder, command, workers=WORKERS, shards=SHARDS, training=training, checkpoint=CHECKPOINTS))


def run(folder: Path, mode: str, phases: Sequence[Phase]) -> Ran:
    """A job that meets these phases, each of which it must survive within `GOES_ON` seconds. Prints what came of each."""
    with Network(members(SHARDS, WORKERS)) as network, job(network, folder, mode) as going:
        for phase in phases:
            went = play(going, phase)
            print(f"{mode}: {went}", flush=True)
            check(went, going)
        steps = going.end_soon()
        ran = going.finish()
    assert ran.summary["transport"] == "tcp"
    assert [worker["clock"] for worker in ran.summary["workers"]] == [steps] * WORKERS, "a worker has not made all of its steps"
    return ran


def check(went: Went, job: NetJob) -> None:
    phase, told = went.phase, f"{went}\n{job.story()}"
    assert went.dropped > 0 or not phase.drops, f"the fault has hit nothing: {told}"
    for rank in phase.stops:
        assert went.made[rank] <= STEPS_ON, f"worker {rank} was not cut off: {told}"
    assert went.steps <= GOES_ON, told
    assert went.checkpoint is None or went.checkpoint <= GOES_ON, told


def undisturbed(folder: Path, steps: int) -> Ran:
    """The same sync job on the loopback address, without a fault."""
    folder.mkdir()
    words = ["linked.py", "0", "--last", str(steps)]
    return train(folder, manifest(folder, words, workers=WORKERS, shards=SHARDS, training=TRAINING, checkpoint=CHECKPOINTS))
