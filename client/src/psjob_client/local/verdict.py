"""When a run of this machine is given up, though `plan()` would go on. Pure: time is an argument.

A script that fails by itself would fail again: on one machine, where its author sits, that is not found out seven times (`Failures`). A job
whose workers never join can never begin (`never_attached`). A job that makes no step is never silent, and without room on its disk it ends
(`Standstill`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from psjob_client.local.monitor import Watch
from psjob_client.local.process import ChildProcess
from psjob_operator.plan.job_state import PATIENCE_SECONDS
from psjob_operator.plan.process_outcome import UNSEEN
from psjob_operator.plan.terminal import never_joined

UNHEARD = 1.0
"""Seconds after a failure in which a job that has trained is heard of for the first time."""
SIGNALS = 128
"""Exit codes from here on are signals'."""
NO_GROUP = ("environment variable RANK expected", "process group has not been initialized")
"""What torch says to a script for DDP that has not been started by torchrun."""
FIRST_WORD, LONGEST_SILENCE = 30.0, 300.0
"""Seconds without a step before the first word; it comes again after twice as long, up to the longest. Where nobody is waited for, a step
may just be long: the first word comes then after the longest."""
FULL_PATIENCE = 300.0
"""Seconds without a step on a volume without room after which the job is given up."""
FULL = "is full"


def never_attached(watch: Watch, children: Iterable[ChildProcess], restarted: bool) -> str | None:
    """Names a worker that ended well without ever joining: the others, and the shards, would wait for it for ever.

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
        """Why the run ends: without room nobody can go on, and nobody makes any."""
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
    """Why nothing goes on; empty where no process says that it waits."""
    hung = ", ".join(f"worker {one.get('rank')} for {one.get('seconds')} s" for one in _mappings(told.get("hung")))
    return f"they wait for {hung}" if hung else str(told.get("waiting") or "") or _problem(told)


def _problem(told: Mapping[str, Any]) -> str:
    return str(told.get("checkpointProblem") or "")


def _mappings(value: object) -> list[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []
