"""The twin of a simulated training: the same schedule and gradients, but real shard processes, real sockets and a job's workers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, Self

import torch

from psjob import contract, modes
from psjob.checkpoint import files
from psjob.contract import keys
from psjob.layout.blocks import TensorSpec
from psjob.modes import Batch, Mode, Push
from psjob.process import config
from psjob.process.asking import ask
from psjob.resume import record
from psjob.rules.base import Hyperparameters
from psjob.simulate.engine import NOT_TRAINED
from psjob.simulate.training import Inner, TrainingProblem
from psjob.simulate.words import label
from psjob.worker.exits import SessionEnd
from psjob.worker.localupdates import LocalRounds, WorkerSideRule
from psjob.worker.session import WorkerSession

SECONDS = 60.0
"""What takes milliseconds may take so long on a loaded machine."""
WEIGHTS, RUN = "weights", "replay"


class ServedJob(Protocol):
    """Shards that wait for workers, or are about to."""

    @property
    def workers(self) -> int: ...

    def place(self, rank: int) -> config.Place:
        """Where a worker of it stands."""

    def taken(self, pushes: int) -> bool:
        """Has every shard taken so many pushes (of all its blocks)?"""

    def final(self) -> torch.Tensor:
        """The weights that it ends with, once every worker has left. Raises ValueError where a shard did not end well."""


class ServedRun:
    """See `Work`: an event of the schedule happens when the shards have done what the one before asked of them.

    `hyperparameters` are the rule's, always; `inner` makes the workers' own steps in local mode. Raises ValueError where a shard does not
    do in time what the schedule says, or where it sends a worker weights of another version.
    """

    def __init__(
        self, job: ServedJob, problem: TrainingProblem, rule: str, hyperparameters: Hyperparameters, inner: Inner | None = None
    ) -> None:
        self.job, self.problem, self.hyperparameters = job, problem, dict(hyperparameters)
        self.pushed = 0
        first = torch.from_numpy(problem.begin())
        table = [TensorSpec(WEIGHTS, tuple(first.shape), str(first.dtype).removeprefix("torch."))]
        self._workers = [_Worker(job.place(rank), table, rule, first.clone(), self.hyperparameters, inner) for rank in range(job.workers)]
        for worker in self._workers:
            worker.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers:
            worker.close()

    def begin(self, worker: int) -> None:
        self._workers[worker].answered()

    def push(self, push: Push) -> None:
        worker = self._workers[push.worker]
        worker.answered()
        versions = {n for _, n in worker.session.exchange.versions.values()}
        if versions != {push.base}:
            raise ValueError(f"worker {push.worker} has weights of version {sorted(versions)}, in the simulation it has {push.base}")
        worker.push(self.problem)
        self.pushed += 1
        self._await(worker)

    def decide(self, batch: Batch, version: int) -> list[tuple[float, float]]:
        return [NOT_TRAINED] * (len(batch.kept) + len(batch.dropped))  # gap and loss are the simulation's to tell

    def leave(self, worker: int) -> None:
        raise ValueError(f"worker {worker} is lost in this schedule; the workers of a job that is played all stay")

    def end(self) -> torch.Tensor:
        """All workers leave; the weights that the job ends with."""
        for worker in self._workers:
            if worker.session.mode.decided:  # of who stays fewer pushes are awaited, and the last ones may be on their way still
                worker.answered()
        for worker in self._workers:
            worker.leave()
        for worker in self._workers:
            worker.answered()
        return self.job.final()

    def _await(self, worker: _Worker) -> None:
        """Wait until the newest push, this worker's, is taken: before it is, no other may be made."""
        deadline = time.monotonic() + SECONDS
        while not worker.has_answer(0.002):
            if self.job.taken(self.pushed):
                return
            if time.monotonic() > deadline:
                raise ValueError(f"the shards have not taken push {self.pushed} in {SECONDS:.0f} s")


