"""The local backend below the plan: what exists is observed, `plan()` decides, and its acts are done with processes."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from psjob_client.local.manifest import Command, base_environment
from psjob_client.local.monitor import Failures, RunWatch
from psjob_client.local.process import ChildProcess, Sites, Spare, start_process
from psjob_client.local.run_folder import ONE_HOST, Folder, RunKeys, local_encryption, message_of, tail_of
from psjob_client.problems import BadInput
from psjob_operator import contract
from psjob_operator.api.spec import JobSpec, PSTrainingJob
from psjob_operator.api.status import JobStatus
from psjob_operator.plan import objects
from psjob_operator.plan.actions import CreateProcess, DeleteProcess, Event, Plan
from psjob_operator.plan.job_state import JobState
from psjob_operator.plan.objects import cluster_config, config_digest, job_config
from psjob_operator.plan.observed_state import Claim, Exit, Objects, ObservedState, Process
from psjob_operator.plan.plan import plan
from psjob_operator.plan.process_outcome import matching_rule, of_the_runtime, outcome_of

GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL, as a pod has by default."""
ENDING = 2.0
"""The same once the job has ended: its last checkpoint is made, or nobody is left to make one."""
LEAVING = 1.0
"""The same where the user has had enough and nothing would be lost,"""
SAVING = 8.0
"""and where a last checkpoint is to be made."""
HOLD = 0.1
"""Seconds between two looks while it is not known whether a script that failed had trained."""
MOST_ROUNDS = 20
"""Plans in a row without a wait; more means that plan and backend never agree."""


