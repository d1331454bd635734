"""Sync training through faults of a real network between namespaces: it continues within 15 s, and no bit of the weights differs.

- Async training through faults of a real network between namespaces: it continues within 15 s, no push is lost and none counts twice.
- Processes that end while their connections are lost unheard: the job ends all the same.
- A large resume record on a slow link: it arrives, and steps continue beside it.
- Faults of the network drawn by seed, in every mode in which workers exchange at each step.
- Faults of a network as phases of a job, and the jobs that meet them.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.e2e.workloads import ledger
from tests.e2e.workloads.running import Ran, manifest, train
from tests.support.netjob import STEPS_ON, NetJob, Phase, Went, members, play
from tests.support.netns import Dropped, Network, require
from tests.support.soaking import rotating, soak

pytestmark = pytest.mark.nodes

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
    words = ["linked.py", "0", "--last", str(steps)]
    return train(folder, manifest(folder, words, workers=WORKERS, shards=SHARDS, training=TRAINING, checkpoint=CHECKPOINTS))


PHASES = [
    partition("worker-0", "shard-1", stops=(0, 1)),
    cut("worker-1", "shard-0", stops=(0, 1)),
    cut("shard-1", "worker-0", stops=(0, 1)),
    cut("shard-1", "shard-0", shards=True),
    cut("shard-0", "shard-1", shards=True),
    half_open("shard-1", "worker-0"),
    half_open("shard-0", "shard-1", shards=True),
    killed(1),
    narrow("worker-1", 1_000_000, steps=30),
    lossy(5, steps=40),
    late(0.2, steps=15),
]
TWO = [
    partition("worker-0", "shard-1", stops=(0, 1)),
    half_open("shard-1", "worker-0"),
]
FEW = [
    partition("worker-0", "shard-1", stops=(0, 1)),
    cut("shard-1", "shard-0", shards=True),
    half_open("shard-1", "worker-0"),
    lossy(5, steps=20),
    late(0.2, steps=8),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("phases", [TWO, rotating(FEW), soak(PHASES)], ids=["two", "few", "all"])
def test_faults_of_the_network_change_no_bit(tmp_path: Path, phases: list[Phase]) -> None:
    require()
    ran = run(tmp_path, "sync", phases)
    plain = undisturbed(tmp_path / "plain", ran.summary["steps"])
    assert ran.summary["updates_lost"] == 0 and ran.sha == plain.sha


ASYNC_PHASES = [
    partition("worker-0", "shard-1", stops=(0,)),
    cut("worker-1", "shard-0", stops=(1,)),
    cut("shard-1", "worker-0", stops=(0,)),
    partition("shard-0", "shard-1", shards=True),
    half_open("shard-1", "worker-0"),
    half_open("shard-0", "worker-1"),
    lossy(5, steps=40),
    late(0.2, steps=8),
    narrow("worker-0", 1_000_000, steps=15),
    partition("worker-0", "shard-1", seconds=27.0, stops=(0,)),
]


@pytest.mark.timeout(900)
@pytest.mark.soak
def test_faults_of_the_network_lose_no_push_and_double_none(tmp_path: Path) -> None:
    require()
    ran = run(tmp_path, "async", ASYNC_PHASES)
    table = ledger.counted(ran.weights(), WORKERS, SHARDS)
    steps = [ran.summary["steps"]] * WORKERS
    assert ran.summary["updates_lost"] == 0
    assert all(block == steps for blocks in table.values() for block in blocks), f"of {steps} pushes each: {table}"


REST = 2.0
"""Seconds between a worker's last step and its end."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["sync", soak("async")])
@pytest.mark.parametrize("parted", [0.0, soak(27.0)])
def test_a_worker_that_leaves_on_a_lost_connection_is_heard(tmp_path: Path, mode: str, parted: float) -> None:
    """Its connection is half-open, or for `parted` seconds nothing passes."""
    require()
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(members(SHARDS, WORKERS)))
        going = stack.enter_context(job(network, tmp_path, mode, "--rest", str(REST)))
        going.wait_for("training", lambda: going.least() > 0)
        last = going.end_soon()
        going.wait_for("the last step", lambda: going.least() >= last, every=0.02)
        left = max(at for step, at in going.steps(0) if step == last) + REST
        fault = network.partition("worker-0", "shard-0") if parted else network.no_ends("shard-0")
        with contextlib.ExitStack() as holding:
            holding.enter_context(fault)
            assert parted or network.abort("shard-0", "worker-0") > 0
            assert time.time() < left, "the worker was faster than the fault"
            going.wait_for("the fault's end", lambda: time.time() > left + parted)
            if parted:
                holding.close()
            began = time.time()
            going.wait_for("the final weights", (going.run_folder / "final.safetensors").exists, GOES_ON * 4)
            took = time.time() - began
            ran = going.finish()
    print(f"{mode}: the final weights came {took:.1f} s after the worker's end, or after healing")
    assert ran.summary["steps"] == last
    assert took <= GOES_ON


