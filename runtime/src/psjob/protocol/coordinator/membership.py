"""Who takes part: whom a hello lets in, at which clock a worker joins, from which record, and who hangs.

A process must be of the job's mode, model and rule, and of no step that a restore has undone. One that knows its place continues at once.
A fresh one is placed where all shards have its rank. If it cannot be placed, all go back to the newest checkpoint.

A worker hangs if it makes no step for too long while others wait for it. One that is only slow, or that nobody waits for, is left alone.
It first gets a message, so that it writes down the stacks of its threads. If it is still there a moment later, the status names it, for
the planner to end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psjob.layout.blocks import TensorSpec
from psjob.modes import format_mode
from psjob.protocol import messages
from psjob.protocol.coordinator import checkpoints, events, updates
from psjob.protocol.coordinator.events import StreamFacts
from psjob.protocol.coordinator.members import Member, State
from psjob.protocol.coordinator.state import CoordinatorState, Question
from psjob.protocol.messages import Bound, ShardPosition, Where
from psjob.wire.frame import Kind

PACE_SECONDS = 0.25
"""From one question to the next: workers that come meanwhile are asked for together."""
HUNG_SECONDS = 0.5
"""A worker that was asked to end has so long to write its stacks and end."""
REPORT_SECONDS = 3.0
"""What a shard has told of holds so long: it tells once a second."""
LOOK_SECONDS = 0.25


# -- who is let in -----------------------------------------------------------------------------------


def is_behind(state: CoordinatorState, stream: StreamFacts) -> bool:
    """Is a worker of another mode, or of what a restore has undone? One that was out of reach then must begin again too."""
    if stream.incarnation < state.fences.get(stream.rank, (0, 0)):
        return True
    missed = not stream.fresh and stream.restore_id != state.restore_id
    return (missed and state.mode.rewinds_together) or stream.mode != format_mode(state.mode)


def refuse_mismatch(state: CoordinatorState, stream: StreamFacts) -> bool:
    """Has a worker another model or rule than the job? Then it gets that answer."""
    problem = stream.problem or _difference(state, stream)
    if problem:
        state.refuse(stream.id, problem)
    return problem is not None


def _difference(state: CoordinatorState, stream: StreamFacts) -> str | None:
    table: tuple[TensorSpec, ...] = () if state.layout is None else state.layout.table
    tables, rule = state.tables, state.rule
    if not (table or tables) and state.source is not None:
        table, tables, rule = state.source.layout.table, state.source.tables, state.source.rule
    if not (table or tables):
        return None
    return (
        first_difference(stream.rank, table, stream.table)
        or table_difference(stream.rank, tables, stream.tables)
        or rule_difference(stream.rank, rule, rule_for(stream.rule, state.job.update_at))
    )


# -- where a worker continues --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Known:
    """If a shard is, and how many clocks it has complete of one worker."""

    shard: ShardPosition
    complete: int


def join(state: CoordinatorState, stream: StreamFacts) -> str | None:
    """Training is on: a process that knows its place continues at once, a fresh one is placed first. `ask` follows.

    Returns why all must go back for it, if they must.
    """
    member, joining = state.members[stream.rank], state.joining
    if member.state is State.LEFT:
        updates.worker_left(state, stream.rank)
    if not stream.fresh:
        _welcome(state, member, None)
        return None
    if member.state is State.LEFT and state.rule != "reduce":
        return None
    if stream.rank in joining.unplaced and member.state is not State.LEFT:
        known = [_Known(r.position, r.complete[stream.rank]) for r in joining.restored.values() if r.position and r.complete]
        return _place(state, member, known)
    joining.waiting[stream.rank] = stream
    return None


def opened(state: CoordinatorState) -> dict[int, StreamFacts]:
    """Training begins, or continues: questions of before are void, and what all shards told when they were restored answers new ones.

    Returns who waits for the answer to an older one.
    """
    joining, restored = state.joining, state.restored
    waiting, joining.waiting, joining.question = joining.waiting, {}, None
    # In a mode that continues without a worker, its own streams to other shards may move its clock before it is placed.
    every = len(restored) == len(state.peers) and all(r.position and r.complete for r in restored.values())
    whole = every and state.mode.rewinds_together
    joining.restored = dict(restored) if whole else {}
    joining.unplaced = {m.rank for m in state.members.live()} if whole else set()
    return waiting


def ask(state: CoordinatorState) -> None:
    """Ask for all that wait, unless a question is under way or was just put."""
    joining, now = state.joining, state.now
    if not joining.waiting or joining.question is not None:
        return
    if joining.asked_at is not None and now - joining.asked_at < PACE_SECONDS:
        return
    joining.asked_at = now
    joining.number += 1
    joining.question = Question(joining.number, tuple(sorted(joining.waiting)))
    state.order_all(joining.question.order())


def unanswered(state: CoordinatorState, index: int) -> list[Where]:
    """What a shard on a new stream is asked again."""
    asked = state.joining.question
    return [asked.order()] if asked is not None and index not in asked.answers else []


def answered(state: CoordinatorState, event: messages.WorkerPositions) -> str | None:
    """A shard says how far the workers of a question are there. Once all have: place them, and ask for who came meanwhile.

    Returns why all must go back for one of them, if they must; `ask` follows then too.
    """
    joining, asked = state.joining, state.joining.question
    if asked is None or event.ask != asked.number or not event.rows.keys() >= set(asked.ranks):
        return None
    asked.answers[event.shard] = event
    if len(asked.answers) < len(state.peers):
        return None
    joining.question = None
    why: str | None = None
    for rank in asked.ranks:
        stream, member = joining.waiting.pop(rank, None), state.members[rank]
        if why is None and stream is not None and member.stream is stream and member.here and state.open:
            why = _place(state, member, [_Known(a.position, a.rows[rank][0]) for _, a in sorted(asked.answers.items())])
    if why is None:
        ask(state)
    return why


def _place(state: CoordinatorState, member: Member, known: Sequence[_Known]) -> str | None:
    stage = state.job.stages.of(member.rank)
    owning = [own for own in (_Known(one.shard.of(stage), one.complete) for one in known) if own.shard.owned]
    clock: int | None
    if member.state is State.LEFT:
        if any(one.shard.stored < (member.left_at or 0) for one in owning):
            return _all_again(state, member, "ended before all shards had its last weights")
        return None
    if state.updates is not None:
        clock = updates.decided_clock(state.updates, member.rank)
    elif state.mode.rewinds_together:
        clock = resume_sync([one.shard for one in owning], set(member.records), exact=state.job.flushes)
        if state.rule == "reduce" and any(one.shard.stored != clock for one in owning):
            clock = None  # the workers step by themselves: only they hold the weights of this clock
        if clock is None:
            return _all_again(state, member, "came back without the record of the step the job waits for")
    else:
        clock = resume_async([one.complete for one in owning])
    _welcome(state, member, clock)
    return None


def _all_again(state: CoordinatorState, member: Member, why: str) -> str:
    assert member.stream is not None
    state.waiting[member.rank] = member.stream
    return f"worker {member.rank} {why}"


def _welcome(state: CoordinatorState, member: Member, clock: int | None) -> None:
    """Let a process in, at `clock` (None: it knows its place)."""
    stream = member.stream
    assert stream is not None
    state.joining.unplaced.discard(member.rank)
    taken: int | None = None
    if clock is not None:
        exact = state.mode.steady and state.job.flushes
        taken = (clock if clock in member.records else None) if exact else member.newest(clock)
        member.clock = clock if state.mode.rewinds_together else max(member.clock, clock)
    record, at = (b"", 0) if taken is None else (member.records[taken], clock or 0)
    if clock is not None and taken is None and state.initial:
        record, at = state.initial, -1
    member.welcomed, member.joined_in = True, state.restored_by
    body = {
        "term": state.term, "restore_id": state.restore_id, "clock": clock or 0, "record": bool(record),
        # A residual goes into the next push. That of an older record was fed in already, by pushes that count.
        "residual": taken is None or taken == clock, "assignment": list(state.assignment),
    }  # fmt: skip
    if state.layout is not None and stream.layout not in ("", state.layout.digest()):
        body["blocks"] = state.layout.to_json()["blocks"]  # a checkpoint of another version may have been cut in another way
    state.emit(events.Welcome(stream.id, body, clock, record=record, record_clock=at))
    _introduce(state, member)
    checkpoints.ask_mark(state, member)
    if clock is not None:
        heartbeat(state, member.rank)
        checkpoints.passed(state, member, clock)


def _introduce(state: CoordinatorState, member: Member) -> None:
    """A worker of a stage and those that it shares micro-batches with hear of each other."""
    for rank in state.job.stages.neighbours(member.rank):
        other = state.members[rank]
        if other.here and other.welcomed:
            for one, told in ((member, other), (other, member)):
                if one.stream is not None and told.stream is not None and told.stream.listens is not None:
                    state.emit(events.Introduce(one.stream.id, told.rank, told.incarnation[0], *told.stream.listens))


def not_joined(state: CoordinatorState, event: events.NotJoined) -> None:
    """Its successor was quicker, on another stream; this one must not take training with it."""
    state.log("info", event.why)
    member = state.members.of(event.stream)
    if member is not None:
        member.welcomed, member.joined_in = False, -1
        # No successor: a restore came before it was placed, so it comes again, with rewinds + 1.
        state.emit(events.Tell(event.stream, Kind.REWIND))
    state.emit(events.CloseWorkerStream(event.stream))


def doubted(state: CoordinatorState, event: messages.AckedDoubted) -> None:
    """What a worker says was acknowledged is above what a shard knows: its lost process may live on, cut off, and answer."""
    peer = state.peers.get(event.shard)
    if peer is not None:
        state.emit(events.Order(peer.link, Bound({}), state.sure))


def resume_sync(shards: Sequence[ShardPosition], records: set[int], exact: bool = True) -> int | None:
    """The clock a returning sync worker continues at: the one its blocks wait for, if its record is at hand; else None.

    Where bits need not be those of an undisturbed run (not `exact`) an older record will do: the script makes the steps since then again,
    without effect.
    """
    versions = {edge for shard in shards for edge in (shard.lo, shard.hi)}
    if len(versions) > 1:
        return None
    clock = versions.pop() if versions else 0
    found = clock in records or (clock == 0 and not records) or (not exact and any(record < clock for record in records))
    return clock if found else None


def resume_async(complete: Sequence[int]) -> int:
    """The clock a returning async worker continues at: the first that not every shard has whole of it.

    A push that some shards took and others did not is made again: who has it refuses it. A shard that lost more than that
    with its attempt cannot be filled up; the clock that counts is the others'.
    """
    newest = max(complete, default=0)
    return newest - 1 if newest - 1 in complete else newest


# -- who hangs ---------------------------------------------------------------------------------------


def heartbeat(state: CoordinatorState, rank: int) -> None:
    """The script of a worker continues, or its process is new."""
    state.hanging.active[rank] = state.now
    state.hanging.notified.pop(rank, None)


def awaited(state: CoordinatorState, event: messages.WorkersAwaited) -> None:
    """A shard tells for whom its answers wait."""
    hanging, now = state.hanging, state.now
    hanging.awaited[event.shard] = now, {rank: now - seconds for rank, seconds in event.seconds.items()}
    for rank, clock in event.clocks.items():
        if hanging.clocks.get(rank) != clock:
            hanging.clocks[rank] = clock
            heartbeat(state, rank)


def tick(state: CoordinatorState) -> None:
    """Tell each worker that hangs, once. Nobody is ever named if the job has no step timeout."""
    limit, hanging, now = state.job.step_timeout, state.hanging, state.now
    if limit is None or now - hanging.looked < LOOK_SECONDS:
        return
    hanging.looked = now
    members = state.members
    keeps = members.alive < len(members.all) and any(m.left_at is not None and m.here for m in members.all.values())
    hanging.kept_since = (hanging.kept_since or now) if keeps else None
    for rank, since in _waits(state, now):
        member = members[rank]
        if now - since < limit or not member.welcomed or rank in hanging.notified:
            continue
        hanging.notified[rank] = member.incarnation, now
        state.log("warning", f"worker {rank} has made no step for {now - since:.0f} s while others wait for it: it is ended")
        state.tell(rank, Kind.HUNG)


def hung(state: CoordinatorState, now: float) -> list[dict[str, Any]]:
    """Workers that were asked to end and are still there, for the planner. May be called while another thread is in `tick`."""
    since = dict(_waits(state, now))
    return [
        {"rank": rank, "start": incarnation[0], "seconds": round(now - since[rank], 1)}
        for rank, (incarnation, told) in sorted(state.hanging.notified.copy().items())
        if rank in since and now - told >= HUNG_SECONDS and state.members[rank].incarnation == incarnation
    ]


def _waits(state: CoordinatorState, now: float) -> Iterator[tuple[int, float]]:
    """Ranks for which somebody waits, and since when each has kept them waiting."""
    hanging, since = state.hanging, dict[int, float]()
    for told, waits in list(hanging.awaited.values()):
        for rank, at in waits.items() if now - told <= REPORT_SECONDS else ():
            since[rank] = min(at, since.get(rank, at))
    for rank, at in (*_unmarked(state), *_kept(state)):
        since[rank] = min(at, since.get(rank, at))
    for rank, at in since.items():
        if state.members[rank].left_at is None:
            yield rank, max(at, hanging.active.get(rank, at))


def _unmarked(state: CoordinatorState) -> Iterator[tuple[int, float]]:
    """Workers whose mark for a snapshot is still to come: the others hold their pushes for it."""
    snapshot = state.snapshots.current
    if snapshot is not None and snapshot.marks and snapshot.asked is not None and not snapshot.committing:
        for member in state.members.live():
            if member.rank not in snapshot.pins:
                yield member.rank, snapshot.asked


def _kept(state: CoordinatorState) -> Iterator[tuple[int, float]]:
    """Workers that still train while one that is through waits for a checkpoint that holds its end."""
    if state.hanging.kept_since is not None:
        for member in state.members.live():
            yield member.rank, state.hanging.kept_since


# -- is a worker's model the job's? --------------------------------------------------------------------


def rule_for(rule: str, update_at: str | None) -> str:
    """The shards' rule, as rank 0 found it from its optimizer (`reduce` where the workers step)."""
    return "reduce" if update_at == "worker" else rule


def rule_difference(rank: int, rule: str, theirs: str) -> str | None:
    """If a worker's rule is not the job's, a sentence: the shards would take its numbers for those of theirs."""
    if theirs == rule:
        return None
    return (
        f"worker {rank}'s updates are of rule {theirs}, the job's of {rule}. Every worker must make the same optimizer, and a run that "
        "continues from another's checkpoint keeps its optimizer, training.updateAt and training.updateRule"
    )


def first_difference(rank: int, table: Sequence[TensorSpec], theirs: Sequence[TensorSpec]) -> str | None:
    """The first tensor in which a worker's table differs from the job's, as a sentence."""
    if table == theirs:
        return None
    for position, ours in enumerate(table):
        if position >= len(theirs):
            return f"worker {rank} has {len(theirs)} parameters, the job has {len(table)}: {ours.name} {list(ours.shape)} is missing"
        if (other := theirs[position]) != ours:
            said = f"worker {rank}'s parameter {position} is {_words(other)}; the job's is {_words(ours)}"
            return f"{said}; every worker must build the same model"
    return f"worker {rank} has {len(theirs)} parameters, the job has {len(table)}: {theirs[len(table)].name} is one too many"


def table_difference(rank: int, tables: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> str | None:
    """The first table of rows in which a worker's differ from the job's, as a sentence. Tables are their specs' JSON."""
    for position, ours in enumerate(tables):
        if position >= len(theirs):
            return f"worker {rank} has {len(theirs)} tables of rows, the job has {len(tables)}: {ours['name']} is missing"
        other = theirs[position]
        for field, value in ours.items():
            if other[field] != value:
                said = f"worker {rank}'s table {position} ({other['name']}) has {field} {other[field]!r}"
                return f"{said}, the job's ({ours['name']}) {value!r}; every worker must build the same model"
    if len(theirs) > len(tables):
        return f"worker {rank} has {len(theirs)} tables of rows, the job has {len(tables)}: {theirs[len(tables)]['name']} is one too many"
    return None


def _words(spec: TensorSpec) -> str:
    stages = f" of stages {', '.join(map(str, spec.stages))}" if spec.stages else ""
    return f"{spec.name} {list(spec.shape)} {spec.dtype} in group {spec.group}{stages}"