@dataclass
class Backend:
    """One job on this machine. All state is in memory; `status.json` is a copy for people and tools."""

    job: PSTrainingJob
    folder: Folder
    commands: Sequence[Command]
    """Of each worker, by rank."""
    sites: Sites
    watch: RunWatch
    tell: Callable[[Event], None]
    """Called with what the plan has to say to people."""
    keys: RunKeys
    mourn: Callable[[ChildProcess], None]
    """Called once with each process that has ended, before the plan hears of it."""
    resume: Path | None = None
    children: list[ChildProcess] = field(default_factory=list)
    failures: Failures = field(default_factory=Failures)
    status: JobStatus | None = None
    interrupted: bool = False
    """The user has had enough."""
    verdict: str | None = None
    """Why this machine gives the job up, where the plan has no eyes for it."""
    _granted: frozenset[str] = frozenset()
    _version: int = 1
    _exits: dict[str, Exit] = field(default_factory=dict)
    _created: float = field(default_factory=time.time)

    def prepare(self) -> None:
        """Write the config file: what a ConfigMap, a Service and a claim are on a cluster stands before the first process.

        Raises:
            BadInput: it cannot be written.
        """
        config = job_config(
            self._named, self.sites.shards, checkpoints=str(self.folder.path.parent), encryption=local_encryption(self._spec)
        )
        if self.resume is not None:
            config["checkpoint"]["resumeFrom"] = {"path": str(self.resume)}
        if self._spec.shards.placement == "Colocated":
            config["sharing"] = "index"  # each index stands for a machine, so that a laptop shows what crosses a network
        try:
            self.folder.write("config.json", config)
        except OSError as error:
            raise BadInput(f"{self.folder.config}: cannot be written: {error.strerror or error}") from None

    def turn(self) -> float | None:
        """Observe, plan and act until there is nothing to do; the unix time at which to do so again, None: on a wake only.

        Raises:
            RuntimeError: plan and backend do not come to rest.
        """
        for _ in range(MOST_ROUNDS):
            self.reap()
            snapshot, now = self.observe(), time.time()
            for index in JobState.of(snapshot, now).unfinished:
                newest = max((it for it in self.children if (it.role, it.index) == ("worker", index)), key=lambda it: it.number)
                self.failures.note_unfinished(newest, self.watch.made)
            if self.failures.holds(self.watch.made, self.watch.progress_at, now):
                return now + HOLD
            decided = plan(snapshot, now)
            acted = self.act(decided)
            if not acted and not decided.intent:
                self._spare.keep(self.status is not None and self.status.running, now)
                return decided.wake_at
        raise RuntimeError(f"the job still changes after {MOST_ROUNDS} plans; please report {self.folder.path / 'status.json'}")

    @property
    def ended(self) -> bool:
        """The job has come to an end; processes of it may still go."""
        return self.status is not None and self.status.ended

    @property
    def phase(self) -> str:
        """The job's phase."""
        return (self.status and self.status.phase) or "Pending"

    @property
    def over(self) -> bool:
        """The job has ended, and so has every process of it."""
        return self.ended and not any(child.running for child in self.children)

    def reap(self) -> bool:
        """Take note of processes that ended; whether there were any."""
        now = time.time()
        ended = [child for child in self.children if child.reap(now)]
        for child in ended:
            self.watch.ended(child, message_of(self.folder.ending(child.name)))
            self.mourn(child)
            self.failures.note(child, self.watch.made, tail_of(self.folder.log(child.name)), self._answered(child))
        # A deleted pod is gone when its container has ended; so is a process.
        self.children = [child for child in self.children if child.running or child.deleting is None]
        return bool(ended)

    def _answered(self, child: ChildProcess) -> bool:
        """Its end has an answer already: it is the runtime's own, or the job's podFailurePolicy names it."""
        process = self._process(child)
        named = matching_rule(self._spec.run_policy.failure_rules, process.role, process, outcome_of(process))
        return named is not None or of_the_runtime(self._exit(child))

    @property
    def grace(self) -> float:
        """Seconds that a process has to end in."""
        if self.verdict or self.ended:
            return ENDING
        if self.interrupted:
            return SAVING if self.watch.unsaved else LEAVING
        return GRACE

    def stop(self, *, kill: bool = False) -> None:
        """SIGTERM to every process, SIGKILL when it has had its `grace`; at once with `kill`."""
        for child in self.children:
            if child.running:
                child.stop(time.time(), 0 if kill else self.grace)

    def wait_longer(self, seconds: float) -> None:
        """Who has been asked to end has so long from now: bytes of the last checkpoint are on their way."""
        for child in self.children:
            if child.kill_at is not None:
                child.kill_at = max(child.kill_at, time.time() + seconds)

    def current(self, role: str, index: int) -> ChildProcess | None:
        """The running process of a seat."""
        there = [child for child in self.children if child.running and (child.role, child.index) == (role, index)]
        return max(there, key=lambda child: child.number, default=None)

    def close(self) -> None:
        """No process is left, and no address."""
        for child in self.children:
            child.stop(time.time(), 0)
        self._spare.close()
        self.sites.close()

    @cached_property
    def _spare(self) -> Spare:
        return Spare({**base_environment(), **self.commands[0].env}, self.commands[0].folder)

    @cached_property
    def _spec(self) -> JobSpec:
        # Who started it by hand is its controller.
        # A run to continue from was found before, and `prepare` writes it.
        kept = self.job.spec.checkpoint.model_copy(update={"resume_from": None})
        return self.job.spec.model_copy(update={"managed_by": None, "checkpoint": kept})

    @cached_property
    def _named(self) -> Named:
        return Named(self.job.metadata.name, "", self.folder.run, self._spec)

    @cached_property
    def _digest(self) -> str:
        return config_digest(cluster_config(self._named, encryption=local_encryption(self._spec)))

    def observe(self) -> ObservedState:
        """Everything the plan may know."""
        return ObservedState(
            name=self.job.metadata.name,
            namespace="",
            uid=self.folder.run,
            generation=1,
            resource_version=str(self._version),
            created=self._created,
            spec=self._spec,
            status=self.status,
            processes=tuple(self._process(child) for child in self.children),
            objects=Objects(True, self._digest, Claim(objects.claim_name(self.job.metadata.name), ours=True, bound=True)),
            progress=self.watch.progress,
            progress_at=self.watch.progress_at,
            granted=self._granted,
            live=True,
            one_machine=True,
            auto_encryption=ONE_HOST,
        )

    def act(self, decided: Plan) -> bool:
        """Store the status, then do the acts; whether anything was done that calls for another look."""
        if decided.status != self.status:
            self.status = decided.status
            self._version += 1
            # The copy is for people; training does not stop where it cannot be written.
            with contextlib.suppress(OSError):
                self.folder.write("status.json", decided.status.to_manifest())
        if decided.intent:
            self._granted |= decided.grants
        for event in decided.events:
            self.tell(event)
        acted = False
        for action in decided.actions:
            acted |= self._do(action)
        return acted

    def _do(self, action: Any) -> bool:
        if isinstance(action, CreateProcess):
            self._create(action)
        elif isinstance(action, DeleteProcess):
            return self._delete(action)
        else:
            # Service, config and claim stand from the beginning; there is no job object to delete.
            return False
        return True

    def _create(self, action: CreateProcess) -> None:
        for child in self.children:
            if child.running and (child.role, child.index) == (action.role, action.index):
                # One process a seat: the old one is gone before the new one starts.
                child.stop(time.time(), grace=0)
                child.wait()
        self.reap()
        command = self.commands[action.index if action.role == "worker" else 0]
        argv: Sequence[str] = command.argv if action.role == "worker" else (sys.executable, "-m", "psjob.shard")
        if action.role == "worker" and self._spec.processes() > 1:
            argv = (sys.executable, "-m", "psjob.agent", *argv)
        argv = self.sites.command(action.role, action.index, argv)
        seat = (action.name, action.role, action.index, action.number)
        try:
            keys = self.keys.hand(action.role, action.index, action.number)
        except OSError as error:
            child = ChildProcess(*seat, None, time.time(), problem=f"its key file cannot be written: {error}")
        else:
            env = self._environment(action) | {contract.ENV_KEYS: str(keys)}
            spare = self._spare.take if action.number > 1 else None
            child = start_process(*seat, argv, env, command.folder, self.folder.log(action.name), spare)
        child.waited = action.waited
        self.children.append(child)
        self._granted -= {action.name}

    def _delete(self, action: DeleteProcess) -> bool:
        child = next((child for child in self.children if child.name == action.name and child.uid == action.uid), None)
        if child is None:
            return False
        if not child.running:
            self.children.remove(child)
            return True
        again = child.deleting is not None
        grace = self.grace if action.grace_seconds is None else float(action.grace_seconds)
        child.stop(time.time(), 0 if self.watch.unresponsive(child) else grace)
        return not again

    def _environment(self, action: CreateProcess) -> dict[str, str]:
        env = base_environment()
        if action.role == "worker":
            env |= self.commands[action.index].env
        env |= {
            contract.ENV_ROLE: action.role,
            contract.ENV_INDEX: str(action.index),
            contract.ENV_RUN: self.folder.run,
            contract.ENV_TERM: str(action.term),
            contract.ENV_CONFIG: str(self.folder.config),
            contract.ENV_POD: action.name,
            contract.ENV_TERMINATION_LOG: str(self.folder.ending(action.name)),
        }
        if action.role == "worker":
            if (processes := self._spec.processes()) > 1:
                env[contract.ENV_PROCESSES] = str(processes)
            return env | {contract.ENV_START: str(action.number)}
        known = {contract.ENV_MIN_STEP: "1"} if action.checkpoint_known else {}
        return (
            env
            | known
            | {
                contract.ENV_ATTEMPT: str(action.number),
                contract.ENV_CHECKPOINTS: str(self.folder.path.parent),
                contract.ENV_BIND: self.sites.shards[action.index].host,
            }
        )

    def _process(self, child: ChildProcess) -> Process:
        phase = "Running" if child.running else "Succeeded" if child.code == 0 else "Failed"
        return Process(
            name=child.name,
            uid=child.uid,
            role=child.role,
            index=child.index,
            number=child.number,
            run=self.folder.run,
            phase=phase,  # type: ignore[arg-type]
            created=child.created,
            ready=child.running and (child.role == "worker" or self.watch.ready(child)),
            started=child.created,
            scheduled=child.created,
            deleting=child.deleting,
            waited=child.waited,
            exit=None if child.running else self._exit(child),
            unresponsive=child.running and self.watch.unresponsive(child),
        )

    def _exit(self, child: ChildProcess) -> Exit:
        if child.name in self._exits:
            return self._exits[child.name]
        message = message_of(self.folder.ending(child.name))
        self._exits[child.name] = Exit(
            code=child.code or 0,
            signal=child.signal,
            reason="Signal" if child.signal else "ContainerCannotRun" if child.problem else "Completed" if child.code == 0 else "Error",
            message=child.problem or message,
            log_tail=tail_of(self.folder.log(child.name)),
            at=child.ended,
        )
        return self._exits[child.name]


@dataclass(frozen=True)
class Named:
    """What the config needs to know of a job (plan.config.Job)."""

    name: str
    namespace: str
    uid: str
    spec: JobSpec
