"""A real job whose shards and workers are each in a namespace of `tests.support.netns`, and the faults that meet it while it trains.

`psjob run` plans it from the router: it reaches every status port whatever is cut between members. As a script
(`python -m tests.support.netjob SITES.json JOB.yaml`) this is that `psjob run`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hack.cluster.proc import die_with_parent
from psjob.process.status_client import ask_shard
from psjob_client.local.manifest import Request
from psjob_client.local.process import Listening
from psjob_client.local.run import run_job
from tests.e2e.workloads.running import ROOT, Ran, finish
from tests.support.netns import Dropped, Network
from tests.support.runkeys import of_run

DATA, STATUS = 7070, 7071
SUMMARY = "summary.json"
STEPS_ON = 3
"""A worker has continued when it has made so many further steps."""
AHEAD = 100
"""A job is told its last step so many steps before: no worker makes them before it has read it."""
GIVE_UP = 60.0
"""Seconds after which a job that does not continue is given up."""


@dataclass(frozen=True)
class Spaces:
    """The sites of a job in a network (psjob_client.local.process.Sites)."""

    hosts: Sequence[str]
    enter: dict[str, Sequence[str]]

    @property
    def shards(self) -> Sequence[Listening]:
        return [Listening(host, DATA, STATUS) for host in self.hosts]

    def command(self, role: str, index: int, argv: Sequence[str]) -> Sequence[str]:
        return [*self.enter[f"{role}-{index}"], *argv]

    def close(self) -> None:
        """The network is the test's to end."""


def members(shards: int, workers: int) -> list[str]:
    """Names of a job's processes, as namespaces bear them."""
    return [*(f"shard-{index}" for index in range(shards)), *(f"worker-{rank}" for rank in range(workers))]


class NetJob:
    """A job of `e2e/workloads/linked.py` that runs in a network. Use it as a context manager: its end is the job's."""

    def __init__(self, network: Network, folder: Path, job: Path) -> None:
        self.network, self.folder, self.job = network, folder, job
        self.workers = sum(name.startswith("worker-") for name in network.names)

    def __enter__(self) -> NetJob:
        (self.folder / SUMMARY).unlink(missing_ok=True)
        sites = self.folder / "sites.json"
        shards = [name for name in self.network.names if name.startswith("shard-")]
        enter = {name: self.network[name].enter for name in self.network.names}
        sites.write_text(json.dumps({"hosts": [self.network[name].address for name in shards], "enter": enter}))
        words = [*self.network.router.enter, sys.executable, "-m", "tests.support.netjob", str(sites), str(self.job)]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            words, cwd=self.folder, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=die_with_parent,
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()  # its children get SIGKILL with it
            self.process.communicate()

    @property
    def run_folder(self) -> Path:
        """`.psjob/<run>`, once it is there."""
        return self.wait_for("the run's folder", lambda: next(self.folder.glob(".psjob/*/config.json"), None)).parent

    # -- what it tells -------------------------------------------------------------------------

    def steps(self, rank: int) -> list[tuple[int, float]]:
        """(step, unix time) of each step that the worker's script has made, in the order of time."""
        path = self.run_folder / f"steps-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(step), float(at)) for step, _, at in (line.partition(" ") for line in lines)]

    def step(self, rank: int) -> int:
        """The highest step of a worker, 0 before the first."""
        return max((step for step, _ in self.steps(rank)), default=0)

    def made(self) -> tuple[int, ...]:
        """That of all workers, by rank."""
        return tuple(self.step(rank) for rank in range(self.workers))

    def least(self) -> int:
        return min(self.made())

    def status(self, shard: int) -> dict[str, Any]:
        """What a shard's status port answers (psjob.contract.STATUS_KEYS); empty where it does not within 2 s."""
        host = self.network[f"shard-{shard}"].address
        with contextlib.suppress(OSError, ValueError):
            return self.network.router.call(lambda: ask_shard(host, STATUS, of_run(self.run_folder)["questions"]))
        return {}

    def checkpoint(self) -> int:
        """Step of the last committed checkpoint, 0 where nobody tells."""
        told = self.status(0).get("coordinator") or {}
        return int((told.get("checkpoint") or {}).get("step", 0))

    def wait_for_checkpoint(self, what: str, above: int) -> int:
        """Step of the next checkpoint that is committed above this one. Raises AssertionError as `wait_for`."""
        return int(self.wait_for(what, lambda: step if (step := self.checkpoint()) > above else 0, GIVE_UP))

    # -- what is done with it ------------------------------------------------------------------

    def end_soon(self) -> int:
        """Have the workers end at a step that none of them has reached; the number of steps of the job."""
        last = max(self.made()) + AHEAD
        path = self.run_folder / "last"
        path.with_suffix(".part").write_text(str(last))
        path.with_suffix(".part").rename(path)
        return last

    @contextlib.contextmanager
    def paused(self, rank: int) -> Iterator[None]:
        """The script of a worker makes no step."""
        mark = self.run_folder / f"pause-{rank}"
        mark.touch()
        try:
            yield
        finally:
            mark.unlink()

    def kill(self, name: str) -> None:
        """SIGKILL to all processes of a member."""
        for process in self.network[name].processes():
            os.kill(process, signal.SIGKILL)

    def wait_for(self, what: str, found: Callable[[], Any], seconds: float = 120, every: float = 0.05) -> Any:
        """What `found` gives as soon as it gives something. Raises AssertionError if the job ends before, or after `seconds`."""
        deadline = time.monotonic() + seconds
        while not (result := found()):
            assert self.process.poll() is None, f"the job ended while {what} was waited for:\n{self.story()}"
            assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}:\n{self.story()}"
            time.sleep(every)
        return result

    def finish(self, seconds: float = 300) -> Ran:
        """Wait for its end, which must be a good one."""
        ran = finish(self.process, self.folder, seconds)
        assert ran.code == 0, f"exit code {ran.code}:\n{ran.err[-2000:]}\n{self.story()}"
        return ran

    def story(self) -> str:
        """If each worker is, and the ends of all logs."""
        at = ", ".join(f"worker {rank} at step {self.step(rank)}" for rank in range(self.workers))
        logs = sorted(self.run_folder.glob("logs/*.log"))
        return "\n".join([f"{at}, checkpoint {self.checkpoint()}", *(f"-- {log.name}\n{log.read_text()[-1500:]}" for log in logs)])