class _Worker:
    """A worker of the job with one flat parameter. What waits for shards waits in a thread of its own, one thing after the other."""

    def __init__(
        self,
        place: config.Place,
        table: list[TensorSpec],
        rule: str,
        weights: torch.Tensor,
        hyperparameters: dict[str, Any],
        inner: Inner | None,
    ) -> None:
        self.name, self.weights, self.hyperparameters, self.inner = f"worker {place.index}", weights, hyperparameters, inner
        self.session = WorkerSession(place, table, rule, {})
        self.half = WorkerSideRule.of(rule, [weights], [0])
        self.rounds = LocalRounds(self.session, [weights], [hyperparameters])
        self.own = None if inner is None else inner.rule.init(weights)
        self.last: Future[None] = Future()
        self._thread = ThreadPoolExecutor(1, self.name)

    def join(self) -> None:
        self.last = self._thread.submit(self._join)

    def push(self, problem: TrainingProblem) -> None:
        """Push the next gradient, or how far the worker's own steps go."""
        if self.inner is not None:
            self.last = self._thread.submit(self._round, problem, self.inner)
            return
        grads: list[torch.Tensor | None] = [self._gradient(problem)]
        if self.half is not None:
            grads = self.half.outgoing(grads, [self.hyperparameters], 1.0)
        self.last = self._thread.submit(self.session.exchange.push, grads, [self.hyperparameters], False, 1.0, [self.weights])

    def _join(self) -> None:
        self.session.join([self.weights], lambda: _record(0), [self.hyperparameters])
        self.rounds.begin()

    def _round(self, problem: TrainingProblem, inner: Inner) -> None:
        """Its steps, of which the last one pushes."""
        for _ in range(inner.steps):
            self.rounds.step(lambda: self._step(problem, inner))

    def _step(self, problem: TrainingProblem, inner: Inner) -> None:
        assert self.own is not None
        inner.rule.apply(self.own, self._gradient(problem), inner.hyperparameters, lag=0, worker=self.session.place.index)

    def _gradient(self, problem: TrainingProblem) -> torch.Tensor:
        return torch.from_numpy(problem.gradient(self.weights.numpy().copy())[0])

    def has_answer(self, seconds: float) -> bool:
        """Has what was asked last been answered, now or in so many seconds?"""
        if not wait([self.last], seconds).done:
            return False
        self.answered()
        return True

    def answered(self) -> None:
        """Wait for it. Raises ValueError where the job has ended for this worker, or nothing comes in time."""
        try:
            self.last.result(SECONDS)
        except TimeoutError:
            raise ValueError(f"{self.name} has no answer of the shards in {SECONDS:.0f} s") from None
        except SessionEnd as ending:
            raise ValueError(f"{self.name} has left the job: {ending.message or ending.how}") from None

    def leave(self) -> None:
        """Leave as a script that is through."""
        self.last = self._thread.submit(self._leave)

    def close(self) -> None:
        """End its threads, whatever they wait for."""
        self.session.ended = True
        self.session._end(SessionEnd("refused", "the replay is over"))
        for link in self.session.links:
            link.close()
            link.join(SECONDS)
        self._thread.shutdown()

    def _leave(self) -> None:
        with suppress(SessionEnd):  # that is how it goes
            self.session.leave(lambda: _record(self.session.clock), [self.weights])


