"""Is what jobs run what was simulated? The pushes of a trace file, made by workers of real shards, in the file's order.

A training that is to be played again is written down with `WorkRecording`, and `seal` adds the line that says what it was. Its twin is
`ServedRun`: the same schedule and gradients, but real shard processes, real sockets and a job's workers.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch

from psjob import contract, modes, rules
from psjob.checkpoint import files
from psjob.checkpoint.final import tensors_sha256
from psjob.contract import keys
from psjob.layout.blocks import TensorSpec
from psjob.modes import Batch, Mode, Push
from psjob.process import config
from psjob.process.status_client import ask_shard
from psjob.resume import record
from psjob.rules.base import Hyperparameters, UpdateFacts, check_hyperparameters
from psjob.simulate import words
from psjob.simulate.engine import NOT_TRAINED, SEAL, SimulatedWork, SimulationOutcome, Trace, WorkerSpeeds, trace_rows
from psjob.simulate.training import Inner, TrainingProblem
from psjob.simulate.words import label
from psjob.worker.exits import SessionEnd
from psjob.worker.local_updates import LocalRounds, WorkerSideRule
from psjob.worker.session import WorkerSession

MOST_WORKERS = 64
"""Each has threads of its own."""


@dataclass(frozen=True)
class Replayed:
    """SHA-256 of the weights at the end, as the file has it and as the shards end; they are equal where every bit is."""

    simulated: str
    served: str

    @property
    def same(self) -> bool:
        return self.simulated == self.served


def replay_trace(path: Path, shards: int) -> Replayed:
    """Play a file that `psjob simulate train --replayable --trace` wrote.

    Raises ValueError if it is not whole, where no job has its mode, and where the shards do not do what it says.
    """
    told = RecordedTraining.of(path, open_sealed(path))
    happened = list(replay_events(path))
    with (
        tempfile.TemporaryDirectory(prefix="psjob-replay-") as folder,
        running_shards(Path(folder), told.workers, shards, told.mode, told.hyperparameters) as job,
        ServedRun(job, told.problem, told.rule, told.hyperparameters, told.inner) as twin,
    ):
        play_again(happened, twin)
        return Replayed(told.weights, tensors_sha256([twin.end()]))


def play_again(happened: Iterable[Push | int], work: SimulatedWork) -> None:
    """Let it happen again; what is decided on is for `work` to know."""
    for event in happened:
        if isinstance(event, Push):
            work.push(event)
        else:
            work.begin(event)


def check_replayable(mode: Mode, workers: int, speeds: WorkerSpeeds, interrupt: bool) -> None:
    """Raises ValueError for a training that real workers cannot make again."""
    mode_settings(mode, {})
    if workers > MOST_WORKERS:
        raise ValueError(f"--workers {workers}: a replay has {MOST_WORKERS} at most, each with threads of its own")
    if mode.delay:
        raise ValueError(f"--mode {label(mode)}: the workers of a replay wait for each push; leave delay={mode.delay} out")
    if speeds.outages:
        raise ValueError("--crash: the workers of a replay all stay; leave it out")
    if interrupt:
        raise ValueError("--interrupt: a job's workers finish each step; leave it out")


def check_decided(outcome: SimulationOutcome) -> None:
    """Raises ValueError if pushes are left, of which a job would know more."""
    undecided = outcome.pushes - outcome.kept - outcome.dropped
    if undecided:
        raise ValueError(f"--pushes {outcome.pushes}: {undecided} of them are not decided on at the end; take {outcome.pushes - undecided}")


@dataclass(frozen=True)
class RecordedTraining:
    """How the training of a file was made."""

    mode: Mode
    workers: int
    problem: TrainingProblem
    rule: str
    hyperparameters: Hyperparameters
    inner: Inner | None
    weights: str
    """SHA-256."""

    @classmethod
    def of(cls, path: Path, facts: dict[str, Any]) -> RecordedTraining:
        """From the facts of `training_facts`. Raises ValueError for others."""
        try:
            mode, rule, inner = words.mode_of(facts["mode"]), rules.named(facts["rule"]), facts["inner"]
            own = inner and rules.named(inner["rule"])
            return cls(
                mode, int(facts["workers"]), words.problem_of(facts["problem"], facts["seed"]), rule.name,
                check_hyperparameters(rule, facts["numbers"]),
                Inner(own, check_hyperparameters(own, inner["numbers"]), mode.inner_steps) if own else None, str(facts["weights_sha256"]),
            )  # fmt: skip
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: is of another version of psjob ({error!r}); write it again with this one") from None


def training_facts(
    mode: Mode,
    workers: int,
    problem: str,
    seed: int,
    rule: str,
    hyperparameters: Hyperparameters,
    inner: Inner | None,
    weights: torch.Tensor,
) -> dict[str, Any]:
    """What a file holds of its training."""
    own = inner and {"rule": inner.rule.name, "numbers": dict(inner.hyperparameters)}
    return {
        "mode": words.label(mode), "workers": workers, "problem": problem, "seed": seed, "rule": rule, "numbers": dict(hyperparameters),
        "inner": own, "weights_sha256": tensors_sha256([weights]),
    }  # fmt: skip


SECONDS = 60.0
"""What takes milliseconds may take so long on a loaded machine."""
WEIGHTS, RUN = "weights", "replay"


class ServedJob(Protocol):
    """Shards that wait for workers, or are about to."""

    @property
    def workers(self) -> int: ...

    def place(self, rank: int) -> config.ProcessContext:
        """Where a worker of it stands."""

    def taken(self, pushes: int) -> bool:
        """Has every shard taken so many pushes (of all its blocks)?"""

    def final(self) -> torch.Tensor:
        """The weights that it ends with, once every worker has left. Raises ValueError if a shard did not end well."""


class ServedRun:
    """See `SimulatedWork`: an event of the schedule happens when the shards have done what the one before asked of them.

    `hyperparameters` are the rule's, always; `inner` makes the workers' own steps in local mode. Raises ValueError if a shard does not
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
        place: config.ProcessContext,
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
        inner.rule.apply(
            self.own, self._gradient(problem), inner.hyperparameters, UpdateFacts(staleness=0, worker=self.session.place.index)
        )

    def _gradient(self, problem: TrainingProblem) -> torch.Tensor:
        return torch.from_numpy(problem.gradient(self.weights.numpy().copy())[0])

    def has_answer(self, seconds: float) -> bool:
        """Has what was asked last been answered, now or in so many seconds?"""
        if not wait([self.last], seconds).done:
            return False
        self.answered()
        return True

    def answered(self) -> None:
        """Wait for it. Raises ValueError if the job has ended for this worker, or nothing comes in time."""
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
        self.session.state.ended = True
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

    def place(self, rank: int) -> config.ProcessContext:
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
        own.write_text(keys.process_key_file(self._keys, role, index, 1))
        number = contract.ENV_ATTEMPT if role == "shard" else contract.ENV_START
        return {
            contract.ENV_ROLE: role, contract.ENV_INDEX: str(index), contract.ENV_RUN: RUN, number: "1", contract.ENV_TERM: "1",
            contract.ENV_CONFIG: str(self._config), contract.ENV_CHECKPOINTS: str(self.folder), contract.ENV_BIND: "127.0.0.1",
            contract.ENV_KEYS: str(own), contract.ENV_TERMINATION_LOG: str(self.folder / f"{role}-{index}.end"),
        }  # fmt: skip

    def _counters(self, peer: Mapping[str, Any]) -> dict[str, Any]:
        told: dict[str, Any] = ask_shard(peer["host"], peer["statusPort"], self._keys["questions"], seconds=SECONDS)["counters"]
        return told

    def _said(self) -> str:
        return "; ".join(path.read_text(errors="replace")[-500:] for path in sorted(self.folder.glob("shard-*.log")))