@pytest.mark.timeout(600)
@pytest.mark.soak
def test_a_worker_that_holds_its_pushes_on_a_lost_connection_goes_on(tmp_path: Path) -> None:
    require()
    ran = run(tmp_path, "async", [half_open_while_held(0, 1, other=1)])
    assert ran.summary["updates_lost"] == 0


@pytest.mark.timeout(600)
@pytest.mark.soak
def test_what_a_shard_that_was_killed_unheard_lost_is_what_is_missing(tmp_path: Path) -> None:
    require()
    ran = run(tmp_path, "async", [killed(1)])
    table = ledger.counted(ran.weights(), WORKERS, SHARDS)
    steps = ran.summary["steps"]
    assert all(count == steps for block in table[0] for count in block), f"the shard that lived has lost something: {table}"
    assert all(count <= steps for block in table[1] for count in block), f"a push counted twice: {table}"
    assert {sum(steps - count for count in block) for block in table[1]} == {ran.summary["updates_lost"]}, table


MEBIBYTES, BITS = 18, 1_600_000
ALONE = MEBIBYTES * 2**23 / BITS
"""Seconds that the record takes where nothing else is on the link: 94."""
LONGEST_STEP = 5.0
FIRST_CUT = 20


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_large_record_on_a_slow_link_delays_no_step(tmp_path: Path) -> None:
    require()
    job = manifest(
        tmp_path,
        ["linked.py", "0.25", "--ballast", str(MEBIBYTES)],
        workers=1,
        shards=1,
        training={"transport": "tcp"},
        checkpoint={"everySteps": FIRST_CUT, "periodSeconds": 3600},
    )
    with Network(members(1, 1)) as network, NetJob(network, tmp_path, job) as going:
        going.wait_for("the first step", going.least)
        with network.limited("worker-0", BITS):
            assert going.least() < FIRST_CUT, "the record was sent before the link was slow"

            def committed() -> bool:
                longest = longest_step(going)
                assert longest <= LONGEST_STEP, f"no step for {longest:.1f} s\n{going.story()}"
                return going.checkpoint() >= FIRST_CUT

            going.wait_for("the checkpoint that holds the record", committed, 2 * ALONE + 30, every=0.2)
            took = time.time() - next(at for step, at in going.steps(0) if step == FIRST_CUT)
            steps = going.step(0) - FIRST_CUT
        print(f"the record took {took:.1f} s (alone {ALONE:.1f} s), {steps} steps beside it, the longest {longest_step(going):.2f} s")
        last = going.end_soon()
        assert going.finish().summary["steps"] == last
    assert took > 0.9 * ALONE, "the link was faster than it should be"


def longest_step(job: NetJob) -> float:
    """Seconds between two steps at most, the open one counted until now."""
    times = [at for _, at in job.steps(0)] + [time.time()]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


DRAWN = 6
SECONDS = (3.0, 11.0, 27.0, 75.0)
"""A moment; longer than a process waits for its peer; than the kernel waits for most; than the kernel waits for any."""


def draw(chance: random.Random) -> Phase:
    """A fault between two processes that talk with each other. Shards are not killed: what is lost then is not counted here."""
    names = members(SHARDS, WORKERS)
    pairs = [pair for pair in itertools.permutations(names, 2) if any(name.startswith("shard-") for name in pair)]
    one, other = chance.choice(pairs)
    shards = one.startswith("shard-") and other.startswith("shard-")
    kind = chance.choice([partition, cut, half_open])
    if kind is half_open:
        return kind(one, other, shards=shards)
    return kind(one, other, shards=shards, seconds=chance.choice(SECONDS))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", ["sync", "bounded", "softsync", "async", "threshold"])
def test_a_job_goes_on_after_faults_drawn_by_seed(tmp_path: Path, mode: str, seed: int) -> None:
    require()
    chance = random.Random(f"{mode} {seed}")
    ran = run(tmp_path, mode, [draw(chance) for _ in range(DRAWN)])
    assert ran.summary["updates_lost"] == 0
    if mode == "sync":
        assert ran.sha == undisturbed(tmp_path / "plain", ran.summary["steps"]).sha
    if mode == "async":
        steps = [ran.summary["steps"]] * WORKERS
        table = ledger.counted(ran.weights(), WORKERS, SHARDS)
        assert all(block == steps for blocks in table.values() for block in blocks), f"of {steps} pushes each: {table}"