class Shards:
    """See `Job`: processes of `python -m psjob.shard`, whose files and logs lie in `folder`."""

    def __init__(self, folder: Path, workers: int, shards: int, settings: Mapping[str, Any]) -> None:
        self.folder, self.workers = folder, workers
        self._config = folder / "config.json"
        ports = _free_ports(2 * shards)
        self._peers = [{"host": "127.0.0.1", "port": ports[2 * i], "statusPort": ports[2 * i + 1]} for i in range(shards)]
        checkpoint = {"intervalSeconds": 3600.0, "everySteps": None, "keep": 2, "disabled": False, "resumeFrom": None}
        told = {
            "format": contract.CONFIG_FORMAT, "job": RUN, "run": RUN, "specHash": "", "seed": 0, "workers": workers, "shards": self._peers,
            "checkpoint": checkpoint, "successPolicy": "AllWorkers", "shardTimeoutSeconds": SECONDS, "connectSeconds": SECONDS, **settings,
        }  # fmt: skip
        self._config.write_text(json.dumps(told))
        self._keys = keys.fresh()
        self._processes = [self._start(index) for index in range(shards)]

    def place(self, rank: int) -> config.Place:
        found = config.place(self._environment("worker", rank))
        assert found is not None
        return found

    def taken(self, pushes: int) -> bool:
        return all(counters["pushes"] >= pushes * counters["blocks"] for counters in map(self._counters, self._peers))

    def final(self) -> torch.Tensor:
        try:
            codes = [process.wait(SECONDS) for process in self._processes]
        except subprocess.TimeoutExpired:
            raise ValueError(f"the shards have not ended in {SECONDS:.0f} s: {self._said()}") from None
        if any(codes):
            raise ValueError(f"the shards ended with {codes}: {self._said()}")
        return files.read_blocks(self.folder / RUN / contract.FINAL_WEIGHTS, [WEIGHTS])[WEIGHTS]

    def close(self) -> None:
        """End what still runs."""
        for process in self._processes:
            process.kill()
            process.wait(SECONDS)

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **self._environment("shard", index)}
        with (self.folder / f"shard-{index}.log").open("wb") as log:
            return subprocess.Popen([sys.executable, "-m", "psjob.shard"], env=environment, stdout=log, stderr=log)

    def _environment(self, role: str, index: int) -> dict[str, str]:
        own = self.folder / f"{role}-{index}.keys"
        own.touch(0o600)
        own.write_text(keys.written(self._keys, role, index, 1))
        number = contract.ENV_ATTEMPT if role == "shard" else contract.ENV_START
        return {
            contract.ENV_ROLE: role, contract.ENV_INDEX: str(index), contract.ENV_RUN: RUN, number: "1", contract.ENV_VIEW: "1",
            contract.ENV_CONFIG: str(self._config), contract.ENV_CHECKPOINTS: str(self.folder), contract.ENV_BIND: "127.0.0.1",
            contract.ENV_KEYS: str(own), contract.ENV_TERMINATION_LOG: str(self.folder / f"{role}-{index}.end"),
        }  # fmt: skip

    def _counters(self, peer: Mapping[str, Any]) -> dict[str, Any]:
        told: dict[str, Any] = ask(peer["host"], peer["statusPort"], self._keys["questions"], seconds=SECONDS)["counters"]
        return told

    def _said(self) -> str:
        return "; ".join(path.read_text(errors="replace")[-500:] for path in sorted(self.folder.glob("shard-*.log")))


@contextmanager
def running(folder: Path, workers: int, shards: int, mode: Mode, hyperparameters: Hyperparameters) -> Iterator[Shards]:
    """Shards of a job of this mode, which are ended in the end. Raises ValueError for a mode that no job can name."""
    started = Shards(folder, workers, shards, settings(mode, hyperparameters))
    try:
        yield started
    finally:
        started.close()


def settings(mode: Mode, hyperparameters: Hyperparameters) -> dict[str, Any]:
    """The mode in the words of the config file, with what shards take from there only. Raises ValueError for one that no job can name."""
    words = modes.config_of(mode)
    if words is None:
        raise ValueError(f"--mode {label(mode)}: no job can have it; leave its options out")
    if "local" in words:
        words["local"] |= {name: hyperparameters[name] for name in ("lr", "momentum") if name in hyperparameters}
        options = contract.UPDATE_RULES.get(words.get("updateRule", ""), ())
        words["ruleOptions"] = {name: hyperparameters[name] for name in options if name in hyperparameters}
    return words | {"transport": "tcp"}


def _record(step: int) -> bytes:
    return record.pack(record.ResumeRecord(None, step, {}, {}, []))


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(sock.getsockname()[1]) for sock in held]
    for sock in held:
        sock.close()
    return ports