@contextmanager
def running_shards(folder: Path, workers: int, shards: int, mode: Mode, hyperparameters: Hyperparameters) -> Iterator[Shards]:
    """Shards of a job of this mode, which are ended in the end. Raises ValueError for a mode that no job can name."""
    started = Shards(folder, workers, shards, mode_settings(mode, hyperparameters))
    try:
        yield started
    finally:
        started.close()


def mode_settings(mode: Mode, hyperparameters: Hyperparameters) -> dict[str, Any]:
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


COLUMNS = ("base", "begun", "arrived")
"""Of a push: the version that it was computed on, how many pushes had arrived when its worker took that, and its own number among them."""
_AGAIN = "write it again with psjob simulate train --replayable --trace FILE"


class WorkRecording:
    """See `SimulatedWork`: trains `work`, and gives `written` the COLUMNS of every record."""

    def __init__(self, work: SimulatedWork, written: Trace) -> None:
        self.work, self.written = work, written
        written.columns = COLUMNS
        self._arrived = 0
        self._begun: dict[int, int] = {}
        self._beside: dict[tuple[int, int], tuple[int, int, int]] = {}

    def begin(self, worker: int) -> None:
        self._begun[worker] = self._arrived
        self.work.begin(worker)

    def push(self, push: Push) -> None:
        self._arrived += 1
        self._beside[push.worker, push.clock] = (push.base or 0, self._begun[push.worker], self._arrived)
        self.work.push(push)

    def decide(self, batch: Batch, version: int) -> list[tuple[float, float]]:
        self.written.beside += [self._beside.pop((push.worker, push.clock)) for push in (*batch.kept, *batch.dropped)]
        return self.work.decide(batch, version)

    def leave(self, worker: int) -> None:
        self.work.leave(worker)