# -- faults while it trains ------------------------------------------------------------------------


@dataclass(frozen=True)
class Phase:
    """A fault that meets a job while it trains. `Went` says what came of it."""

    name: str
    fault: Callable[[NetJob], contextlib.AbstractContextManager[Any]]
    seconds: float = 11.0
    """How long it holds: longer than a process waits for a word of its peer. 0: it is not healed; the time counts from its beginning."""
    steps: int = 0
    """If not 0, the job continues all the time: the fault holds until each worker has made so many steps."""
    stops: tuple[int, ...] = ()
    """Ranks that it keeps from continuing: else it was no fault."""
    shards: bool = False
    """It is between shards: workers may make steps all the while, and checkpoints show whether the job continues."""
    drops: bool = True
    """It drops packets: else it was no fault."""


@dataclass(frozen=True)
class Went:
    """How a phase ended. Times are seconds from healing."""

    phase: Phase
    steps: float
    """Until every worker had made `STEPS_ON` further steps."""
    checkpoint: float | None
    """Until two checkpoints were committed, of which the second has begun after healing; None where that was not waited for.

    Steps of checkpoints and of workers cannot be compared: a mode may count the steps of the slowest worker, or updates.
    """
    dropped: int
    """Packets."""
    held: float
    """Seconds that the fault held."""
    made: tuple[int, ...]
    """Steps that each worker made meanwhile."""

    def __str__(self) -> str:
        return (
            f"{self.phase.name}: held {self.held:.1f} s, {self.dropped} packets dropped, {self.made} steps meanwhile; "
            f"then {STEPS_ON} steps after {self.steps:.1f} s" + (f", checkpoint after {self.checkpoint:.1f} s" if self.checkpoint else "")
        )


def play(job: NetJob, phase: Phase) -> Went:
    """Have a fault, heal it and see how the job continues. Raises AssertionError if it does not in `GIVE_UP` seconds."""
    job.wait_for(f"training before {phase.name}", lambda: job.least() > 0 and job.checkpoint() > 0)
    with contextlib.ExitStack() as holding:
        fault = holding.enter_context(phase.fault(job))
        began, before = time.time(), job.made()
        _hold(job, phase, before)
        dropped = fault.packets if isinstance(fault, Dropped) else 0
        if phase.seconds or phase.steps:
            holding.close()
        healed, committed, at = job.made(), job.checkpoint(), time.time()
        steps = job.wait_for(f"the job to continue after {phase.name}", lambda: _on(job, healed), GIVE_UP) - at
        checkpoint = None
        if phase.shards:
            for _ in range(2):
                committed = job.wait_for_checkpoint(f"a checkpoint after {phase.name}", committed)
            checkpoint = time.time() - at
    made = tuple(later - earlier for later, earlier in zip(healed, before, strict=True))
    return Went(phase, max(0.0, steps), checkpoint, dropped, at - began, made)


def _hold(job: NetJob, phase: Phase, before: Sequence[int]) -> None:
    if phase.steps:
        wanted = [step + phase.steps for step in before]
        job.wait_for(f"{phase.steps} steps during {phase.name}", lambda: all(map(int.__ge__, job.made(), wanted)))
    else:
        until = time.time() + phase.seconds
        job.wait_for("the time of a fault to be over", lambda: time.time() >= until)


def _on(job: NetJob, since: Sequence[int]) -> float | None:
    """When the last of all workers had made its further steps; None: one has not."""
    found = [next((at for made, at in job.steps(rank) if made >= step + STEPS_ON), None) for rank, step in enumerate(since)]
    return None if None in found else max(at for at in found if at is not None)


if __name__ == "__main__":
    told = json.loads(Path(sys.argv[1]).read_text())
    raise SystemExit(run_job(Request(Path(sys.argv[2]), summary=Path(SUMMARY), progress=False), Spaces(**told)))
