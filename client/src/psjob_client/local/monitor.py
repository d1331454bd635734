"""Watches a run: polls the status ports, keeps what was heard (`Watch`), and says when the run is given up, though `plan()` would continue.

`poll_shards` asks each shard in its own rhythm. A shard is unresponsive after `shards.progressDeadlineSeconds` without a good answer and
three misses in a row. A script that fails by itself would fail again: on one machine, where its author sits, that is not found out seven
times (`Failures`). A job whose workers never join can never begin (`never_attached`). A job that makes no step is never silent, and without
room on its disk it ends (`Standstill`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from psjob_client.local.process import ChildProcess, Listening
from psjob_client.local.status import ask_status, is_healthy, numbers, part
from psjob_operator.plan.job_state import PATIENCE_SECONDS
from psjob_operator.plan.process_outcome import UNSEEN
from psjob_operator.plan.terminal import never_joined

LONGEST_TRY = 2.0
"""Seconds for one question to a status port; less where that is short."""
STARTUP = 300.0
"""Seconds from the start of a shard to its first good answer, while it imports; it gives good answers while it restores."""
POLL_SECONDS, CLOSE_POLL_SECONDS = 0.5, 0.1
"""Between two rounds with a shard; the second while a recovery is measured."""
MOVING = 2.0
"""Seconds without news of bytes after which none are moved."""
LEAST_MISSES = 3
"""Unanswered questions in a row before silence counts: a laptop that slept has a long silence, but only one miss."""


Current = Callable[[int], "ChildProcess | None"]
"""Of a shard, by index: its running process."""
UNHEARD = 1.0
"""Seconds after a failure in which a job that has trained is heard of for the first time."""
SIGNALS = 128
"""Exit codes from here on are signals'."""
NO_GROUP = ("environment variable RANK expected", "process group has not been initialized")
"""What torch says to a script for DDP that has not been started by torchrun."""
FIRST_WORD, LONGEST_SILENCE = 30.0, 300.0
"""Seconds without a step before the first word; it comes again after twice as long, up to the longest. If nobody is waited for, a step
may just be long: the first word comes then after the longest."""
FULL_PATIENCE = 300.0
"""Seconds without a step on a volume without room after which the job is given up."""
FULL = "is full"


async def poll_shards(
    watch: RunWatch, shards: Sequence[Listening], current: Current, close: Callable[[], bool], wake: asyncio.Event
) -> None:
    """Ask every shard again and again, each in its own rhythm: one that hangs holds up no other.

    `close`: ask more often now. `wake` is set when a shard becomes ready or silent, or names a worker that hangs.
    """
    async with asyncio.TaskGroup() as group:
        for index, shard in enumerate(shards):
            group.create_task(_poll(watch, index, shard, current, close, wake))


@dataclass
class ShardHealth:
    """What was heard of one process."""

    good: float | None = None
    misses: int = 0
    serving: bool = False


