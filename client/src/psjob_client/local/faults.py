"""`--fault`: what to do to which process, and when; and how long the job took to come back.

`parse_faults` reads the options, `strike_at` does each fault when its time has come, and a `Recovery` takes from the status ports when the
job was back.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from psjob_client.local.backend import Backend
from psjob_client.local.manifest import base_environment
from psjob_client.local.process import ChildProcess
from psjob_client.local.status import numbers, part
from psjob_client.problems import BadInput
from psjob_operator import contract
from psjob_operator.plan.observed_state import Role

ARMED = 0.03
"""Seconds between two looks at the coordinator while a fault waits for its step."""
REPLACED_SECONDS = 3.0
GLANCE, GLANCES = 0.002, 100
"""Seconds between two looks at a run's folder while a fault waits for a checkpoint, and how many of them come between two rounds."""
SETTLE = 0.01
"""Seconds in which every thread of a process that was stopped stands still."""
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "crash": signal.SIGKILL, "hang": signal.SIGSTOP}
INSIDE = ("crash", "hang")
"""They hit the process that serves in a shard, not its keeper."""
FORM = re.compile(
    r"(kill|crash|hang|stop):(shard|worker)-([0-9]{1,4})@(step|checkpoint)=([0-9]{1,12})(?:\+([0-9]{1,4}(?:\.[0-9]{1,3})?)s)?", re.ASCII
)
EXAMPLES = (
    "such as kill:shard-1@step=200, crash:shard-1@step=200, hang:shard-1@step=200, stop:shard-0@step=50, kill:worker-2@step=9+0.5s"
    " or kill:shard-0@checkpoint=2"
)


@dataclass(frozen=True)
class Fault:
    """One thing to do, once: when the lowest complete clock reaches a step, or to a shard while it writes a checkpoint."""

    text: str
    """As the user wrote it."""
    what: str
    role: Role
    index: int
    when: str
    """`step` or `checkpoint`."""
    number: int
    """The step; or the number of the checkpoint, 1 for the first one above step 0."""
    later: float = 0.0
    """Seconds after the step."""

    def due(self, step: int, checkpoints: int) -> bool:
        """Is its time come, or may it come at any moment? `checkpoints`: so many above step 0 are committed."""
        return step >= self.number if self.when == "step" else checkpoints >= self.number - 1

    @property
    def signal(self) -> signal.Signals:
        return SIGNALS[self.what]

    @property
    def inside(self) -> bool:
        """Does it hit the process that serves in a shard?"""
        return self.what in INSIDE

    @property
    def target(self) -> str:
        """`shard-1` or `worker-2`."""
        return f"{self.role}-{self.index}"


def parse_faults(texts: Sequence[str], shards: int, workers: int) -> tuple[Fault, ...]:
    """The faults of `--fault`, in order of their numbers.

    Raises:
        BadInput: one line for each that cannot be done to a job of so many shards and workers.
    """
    faults, problems = [], []
    for text in texts:
        found = FORM.fullmatch(text)
        if found is None:
            problems.append(f"--fault {text}: must be kill, crash, hang or stop, a process, and a step or a checkpoint, {EXAMPLES}")
            continue
        what, kind, index, when, number = found[1], found[2], int(found[3]), found[4], int(found[5])
        count = shards if kind == "shard" else workers
        if index >= count:
            problems.append(f"--fault {text}: there is no {kind}-{index}; this job has {kind}-0 to {kind}-{count - 1}")
        elif what == "stop" and kind == "worker":
            problems.append(
                f"--fault {text}: a stopped worker is not replaced, nobody asks workers for a heartbeat; use kill, or stop a shard"
            )
        elif what in INSIDE and kind == "worker":
            problems.append(f"--fault {text}: only the process in a shard's pod is started again from its memory; kill a worker")
        elif when == "checkpoint" and kind == "worker":
            problems.append(f"--fault {text}: a worker writes no part of a checkpoint; name a shard, or a step")
        elif number < 1:
            first = "first step is complete then" if when == "step" else "first checkpoint above step 0 has this number"
            problems.append(f"--fault {text}: the {when} must be 1 or more; the {first}")
        elif when == "checkpoint" and found[6]:
            problems.append(f"--fault {text}: seconds may follow a step only; write checkpoint={number}, or step={number}+{found[6]}s")
        else:
            faults.append(Fault(text, what, "shard" if kind == "shard" else "worker", index, when, number, float(found[6] or 0)))
    if problems:
        raise BadInput(*problems)
    return tuple(sorted(faults, key=lambda fault: fault.number))


