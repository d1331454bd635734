"""A worker joins: at which clock, from which record, or must all go back?"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psjob import contract
from psjob.checkpoint import files, manifest
from psjob.checkpoint.manifest import Manifest
from psjob.coordinator.members import State
from psjob.layout import memory
from psjob.layout.blocks import TensorSpec
from psjob.shard.session import Session
from psjob.wire.frame import Kind, WireError

if TYPE_CHECKING:
    from psjob.coordinator.views import Views

log = logging.getLogger("psjob.coordinator")


@dataclass
class PlacementQuery:
    """A worker that waits until every shard has said where it stands."""

    session: Session
    number: int
    answers: dict[int, Mapping[str, Any]] = field(default_factory=dict)

    def question(self) -> dict[str, Any]:
        """What shards are ordered."""
        return {"do": "where", "ranks": [self.session.rank], "ask": self.number}


class Joining:
    """Workers that wait to be placed."""

    def __init__(self, views: Views) -> None:
        self.views = views
        self._asked: dict[int, PlacementQuery] = {}
        self._number = 0

    def join(self, session: Session) -> None:
        """Training is on: a process that knows its place goes on at once, a fresh one is placed first."""
        c = self.views.c
        member = c.members[session.rank]
        if member.state is State.LEFT:
            c.left(session.rank)
        if not session.hello.get("fresh"):
            self._welcome(session, None)
            return
        if member.state is State.LEFT and c.store.rule_name != "reduce":
            return
        self._number += 1
        self._asked[session.rank] = asked = PlacementQuery(session, self._number)
        self.views.order_all(asked.question())

    def unanswered(self, index: int) -> list[dict[str, Any]]:
        """What a shard on a new stream is asked again."""
        return [asked.question() for asked in self._asked.values() if index not in asked.answers]

    def where(self, index: int, body: Mapping[str, Any]) -> None:
        """A shard says how far a rank is there."""
        rank, complete, _ = body["rows"][0]
        body = {**body, "complete": complete}
        asked = self._asked.get(int(rank))
        if asked is None or body["ask"] != asked.number:
            return
        asked.answers[index] = body
        if len(asked.answers) == len(self.views.peers):
            del self._asked[asked.session.rank]
            self._place(asked)

    def _place(self, asked: PlacementQuery) -> None:
        c, session = self.views.c, asked.session
        if c.sessions.get(session.rank) is not session or not self.views.open:
            return
        member = c.members[session.rank]
        answers = [a for a in asked.answers.values() if a["owned"]]
        clock: int | None
        if member.state is State.LEFT:
            if any(int(a["stored"]) < (member.left_at or 0) for a in answers):
                self._all_again(session, "ended before all shards had its last weights")
            return
        if c.deciding is not None:
            clock = c.deciding.clock(session.rank)
        elif c.mode.rewinds_together:
            clock = resume_sync(answers, set(member.records))
            if c.store.rule_name == "reduce" and any(int(a["stored"]) != clock for a in answers):
                clock = None  # the workers step by themselves: only they hold the weights of this clock
            if clock is None:
                self._all_again(session, "came back without the record of the step the job waits for")
                return
        else:
            clock = resume_async(answers)
        session.hello = dict(session.hello) | {"acked": clock}
        self._welcome(session, clock)

    def _all_again(self, session: Session, why: str) -> None:
        self.views.waiting[session.rank] = session
        self.views.rewind_all(f"worker {session.rank} {why}")

    def _welcome(self, session: Session, clock: int | None) -> None:
        views, c = self.views, self.views.c
        try:
            session.join()
        except WireError as fenced:  # its successor was quicker, on another stream; this one must not take training with it
            log.info("%s", fenced)
            if session.incarnation == c.members[session.rank].incarnation:
                session.tell(Kind.REWIND)  # no successor: a restore came before it was placed, so it comes again, with rewinds + 1
            session.hang_up()
            return
        member = c.members[session.rank]
        record = None
        if clock is not None:
            record = member.records.get(clock) if c.mode.steady else member.newest(clock)
            member.clock = max(member.clock, clock) if not c.mode.rewinds_together else clock
        initial = views.initial if clock is not None and record is None else b""
        session.welcome(
            view=views.view, recovery=views.recovery, clock=clock or 0, record=bool(record or initial), assignment=list(c.store.assignment)
        )
        c.ask_mark(session)
        if record:
            session.tell(Kind.RECORD, payload=record, clock=clock)
        elif initial:
            session.tell(Kind.RECORD, payload=initial, clock=-1)

    def foreign(self) -> tuple[Path, Manifest] | None:
        """What `checkpoint.resumeFrom` names, when this run has no manifest of its own."""
        c = self.views.c
        path = c.config.checkpoint.resume_from
        if not path:
            return None
        folder = Path(path)
        made, problems = manifest.newest(folder, None)
        for problem in problems:
            log.warning("%s", problem)
            c.progress.checkpoint_problem = problem
        if made is None:
            raise ResumeRefused(f"checkpoint.resumeFrom: no valid manifest in {folder}" + (f" ({problems[0]})" if problems else ""))
        if made.final:
            raise ResumeRefused(f"checkpoint.resumeFrom: the run in {folder} is complete; load its final.safetensors in the script instead")
        if len(made.workers) != c.config.workers:
            raise ResumeRefused(
                f"checkpoint.resumeFrom: that run had {len(made.workers)} workers, this job has {c.config.workers}; "
                "set workers.replicas to the same number (another number of shards is fine)"
            )
        modes = contract.GOES_ON.get(made.mode, (made.mode,))
        if c.mode.name not in modes:
            raise ResumeRefused(
                f"checkpoint.resumeFrom: that run was {made.mode}, this job is {c.mode.name}; training.mode may be {' or '.join(modes)}"
            )
        return folder, made


class ResumeRefused(Exception):
    """The job cannot begin from what resumeFrom names; the text says why and what to change."""


def resume_sync(answers: Sequence[Mapping[str, Any]], records: set[int]) -> int | None:
    """The clock a returning sync worker goes on at: the one the whole job waits for, if its record is at hand; else None.

    Each answer has `lo` and `hi`, the lowest and highest version of a shard's blocks.
    """
    versions = {int(a[edge]) for a in answers for edge in ("lo", "hi")}
    if len(versions) > 1:
        return None
    clock = versions.pop() if versions else 0
    return clock if clock in records or (clock == 0 and not records) else None


def resume_async(answers: Sequence[Mapping[str, Any]]) -> int:
    """The clock a returning async worker goes on at: the first that not every shard has whole of it.

    A push that some shards took and others did not is made again: who has it refuses it. A shard that lost more than that
    with its attempt cannot be filled up; the clock that counts is the others'.
    """
    newest = max((int(a["complete"]) for a in answers), default=0)
    return newest - 1 if any(int(a["complete"]) == newest - 1 for a in answers) else newest


def rule_for(hello: Mapping[str, Any], update_at: str | None) -> str:
    """The shards' rule, as rank 0 found it from its optimizer (`reduce` where the workers step)."""
    return "reduce" if update_at == "worker" else str(hello["rule"])