def seal(path: Path, facts: dict[str, Any]) -> None:
    """End a trace file that is written with a line of `facts` and the SHA-256 of all that stands before it, and of them."""
    body = json.dumps(facts)
    with path.open("rb+") as file:
        line = json.dumps({SEAL: facts, "sha256": _sha256(file.read(), body)})
        file.write((("# " if path.suffix == ".csv" else "") + line + "\n").encode())


def open_sealed(path: Path) -> dict[str, Any]:
    """The facts of a sealed file. Raises ValueError if it has no seal, or is not what was sealed, OSError where it cannot be read."""
    rows, _, last = path.read_bytes().removesuffix(b"\n").rpartition(b"\n")
    try:
        told = json.loads(last.removeprefix(b"# "))
        facts, sha256 = told[SEAL], told["sha256"]
    except (ValueError, RecursionError, LookupError, TypeError):
        raise ValueError(f"{path}: has no last line to replay by: it is cut short, or no --replayable trace; {_AGAIN}") from None
    if not isinstance(facts, dict) or _sha256(rows + b"\n" * bool(rows), json.dumps(facts)) != sha256:
        raise ValueError(f"{path}: was changed after it was written (its SHA-256 is another); {_AGAIN}")
    return facts


def replay_events(path: Path) -> Iterator[Push | int]:
    """What happened, in order: a worker (by its rank) took its weights, or a push arrived. Raises ValueError for what is no such trace."""
    happened: list[tuple[int, int, Push | int]] = []
    for number, row in enumerate(trace_rows(path), 1):
        try:
            worker, clock, base, begun, arrived = (int(row[name]) for name in ("worker", "clock", *COLUMNS))
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{path}: record {number} has not the columns {', '.join(COLUMNS)}; {_AGAIN}") from None
        happened += [(begun, 1, worker), (arrived, 0, Push(worker, clock, base))]
    for _, _, what in sorted(happened, key=lambda one: one[:2]):
        yield what


def _sha256(rows: bytes, facts: str) -> str:
    return hashlib.sha256(rows + facts.encode()).hexdigest()
