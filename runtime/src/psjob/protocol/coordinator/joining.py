"""A worker joins: at which clock, from which record, or must all go back?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from psjob.protocol.coordinator import actions, events
from psjob.protocol.coordinator.events import ShardProgress, Stream
from psjob.protocol.coordinator.members import Member, State
from psjob.wire.frame import Kind

if TYPE_CHECKING:
    from psjob.protocol.coordinator.recovery import Recovery

PACE_SECONDS = 0.25
"""From one question to the next: workers that come meanwhile are asked for together."""


@dataclass(frozen=True)
class Stand:
    """A shard, and one worker as it has it: complete clocks of it."""

    shard: ShardProgress
    complete: int


@dataclass
class Question:
    """Where all shards have these workers; one is under way at a time."""

    number: int
    ranks: tuple[int, ...]
    answers: dict[int, events.StandsAt] = field(default_factory=dict)

    def order(self) -> dict[str, Any]:
        """What shards are ordered."""
        return {"do": "where", "ask": self.number, "ranks": list(self.ranks)}


class Joining:
    """Workers that wait to be placed."""

    def __init__(self, recovery: Recovery) -> None:
        self.recovery = recovery
        self._waiting: dict[int, Stream] = {}
        self._question: Question | None = None
        self._number = 0
        self._asked_at: float | None = None
        self._restored: dict[int, events.ShardRestored] = {}
        """By shard, what it told when it was restored, where all were together: it holds for a worker until that has come once."""
        self._unplaced: set[int] = set()

    def join(self, stream: Stream) -> None:
        """Training is on: a process that knows its place goes on at once, a fresh one is placed first. `ask` follows."""
        c = self.recovery.c
        member = c.members[stream.rank]
        if member.state is State.LEFT:
            c.left(stream.rank)
        if not stream.fresh:
            self._welcome(member, None)
            return
        if member.state is State.LEFT and self.recovery.rule != "reduce":
            return
        if stream.rank in self._unplaced and member.state is not State.LEFT:
            self._place(member, [Stand(r.stands, r.complete[stream.rank]) for r in self._restored.values() if r.stands and r.complete])
            return
        self._waiting[stream.rank] = stream

    def opened(self, restored: Mapping[int, events.ShardRestored], shards: int) -> dict[int, Stream]:
        """Training begins, or goes on: questions of before are void, and what all shards told when they were restored answers new ones.

        Returns who waits for the answer to an older one.
        """
        waiting, self._waiting, self._question = self._waiting, {}, None
        # In a mode that goes on without a worker, its own streams to other shards may move its clock before it is placed.
        whole = (
            len(restored) == shards and all(r.stands and r.complete for r in restored.values()) and self.recovery.c.mode.rewinds_together
        )
        self._restored = dict(restored) if whole else {}
        self._unplaced = {m.rank for m in self.recovery.c.members.live()} if whole else set()
        return waiting

    def ask(self, now: float) -> None:
        """Ask for all that wait, unless a question is under way or was just put."""
        if not self._waiting or self._question is not None:
            return
        if self._asked_at is not None and now - self._asked_at < PACE_SECONDS:
            return
        self._asked_at = now
        self._number += 1
        self._question = Question(self._number, tuple(sorted(self._waiting)))
        self.recovery.order_all(self._question.order())

    def unanswered(self, index: int) -> list[dict[str, Any]]:
        """What a shard on a new stream is asked again."""
        asked = self._question
        return [asked.order()] if asked is not None and index not in asked.answers else []

    def doubted(self, event: events.AckedDoubted) -> None:
        """What a worker says was acknowledged is above what a shard was told: its lost process may live on, cut off, and answer."""
        peer = self.recovery.peers.get(event.shard)
        if peer is not None:
            self.recovery.c.emit(actions.Order(peer.link, {"do": "bound", "most": {}}, self.recovery.sure))

    def where(self, event: events.StandsAt) -> None:
        """A shard says how far the workers of a question are there."""
        asked = self._question
        if asked is None or event.ask != asked.number or not event.rows.keys() >= set(asked.ranks):
            return
        asked.answers[event.shard] = event
        if len(asked.answers) < len(self.recovery.peers):
            return
        self._question = None
        for rank in asked.ranks:
            stream = self._waiting.pop(rank, None)
            member = self.recovery.c.members[rank]
            if stream is not None and member.stream is stream and member.here and self.recovery.open:
                self._place(member, [Stand(a.stands, a.rows[rank][0]) for _, a in sorted(asked.answers.items())])
        self.ask(self.recovery.c.now)

    def _place(self, member: Member, stands: Sequence[Stand]) -> None:
        c = self.recovery.c
        stage = c.job.stages.of(member.rank)
        owning = [own for own in (Stand(stand.shard.of(stage), stand.complete) for stand in stands) if own.shard.owned]
        clock: int | None
        if member.state is State.LEFT:
            if any(stand.shard.stored < (member.left_at or 0) for stand in owning):
                self._all_again(member, "ended before all shards had its last weights")
            return
        if c.deciding is not None:
            clock = c.deciding.clock(member.rank)
        elif c.mode.rewinds_together:
            clock = resume_sync([stand.shard for stand in owning], set(member.records), exact=c.job.flushes)
            if self.recovery.rule == "reduce" and any(stand.shard.stored != clock for stand in owning):
                clock = None  # the workers step by themselves: only they hold the weights of this clock
            if clock is None:
                self._all_again(member, "came back without the record of the step the job waits for")
                return
        else:
            clock = resume_async([stand.complete for stand in owning])
        self._welcome(member, clock)

    def _all_again(self, member: Member, why: str) -> None:
        assert member.stream is not None
        self.recovery.waiting[member.rank] = member.stream
        self.recovery.rewind_all(f"worker {member.rank} {why}")

    def _welcome(self, member: Member, clock: int | None) -> None:
        recovery, c, stream = self.recovery, self.recovery.c, member.stream
        assert stream is not None
        self._unplaced.discard(member.rank)
        taken: int | None = None
        if clock is not None:
            exact = c.mode.steady and c.job.flushes
            taken = (clock if clock in member.records else None) if exact else member.newest(clock)
            member.clock = clock if c.mode.rewinds_together else max(member.clock, clock)
        record, at = (b"", 0) if taken is None else (member.records[taken], clock or 0)
        if clock is not None and taken is None and recovery.initial:
            record, at = recovery.initial, -1
        member.welcomed, member.joined_in = True, recovery.restores
        body = {
            "view": recovery.view, "recovery": recovery.recovery, "clock": clock or 0, "record": bool(record),
            # A residual goes into the next push. That of an older record was fed in already, by pushes that count.
            "residual": taken is None or taken == clock, "assignment": list(recovery.assignment),
        }  # fmt: skip
        if recovery.layout is not None and stream.layout not in ("", recovery.layout.digest()):
            body["blocks"] = recovery.layout.to_json()["blocks"]  # a checkpoint of another version may have been cut in another way
        c.emit(actions.Welcome(stream.id, body, clock, record=record, record_clock=at))
        self._introduce(member)
        c.cutting.ask_mark(member)
        if clock is not None:
            c.hanging.stirred(member.rank)
            c.cutting.passed(member, clock)

    def _introduce(self, member: Member) -> None:
        """A worker of a stage and those that it shares micro-batches with hear of each other."""
        c = self.recovery.c
        for rank in c.job.stages.neighbours(member.rank):
            other = c.members[rank]
            if other.here and other.welcomed:
                for one, told in ((member, other), (other, member)):
                    if one.stream is not None and told.stream is not None and told.stream.listens is not None:
                        c.emit(actions.Introduce(one.stream.id, told.rank, told.incarnation[0], *told.stream.listens))

    def not_joined(self, event: events.NotJoined) -> None:
        """Its successor was quicker, on another stream; this one must not take training with it."""
        c = self.recovery.c
        c.log("info", event.why)
        member = c.members.of(event.stream)
        if member is not None:
            member.welcomed, member.joined_in = False, -1
            # No successor: a restore came before it was placed, so it comes again, with rewinds + 1.
            c.emit(actions.Tell(event.stream, Kind.REWIND))
        c.emit(actions.HangUp(event.stream))


def resume_sync(stands: Sequence[ShardProgress], records: set[int], exact: bool = True) -> int | None:
    """The clock a returning sync worker goes on at: the one its blocks wait for, if its record is at hand; else None.

    Where bits need not be those of an undisturbed run (not `exact`) an older record will do: the script makes the steps since then again,
    without effect.
    """
    versions = {edge for stand in stands for edge in (stand.lo, stand.hi)}
    if len(versions) > 1:
        return None
    clock = versions.pop() if versions else 0
    found = clock in records or (clock == 0 and not records) or (not exact and any(record < clock for record in records))
    return clock if found else None


def resume_async(complete: Sequence[int]) -> int:
    """The clock a returning async worker goes on at: the first that not every shard has whole of it.

    A push that some shards took and others did not is made again: who has it refuses it. A shard that lost more than that
    with its attempt cannot be filled up; the clock that counts is the others'.
    """
    newest = max(complete, default=0)
    return newest - 1 if newest - 1 in complete else newest