def rule_difference(rank: int, rule: str, theirs: str) -> str | None:
    """Where a worker's rule is not the job's, a sentence: the shards would take its numbers for those of theirs."""
    if theirs == rule:
        return None
    return (
        f"worker {rank}'s updates are of rule {theirs}, the job's of {rule}; every worker must make the same optimizer, and a run that "
        "goes on from another's checkpoint keeps its optimizer, training.updateAt and training.updateRule"
    )


def difference(rank: int, table: Sequence[TensorSpec], theirs: Sequence[Mapping[str, Any]]) -> str | None:
    """The first tensor in which a worker's table differs from the job's, as a sentence."""
    for position, ours in enumerate(table):
        if position >= len(theirs):
            return f"worker {rank} has {len(theirs)} parameters, the job has {len(table)}: {ours.name} {list(ours.shape)} is missing"
        other = theirs[position]
        mine = (ours.name, list(ours.shape), ours.dtype, ours.group)
        got = (other.get("name"), list(other.get("shape", ())), other.get("dtype"), other.get("group"))
        if mine != got:
            return (
                f"worker {rank}'s parameter {position} is {got[0]} {got[1]} {got[2]} in group {got[3]}; "
                f"the job's is {mine[0]} {mine[1]} {mine[2]} in group {mine[3]}; every worker must build the same model"
            )
    if len(theirs) > len(table):
        return f"worker {rank} has {len(theirs)} parameters, the job has {len(table)}: {theirs[len(table)].get('name')} is one too many"
    return None


def read_records(folder: Path, made: Manifest) -> dict[int, bytes]:
    """The resume records a manifest holds, by rank."""
    if made.records is None:
        return {}
    tensors = files.read_blocks(folder / made.records.name, None, made.records)
    return {int(name.removeprefix("record.")): bytes(memory.view(t)) for name, t in tensors.items() if name.startswith("record.")}


def read_initial(folder: Path, made: Manifest) -> bytes:
    """What rank 0 gave when the run began, from the manifest of step 0; empty from a later one."""
    if made.records is None or "initial" not in made.records.tensors:
        return b""
    return bytes(memory.view(files.read_blocks(folder / made.records.name, ["initial"], made.records)["initial"]))