@dataclass
class FaultRecovery:
    """What one fault cost. Times are unix seconds; durations are None until known."""

    fault: Fault
    process: str
    number: int
    """Attempt or start that was hit."""
    at: float
    step: int
    """Lowest complete clock at that moment."""
    checkpoint_step: int | None = None
    """Step of the last committed checkpoint at that moment."""
    manifests: int = 0
    """Committed checkpoints with a step above 0 that had been seen by then."""
    torn: str | None = None
    """The file of a checkpoint that the process had not finished at that moment, where the fault was to fall there."""
    acknowledged: Mapping[str, Any] = field(default_factory=dict)
    """The shard's own counter at that moment: last clock acknowledged to each rank."""
    crashes: int = 0
    """The shard's own counter at that moment: processes of this attempt that another had continued from."""
    first_push: float | None = None
    """Seconds until a push was applied by the shard's next attempt, or the worker's next start had joined."""
    passed: float | None = None
    """Seconds until a step above `step` was complete."""

    @property
    def done(self) -> bool:
        return self.first_push is not None and self.passed is not None

    def see(self, index: int, told: Mapping[str, Any], now: float) -> None:
        """Take what the status port of shard `index` said."""
        if self.first_push is None:
            self._see_return(index, told, now)
        if self.fault.inside:
            self._see_on(told)
        elif self.passed is None and self.first_push is not None:
            # Not before the return: a clock that was acknowledged just before the kill may be told just after it.
            after = self.at + (self.first_push if self.fault.role == "shard" else 0)
            self.passed = _first_after(part(told, "coordinator").get("passed"), self.step, self.at, after)

    def as_json(self) -> dict[str, Any]:
        """Its entry in the summary."""
        return {
            "fault": self.fault.text,
            "process": self.process,
            "at": self.at,
            "step": self.step,
            "checkpointStep": self.checkpoint_step,
            "manifests": self.manifests,
            "torn": self.torn,
            "acknowledged": dict(self.acknowledged),
            "secondsToFirstPush": self.first_push,
            "secondsToPassStep": self.passed,
        }

    def __str__(self) -> str:
        if self.fault.inside:
            on = "no step was complete after it" if self.passed is None else f"training continued after {self.passed:.2f} s"
            return f"{self.fault.text}: {on}"
        first = "no push was applied again" if self.first_push is None else f"first push applied again after {self.first_push:.2f} s"
        if self.fault.role == "worker":
            first = "it did not join again" if self.first_push is None else f"joined again after {self.first_push:.2f} s"
        passed = f"step {self.step} was not passed" if self.passed is None else f"step {self.step} passed after {self.passed:.2f} s"
        return f"{self.fault.text}: {first}, {passed}"

    def _see_on(self, told: Mapping[str, Any]) -> None:
        """The shard's attempt stays. One step may be complete without it, which it had answered before; the second needs it."""
        second = _first_after(part(told, "coordinator").get("passed"), self.step, self.at, self.at, skip=1)
        if self.passed is None and second is not None:
            self.first_push = self.passed = second

    def _see_return(self, index: int, told: Mapping[str, Any], now: float) -> None:
        if self.fault.role == "shard":
            first = numbers(told, "counters", "firstApplied")
            if index == self.fault.index and numbers(told, "attempt") > self.number and first > 0:
                self.first_push = max(0.0, first - self.at)
            return
        for worker in part(told, "coordinator").get("workers") or ():
            if worker.get("rank") == self.fault.index and numbers(worker, "start") > self.number and worker.get("state") != "absent":
                self.first_push = now - self.at


@dataclass
class Faults:
    """Those of one run: which wait for their time, and what those that were done have cost."""

    waiting: list[Fault] = field(default_factory=list)
    recoveries: list[FaultRecovery] = field(default_factory=list)

    def hear(self, index: int, told: Mapping[str, Any], now: float) -> None:
        """Take what the status port of shard `index` said."""
        for recovery in self.recoveries:
            if not recovery.done:
                recovery.see(index, told, now)

    @property
    def recovering(self) -> bool:
        """A fault was done and the job is not back yet."""
        return any(not recovery.done for recovery in self.recoveries)

    def crashing(self, child: ChildProcess, crashes: int) -> bool:
        """The process in this shard that the last fault hit has no successor that has continued; `crashes`: the shard's counter now."""
        hits = (it for it in self.recoveries if it.fault.inside and (it.process, it.number) == (child.name, child.number))
        return any(crashes <= hit.crashes for hit in hits)


async def strike_at(faults: Faults, backend: Backend, say: Callable[[str, str], None], wake: asyncio.Event) -> None:
    """Do each fault when its time has come; `say` is called with a line about it and a style."""
    since = dict[Fault, float]()
    while faults.waiting:
        await asyncio.sleep(ARMED)
        coordinator = backend.current("shard", 0)
        told = coordinator and await backend.watch.look(coordinator, backend.sites.shards[0])
        if not told:
            continue
        step, checkpoints = int(numbers(told, "coordinator", "step")), backend.watch.checkpoints
        for fault in [fault for fault in faults.waiting if fault.due(step, checkpoints)]:
            late_enough = time.monotonic() - since.setdefault(fault, time.monotonic()) >= fault.later
            if late_enough and await _strike(faults, fault, backend, say):
                faults.waiting.remove(fault)
                wake.set()


async def _strike(faults: Faults, fault: Fault, backend: Backend, say: Callable[[str, str], None]) -> bool:
    child = backend.current(fault.role, fault.index)
    if child is None:
        return False  # It is being replaced; its next start is hit.
    told = await backend.watch.look(child, backend.sites.shards[fault.index]) if fault.role == "shard" else None
    if not child.running or (fault.role == "shard" and not backend.watch.ready(child)):
        return False  # One that has ended or does not serve yet would show how a start fails, not how training does.
    crashes = int(numbers(told, "counters", "crashes"))
    if fault.inside and faults.crashing(child, crashes):
        return False  # The process that the last fault hit has no successor yet that has continued.
    torn = await _stopped_in_checkpoint(backend, child) if fault.when == "checkpoint" else None
    if fault.when == "checkpoint" and torn is None:
        return False
    if fault.inside:
        await _hit_inside(child, fault.signal)
    else:
        child.send(fault.signal)
    at = time.time()
    checkpoint = part(backend.watch.coordinator, "checkpoint")
    recovery = FaultRecovery(
        fault,
        child.name,
        child.number,
        at,
        backend.watch.step,
        checkpoint_step=int(numbers(checkpoint, "step")) if checkpoint else None,
        manifests=backend.watch.checkpoints,
        torn=torn,
        acknowledged=part(told, "counters", "acknowledged"),
        crashes=crashes,
    )
    faults.recoveries.append(recovery)
    kept = "no checkpoint yet" if recovery.checkpoint_step is None else f"last checkpoint at step {recovery.checkpoint_step}"
    where = "" if torn is None else f", while it wrote {torn}"
    say(f"fault {fault.text}: {fault.signal.name} to {_hit(fault, child)} at step {recovery.step}, {kept}{where}", "yellow")
    return True


async def _hit_inside(child: ChildProcess, number: signal.Signals) -> None:
    """A shard without a keeper is hit itself. One whose process is being replaced is waited for."""
    has_keeper = contract.fork_server_after(base_environment()) < math.inf
    until = time.monotonic() + (REPLACED_SECONDS if has_keeper else 0)
    while not child.send_inside(number):
        if time.monotonic() >= until:
            child.send(number)
            return
        await asyncio.sleep(GLANCE)


def _hit(fault: Fault, child: ChildProcess) -> str:
    return f"the process that serves in {child.name}" if fault.inside else child.name


async def _stopped_in_checkpoint(backend: Backend, child: ChildProcess) -> str | None:
    """Stop a shard with a file of a checkpoint begun and not finished, and name that file; None: it began none, or was quicker."""
    for _ in range(GLANCES):
        torn = unfinished(_written_since(backend.folder.path, child.created), child.index, child.number)
        if torn is not None:
            caught = False
            child.send(signal.SIGSTOP)
            try:
                await asyncio.sleep(SETTLE)
                caught = (backend.folder.path / torn).exists()
            finally:
                if not caught:  # also where the run ends at this moment
                    child.send(signal.SIGCONT)
            if caught:
                return torn
        await asyncio.sleep(GLANCE)
    return None


def _written_since(folder: Path, created: float) -> list[str]:
    """Temp files of checkpoints, but for what a killed process has left there."""
    found = []
    for path in folder.glob(f"*{contract.TEMP}"):
        with contextlib.suppress(FileNotFoundError):  # it was given its name meanwhile
            if path.stat().st_mtime >= created:
                found.append(path.name)
    return found


def unfinished(names: Iterable[str], shard: int, attempt: int) -> str | None:
    """Of the files in a run's folder, one that this shard has begun and not finished: the checkpoint is not committed before it is."""
    own = contract.SHARD_PART.format(shard=shard, attempt=attempt)
    every = contract.SHARD_PART.partition("{")[0]
    begun = (name for name in names if name.endswith(contract.TEMP))
    return next((name for name in begun if own in name or (shard == 0 and every not in name)), None)


def _first_after(passed: Any, step: int, at: float, after: float, skip: int = 0) -> float | None:
    """Seconds from `at` to the first completion of a step above `step` later than `after`, but for so many."""
    later = sorted(
        entry[1]
        for entry in (passed if isinstance(passed, list) else ())
        if isinstance(entry, list) and len(entry) == 2 and all(isinstance(n, int | float) for n in entry)
        if entry[0] > step and entry[1] >= after
    )
    return later[skip] - at if len(later) > skip else None
