"""A script that fails by itself would fail again: on one machine, where its author sits, that is not found out seven times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from psjob_client.local.children import ChildProcess
from psjob_operator.plan.process_outcome import UNSEEN

UNHEARD = 1.0
"""Seconds after a failure in which a job that has trained is heard of for the first time."""
SIGNALS = 128
"""Exit codes from here on are signals'."""
NO_GROUP = ("environment variable RANK expected", "process group has not been initialized")
"""What torch says to a script for DDP that has not been started by torchrun."""


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
        """A process has ended. `ours`: it was the runtime that ended it and not the script, or the job's failureRules say what then."""
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