@dataclass
class RunWatch:
    """Everything that was heard in this run."""

    progress_deadline: float
    questions: bytes
    """The run's key of that name (contract.KEYS)."""
    told: dict[tuple[int, int], Mapping[str, Any]] = field(default_factory=dict)
    """(shard, attempt) -> the last that it said."""
    progress: Mapping[str, Any] | None = None
    """The last of shard 0 that holds the coordinator."""
    progress_at: float | None = None
    manifests: set[tuple[int, int]] = field(default_factory=set)
    """(term, step) of the committed checkpoints that were seen."""
    hearers: list[Callable[[int, Mapping[str, Any], float], None]] = field(default_factory=list)
    """Each is called with a shard, what it said, and when."""
    began_at: int | None = None
    """The step at which this run began; of one that continues from another run, as first heard."""
    _pulses: dict[str, ShardHealth] = field(default_factory=dict)
    _moved_at: float = 0.0

    @property
    def hung(self) -> bool:
        """Does shard 0 name workers that hang?"""
        return bool(self.coordinator.get("hung"))

    async def ask(self, child: ChildProcess, shard: Listening) -> None:
        """One round with one shard: is it well, and what does it say."""
        pulse = self._pulses.setdefault(child.uid, ShardHealth())
        if not await is_healthy(shard, self._patience):
            pulse.misses += 1
            return
        pulse.good, pulse.misses = time.time(), 0
        await self.look(child, shard)

    async def look(self, child: ChildProcess, shard: Listening) -> Mapping[str, Any] | None:
        """What a shard says right now, taken note of; None without a good answer."""
        told = await ask_status(shard, self.questions, self._patience)
        if told is not None and child.running:
            self.hear(child, told)
        return told

    def hear(self, child: ChildProcess, told: Mapping[str, Any]) -> None:
        """Take note of what a shard said, on its status port or at its end."""
        if numbers(told, "attempt") not in (0, child.number):
            return  # The port's last holder: its answer was on the way while it was replaced.
        pulse = self._pulses.setdefault(child.uid, ShardHealth())
        pulse.serving = told.get("state") in ("serving", "finishing", "finished")
        # It has started: from now on silence counts, though nobody has asked for its heartbeat yet.
        pulse.good = pulse.good or time.time()
        before = self.told.get((child.index, child.number))
        if before is not None and before.get("transfer") != told.get("transfer"):
            self._moved_at = time.time()
        self.told[child.index, child.number] = told
        coordinator = part(told, "coordinator")
        if child.index == 0 and coordinator:
            self.progress, self.progress_at = told, time.time()
            self.began_at = self.step if self.began_at is None else self.began_at
            checkpoint = part(coordinator, "checkpoint")
            if checkpoint:
                self.manifests.add((int(numbers(checkpoint, "term")), int(numbers(checkpoint, "step"))))
        for hear in self.hearers:
            hear(child.index, told, time.time())

    def ended(self, child: ChildProcess, message: str) -> None:
        """A process has ended; a shard's last words are its status at the end."""
        if child.role != "shard":
            return
        try:
            last = json.loads(message)
        except (ValueError, RecursionError):
            return
        last = last.get("status") if isinstance(last, dict) else None
        if isinstance(last, dict):
            before = self.told.get((child.index, child.number), {})
            # Cut to 2 KB, the last words leave out what did not fit.
            merged = {**before, **last, "counters": {**part(before, "counters"), **part(last, "counters")}}
            if child.index == 0:
                merged["coordinator"] = {**part(before, "coordinator"), **part(last, "coordinator")}
            self.hear(child, merged)

    def ready(self, child: ChildProcess) -> bool:
        """It serves."""
        return self._pulses.setdefault(child.uid, ShardHealth()).serving

    def unresponsive(self, child: ChildProcess) -> bool:
        """No good answer for so long; before the first one, for as long as a start may take."""
        if child.role != "shard":
            return False
        pulse = self._pulses.setdefault(child.uid, ShardHealth())
        silent = time.time() - (child.created if pulse.good is None else pulse.good)
        return pulse.misses >= LEAST_MISSES and silent > (STARTUP if pulse.good is None else self.progress_deadline)

    @property
    def _patience(self) -> float:
        return min(LONGEST_TRY, self.progress_deadline / (LEAST_MISSES + 1))

    @property
    def coordinator(self) -> Mapping[str, Any]:
        """What the coordinator last said; empty before."""
        return part(self.progress, "coordinator")

    @property
    def checkpoints(self) -> int:
        """Committed checkpoints above step 0 that were seen."""
        return sum(step > 0 for _, step in self.manifests)

    @property
    def step(self) -> int:
        """Lowest complete clock, as last heard."""
        return int(numbers(self.coordinator, "step"))

    @property
    def made(self) -> int:
        """Steps that the job has made in this run, as last heard."""
        return self.step - (self.began_at or 0)

    @property
    def unsaved(self) -> bool:
        """Has the job made steps that no committed checkpoint holds, as last heard?"""
        saved = numbers(self.coordinator, "checkpoint", "step") if self.coordinator.get("checkpoint") else self.began_at or 0
        return self.step > saved

    @property
    def moving(self) -> bool:
        """Are bytes of a checkpoint being written or read? As heard in the last seconds."""
        return time.time() - self._moved_at < MOVING

    def total(self, counter: str) -> int:
        """A counter over all shards and attempts, as last heard of each."""
        return sum(int(numbers(told, "counters", counter)) for told in self.told.values())


async def _poll(
    watch: RunWatch,
    index: int,
    shard: Listening,
    current: Callable[[int], ChildProcess | None],
    close: Callable[[], bool],
    wake: asyncio.Event,
) -> None:
    while True:
        child = current(index)
        if child is not None:
            before = watch.ready(child), watch.unresponsive(child)
            await watch.ask(child, shard)
            if before != (watch.ready(child), watch.unresponsive(child)) or watch.hung:
                wake.set()
        await asyncio.sleep(CLOSE_POLL_SECONDS if close() or child is None else POLL_SECONDS)


def attach_verdict(watch: RunWatch, children: Iterable[ChildProcess], restarted: bool) -> str | None:
    """Names a worker that ended well without ever joining: the others, and the shards, would wait for it forever.

    `restarted`: a shard has been started again.
    """
    if watch.step > 0 or watch.progress_at is None or restarted:
        return None
    heard = watch.progress_at - PATIENCE_SECONDS
    left = {child.index for child in children if child.role == "worker" and child.code == 0 and child.ended and child.ended < heard}
    ending = never_joined(watch.coordinator, left)
    return None if ending is None else f"{ending.reason}: {ending.message}"


@dataclass(frozen=True)
class Failure:
    """A worker whose script ended with an error."""

    name: str
    index: int
    code: int
    made: int
    """Steps that the job had made by then, as last heard."""
    tail: str
    """The end of its log."""
    at: float
    """When it ended."""

    def __str__(self) -> str:
        last = self.tail.splitlines()[-1].strip() if self.tail else ""
        if any(words in last for words in NO_GROUP):
            last += ". psjob starts no process group of torch.distributed: `psjob convert SCRIPT.py` shows how the script does without"
        return f"{self.name} ended with exit code {self.code}" + (f": {last[:300]}" if last else "")


@dataclass
class Failures:
    """Those of one run, in their order."""

    seen: list[Failure] = field(default_factory=list)

    def note(self, child: ChildProcess, made: int, tail: str, ours: bool = False) -> None:
        """A process has ended. `ours`: the runtime ended it and not the script, or the job's podFailurePolicy says what then."""
        if child.role != "worker" or child.deleting is not None or child.problem or not child.code:
            return
        if not ours and child.code < SIGNALS:
            self.seen.append(Failure(child.name, child.index, child.code, made, tail, child.ended or 0.0))

    def note_unfinished(self, child: ChildProcess, made: int) -> None:
        """A worker that ended with exit code 0 has not finished training, as shard 0 says now."""
        if all(failure.name != child.name for failure in self.seen):
            self.seen.append(Failure(child.name, child.index, 0, made, UNSEEN, child.ended or 0.0))

    def verdict(self, made: int, heard: float | None, now: float) -> str | None:
        """Why it is of no use to start the script once more: it failed before the job's first step, or twice at one step.

        `made`: steps of the job, as heard at `heard` (None: never). What was heard before a failure says nothing of its moment.
        """
        first = next(iter(self.seen), None)
        if first is not None and first.made == made == 0 and _known(first, heard, now):
            return f"ScriptFailed: {first} (before the job's first step); fix the script and run it again"
        before: Mapping[int, Failure] = {}
        for failure in self.seen:
            earlier = before.get(failure.index)
            if earlier is not None and failure.made <= earlier.made:
                assert first is not None
                again = "" if failure.tail == first.tail else f"; started again, {failure}"
                where = f"at step {first.made}" if first.made else "before the job's first step"
                return f"ScriptFailed: {first} ({where}){again}; the first error is the one to look at"
            before = {**before, failure.index: failure}
        return None

    def holds(self, made: int, heard: float | None, now: float) -> bool:
        """Nothing is to be started again: there is a verdict, or there may be one within 2 s, when the job is heard of again."""
        first = next(iter(self.seen), None)
        open_yet = first is not None and first.made == made == 0 and now < first.at + 2 * UNHEARD and not _known(first, heard, now)
        return open_yet or self.verdict(made, heard, now) is not None


def _known(failure: Failure, heard: float | None, now: float) -> bool:
    """Was the job heard of since, so that its steps are those that it had made?"""
    return now > failure.at + UNHEARD if heard is None else heard > failure.at


@dataclass
class Standstill:
    """Of one run. Time is an argument, so that it can be tested."""

    unit: str = "step"
    """What the job counts."""
    step: int = -1
    since: float | None = None
    """When the last step was seen."""
    again: float = FIRST_WORD
    problem: bool = False
    """Was a problem with checkpoints said, that is not over yet?"""

    def see(self, step: int, told: Mapping[str, Any], now: float) -> list[str]:
        """Lines to say now: checkpoints that cannot be written, and a job that makes no step."""
        if self.since is None or step != self.step:
            self.step, self.since, self.again = step, now, FIRST_WORD
        lines = self._checkpoints(told)
        seconds = now - self.since
        if seconds >= self.again and (_reason(told) or seconds >= LONGEST_SILENCE):
            lines.append(self._standstill(told, seconds))
            while self.again <= seconds:
                self.again += min(self.again, LONGEST_SILENCE)
        return lines

    def verdict(self, told: Mapping[str, Any], now: float) -> str | None:
        """Why the run ends: without room nobody can continue, and nobody makes any."""
        if self.since is None or now - self.since < FULL_PATIENCE or FULL not in _problem(told):
            return None
        return f"DiskFull: no {self.unit} for {now - self.since:.0f} s at {self.unit} {max(0, self.step)}: {_problem(told)}"

    def _checkpoints(self, told: Mapping[str, Any]) -> list[str]:
        problem = _problem(told)
        if bool(problem) == self.problem:
            return []
        self.problem = bool(problem)
        return [f"warning: {problem}" if problem else "checkpoints are written again"]

    def _standstill(self, told: Mapping[str, Any], seconds: float) -> str:
        why = _reason(told) or "nobody waits for anybody, so workers compute or load; their logs say more"
        remedy = "spec.workers.progressDeadlineSeconds has such a worker started again; " if told.get("hung") else ""
        return f"no {self.unit} for {seconds:.0f} s, at {self.unit} {max(0, self.step)}: {why}; {remedy}Ctrl-C stops the job"


def _reason(told: Mapping[str, Any]) -> str:
    """Why nothing continues; empty where no process says that it waits."""
    hung = ", ".join(f"worker {one.get('rank')} for {one.get('seconds')} s" for one in _mappings(told.get("hung")))
    return f"they wait for {hung}" if hung else str(told.get("waiting") or "") or _problem(told)


def _problem(told: Mapping[str, Any]) -> str:
    return str(told.get("checkpointProblem") or "")


def _mappings(value: object) -> list[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []
