"""The coordinator: a module inside shard 0's process that keeps the job together.

One thread, one queue of events, decisions in the pure parts beside it. It knows the members and their records, brings all
shards to one view, orders cuts and commits them, and ends the job. Every order goes to every shard the same way; shard 0
is only the one that answers without a network.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psjob import contract
from psjob.checkpoint import claim
from psjob.checkpoint.problems import CheckpointProblem
from psjob.coordinator.commit import Committer
from psjob.coordinator.cuts import Cut, Cuts
from psjob.coordinator.deciding import Deciding
from psjob.coordinator.ending import Completion
from psjob.coordinator.joining import ResumeRefused
from psjob.coordinator.lateness import Lateness
from psjob.coordinator.members import Members, State
from psjob.coordinator.progress import JobProgress
from psjob.coordinator.switching import Switching
from psjob.coordinator.views import Views
from psjob.process import supervise
from psjob.process.config import Place
from psjob.process.errors import Fenced
from psjob.shard.session import Session
from psjob.wire.frame import IDLE_PARTS, Header, Kind

if TYPE_CHECKING:
    from psjob.shard.server import Server

TICK_SECONDS = 0.05
BUSY_SECONDS = 600.0
CLAIM_SECONDS = 5.0
STALENESS_SECONDS = 0.5
AWAY_SECONDS = 10.0
"""A worker that is away for less is no word to anybody."""
log = logging.getLogger("psjob.coordinator")


class Coordinator:
    """`hello`, `frame`, `peer_*`, `step_passed` and `stop` may be called from any thread; all else runs in the coordinator's own."""

    def __init__(self, place: Place, server: Server, folder: Path, exit_with: Callable[[int], None]) -> None:
        self.place, self.config, self.server, self.store = place, place.config, server, server.store
        self.folder, self.exit_with = folder, exit_with
        self.mode = server.store.mode
        self.members = Members(place.config.workers)
        self.sessions: dict[int, Session] = {}
        saved = place.config.checkpoint
        interval = None if saved.disabled else saved.interval_seconds
        places = self.mode.marks() or self.mode.decided  # it is taken where the workers are, not at a step ahead of them
        self.cuts = Cuts(interval, None if saved.disabled else saved.every_steps, places, place.view, self.mode.ahead)
        self.progress = JobProgress()
        self.lateness = Lateness()
        self.committer = Committer(self)
        self.views = Views(self)
        self.ending = Completion(self)
        self.switching = Switching(self)
        self.deciding = Deciding(self) if self.mode.decided else None
        self.beat = time.monotonic()
        self._looked = self.beat
        self._staleness_told = 0.0
        self._away_since = 0.0
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def start(self) -> None:
        supervise.start(self._run, "coordinator")

    def _run(self) -> None:
        try:
            claim.claim(self.folder, self.place.view, self.place.pod)
            self.views.begin()
            while True:
                try:
                    event = self._events.get(timeout=TICK_SECONDS)
                except queue.Empty:
                    pass
                else:
                    self._carry_out(event)
                self.beat = time.monotonic()
                self._tick(self.beat)
        except Fenced as fenced:
            self.server.fenced(fenced)
        except CheckpointProblem as problem:
            self.server.leave(1, str(problem))
        except ResumeRefused as refused:
            self.server.leave(contract.EXIT_REFUSED, str(refused))

    def _carry_out(self, event: Callable[[], None]) -> None:
        try:
            event()
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError):
            log.exception("a message that could not be understood was left out")

    # -- from other threads --------------------------------------------------------------------

    def post(self, event: Callable[[], None]) -> None:
        self._events.put(event)

    def hello(self, session: Session) -> None:
        self.post(lambda: self._hello(session))

    def frame(self, session: Session, header: Header, body: Mapping[str, Any], blob: bytes = b"") -> None:
        self.post(lambda: self._frame(session, header, body, blob))

    def answer(self, index: int, body: Mapping[str, Any]) -> None:
        """A shard answers an order."""
        self.post(lambda: self._answer(index, body))

    def step_passed(self, step: int) -> None:
        now = time.time()
        self.post(lambda: self.progress.passed(step, now))

    def stop(self) -> None:
        """This pod is asked to go: last cut, then leave."""
        self.post(self.ending.stop_job)

    # -- events --------------------------------------------------------------------------------

    def _hello(self, session: Session) -> None:
        member = self.members[session.rank]
        if session.incarnation < member.incarnation:
            session.tell(Kind.ERROR, {"code": "fenced", "error": f"worker {session.rank}: a newer process of this rank is here"})
            session.hang_up()
            return
        member.incarnation = session.incarnation
        self.sessions[session.rank] = session
        if member.state in (State.ABSENT, State.LOST):
            member.state = State.JOINED
        self.views.worker(session)

    def _frame(self, session: Session, header: Header, body: Mapping[str, Any], blob: bytes) -> None:
        if self.sessions.get(session.rank) is not session or session.stale:
            return
        member = self.members[session.rank]
        if header.kind is Kind.RECORD:
            if header.clock < 0:
                self.views.initial = blob
                self.views.check_initialised()
                return
            if header.part:
                member.idle = min(1.0, header.request / IDLE_PARTS)
            cut = self.cuts.current
            since = None if self.deciding is None else self.deciding.needed(session.rank)
            member.keep(header.clock, blob, None if cut is None else cut.pins.get(session.rank, cut.step), since)
            self.try_commit()
        elif header.kind is Kind.MARK:
            cut = self.cuts.current
            if cut is not None and cut.number == header.request:
                cut.pins[session.rank] = header.clock
        elif header.kind is Kind.LEAVE:
            self.members.left(session.rank, header.clock)
            self.left(session.rank)
        elif header.kind is Kind.REPORT:
            self.progress.report(session.rank, body)
        elif header.kind is Kind.CHECKPOINT:
            self.cuts.requested = True
        elif header.kind is Kind.STOP:
            self.ending.stop_worker(session.rank)

    def left(self, rank: int) -> None:
        """A worker is through, and waits until a manifest holds its end."""
        if self.deciding is None:
            self.ending.left(rank)
        else:
            self.deciding.left(rank)

    def _answer(self, index: int, body: Mapping[str, Any]) -> None:
        did = body.get("did")
        cut = self.cuts.current
        if did == "arrived" and self.deciding is not None:
            self.deciding.arrived(index, body)
        elif did in ("ready", "late", "written", "unwritten"):
            if cut is None or body.get("cut") != cut.number:
                return
            if did == "ready":
                cut.ready.add(index)
                for session in self.sessions.values():
                    self.ask_mark(session)
            elif did == "late":
                self.void(str(body.get("why")), lambda now: self.cuts.late(now))
            elif did == "unwritten":
                self.progress.checkpoint_problem = f"shard {index}: {body.get('why')}"
                self.void(str(body.get("why")), lambda now: self.cuts.failed(now))
            else:
                cut.written[index] = dict(body)
                self.try_commit()
        elif did == "prepared":
            if self.cuts.prepared is not None and body.get("number") == self.cuts.number:
                self.cuts.prepared.add(index)
        elif did == "staleness":
            self.lateness.heard(index, body)
        elif did == "stopping":
            self.ending.stop_job()
        else:
            self.views.answer(index, body)

    # -- cuts ----------------------------------------------------------------------------------

    def begin_cut(self, now: float, final: bool = False, stop: bool = False, still: bool = False) -> None:
        away = self._away() if self.mode.marks() and not (final or stop or still) else []
        if away:  # the others would hold their pushes for a cut that cannot be
            self._away_since = self._away_since or now
            if now - self._away_since > AWAY_SECONDS:
                self.progress.checkpoint_problem = f"workers {away} are not here, and a checkpoint needs the mark of each"
            return
        self._away_since = 0.0
        still = still or self.mode.decided  # between two orders no block moves
        cut = self.cuts.begin(self.store.furthest(), now, final, stop, still)
        step = -1 if cut.step is None else cut.step
        self.server.cut_step = step
        if stop:
            self.stop_at(cut, cut.step or 0)
        held = {"left": {str(m.rank): m.left_at for m in self.members.all.values() if m.left_at is not None}}
        if self.deciding is not None and self.views.open:
            held = self.deciding.hold(cut)
        base = self.committer.base
        self.views.order_all({"do": "cut", "cut": cut.number, "step": step, "marks": cut.marks, "base": base, **held})

    def _prepare(self) -> dict[str, Any]:
        return {"do": "prepare", "number": self.cuts.number, "base": self.committer.base}

    def unprepared(self, index: int) -> list[dict[str, Any]]:
        """What a shard on a new stream is ordered again, where the next cut waits for its memory."""
        return [] if self.cuts.prepared is None or index in self.cuts.prepared else [self._prepare()]

    def stop_at(self, cut: Cut, step: int) -> None:
        """Workers that stand still go on to `step` and end there, with this cut."""
        cut.stop = True
        self.tell_all(Kind.STOP, clock=step)

    def void(self, why: str, again: Callable[[float], None]) -> None:
        cut = self.cuts.current
        if cut is None:
            return
        log.info("checkpoint %d is void: %s", cut.number, why)
        self.server.cut_step = -1
        self.views.order_all({"do": "void", "cut": cut.number})
        self.tell_all(Kind.RELEASE, request=cut.number)
        again(time.monotonic())

    def drop_cut(self, why: str) -> None:
        """A cut in flight is void; when the next one is due stays as it was."""
        self.void(why, lambda now: None)
        self.cuts.current = None

    def try_commit(self) -> None:
        """Commit once every shard has written and every worker's record for the cut is here."""
        cut = self.cuts.current
        if cut is None or len(cut.written) < len(self.config.shards):
            return
        if cut.clocks is None:
            missing = [] if cut.final else self.members.missing_records(cut.step, cut.pins)
            if missing and not self._never_recorded(missing):
                return
        elif self.deciding is not None and not cut.final and not self.deciding.complete(cut):
            return
        made = self.committer.commit(cut)
        self.server.cut_step = -1
        now = time.monotonic()
        if made is None:
            self.void(self.progress.checkpoint_problem or "not committed", lambda at: self.cuts.failed(at))
            return
        self.cuts.committed(made.step, now)
        self.views.order_all({"do": "committed", "step": made.step})
        if self.deciding is not None:
            self.deciding.over()
        self.ending.committed(cut, made)
        self.switching.committed(cut, made)

    def busy(self) -> None:
        """A disk may take its time from here to the next turn: that is no sign of a dead process."""
        self.beat = time.monotonic() + BUSY_SECONDS

    def tell_all(self, kind: Kind, **fields: Any) -> None:
        for session in self.sessions.values():
            session.tell(kind, **fields)

    def _away(self) -> list[int]:
        """Ranks that have not left and have no stream now."""
        here = {rank for rank, session in self.sessions.items() if not session.done.is_set()}
        return [member.rank for member in self.members.live() if member.rank not in here]

    def _never_recorded(self, ranks: list[int]) -> bool:
        """At step 0 of a new run nobody has asked for a batch yet."""
        return self.views.initialising and all(not self.members[rank].records for rank in ranks)

    def ask_mark(self, session: Session) -> None:
        """A worker that comes while the others hold for a marked cut must mark too."""
        cut = self.cuts.current
        if cut is not None and cut.marks and session.rank not in cut.pins and len(cut.ready) == len(self.config.shards):
            session.tell(Kind.MARK, request=cut.number)

    def _watch_claim(self, now: float) -> None:
        """A coordinator that nobody speaks to any more (its node was cut off, it stood still) finds its successor here."""
        if now - self._looked < CLAIM_SECONDS:
            return
        self._looked = now
        self.busy()
        with contextlib.suppress(CheckpointProblem):
            claim.check(self.folder, self.views.view, self.place.pod)
        self.beat = time.monotonic()

    def _look(self, now: float) -> None:
        """This shard's own part of how late pushes are."""
        if self.store.staleness is not None and now - self._staleness_told >= STALENESS_SECONDS:
            self._staleness_told = now
            self.lateness.heard(0, self.store.staleness.word(self.store.attempt))

    def _tick(self, now: float) -> None:
        self._watch_claim(now)
        self._look(now)
        self.server.tick(now)
        self.views.tick(now)
        if self.views.initialising and self.cuts.may_begin(now):
            self.views.check_initialised()
        if not self.views.open or self.ending.over:
            return
        if self.cuts.stuck(self.progress.step, now):
            self.void("a worker did not hand in what the cut needs", lambda at: self.cuts.failed(at))
        if self.cuts.expired(now):
            self.void("a worker did not reach its step edge in time", lambda at: self.cuts.timed_out(at))
        if self.deciding is not None:
            self.deciding.tick(now)
        if self.ending.tick(now):
            return
        self.switching.tick(now)
        step = self.progress.step
        if self.cuts.prepares(step, now):
            self.views.order_all(self._prepare())
        if not self.cuts.due(step, now) or self.cuts.waits(step, len(self.config.shards), now):
            return
        if self.deciding is None or not self.deciding.waits(now):
            self.begin_cut(now)
