"""Bringing all shards and workers to one view: a new run's initialisation, restores, rewinds, and workers that join.

States: `reading` (the newest manifest is looked for), `electing` (not all shards are here), `fresh` (a new run waits for
rank 0), `initialising` (rank 0 sends its values), `restoring` (shards read a manifest), `open` (training), `finished`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psjob import contract
from psjob.checkpoint import claim, manifest
from psjob.checkpoint.manifest import Manifest
from psjob.coordinator.joining import Joining, difference, read_initial, read_records, rule_difference, rule_for
from psjob.coordinator.rowtables import table_difference, table_problem, tables_of
from psjob.layout.blocks import TensorSpec
from psjob.modes import written
from psjob.process.errors import Fenced
from psjob.shard.session import WAITING_SECONDS, Session
from psjob.tables import TableSpec
from psjob.wire.frame import Kind

if TYPE_CHECKING:
    from psjob.coordinator.coordinator import Coordinator

AGAIN_SECONDS = 1.0
"""After a restore that a shard could not read."""
log = logging.getLogger("psjob.coordinator")


@dataclass
class ShardPeer:
    """A shard as the coordinator sees it; `order` reaches it."""

    attempt: int
    serving: bool
    recovery: int
    mode: str
    """The one that it serves, as `modes.written` writes it."""
    carried: int | None
    """In a decided mode: the last order that it has carried out; None: one broke off."""
    order: Callable[[Mapping[str, Any]], None]


class Views:
    """The state machine that brings shards and workers to one view."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.c = coordinator
        self.view = coordinator.place.view
        self.recovery = self.view << 20
        self.state = "reading"
        self.peers: dict[int, ShardPeer] = {}
        self.initial = b""
        self.aliases: dict[str, str] = {}
        self.table: tuple[TensorSpec, ...] = ()
        self.tables: tuple[TableSpec, ...] = ()
        self.rule = ""
        """The shards' rule, once there is a model."""
        self.source: tuple[Path, Manifest] | None = None
        self.waiting: dict[int, Session] = {}
        self.joining = Joining(self)
        self._told = 0.0
        self._gather_at: float | None = None
        self._setup = 0
        self._done: set[int] = set()
        self._only: set[int] = set()
        self._since = time.monotonic()

    @property
    def open(self) -> bool:
        return self.state == "open"

    @property
    def initialising(self) -> bool:
        return self.state == "initialising"

    def begin(self) -> None:
        """Shard 0 has started: it is its own first peer, and the newest manifest says what the job is."""
        c = self.c
        self.peers[0] = ShardPeer(c.place.number, False, 0, "", 0, c.server.control.order)
        found = self._newest()
        if found is None and c.place.min_step:
            c.server.leave(contract.EXIT_CHECKPOINT_LOST, f"no valid manifest in {c.folder}, though this run had a checkpoint")
            return
        self.source = found
        if found is not None:
            c.switching.begin(found[1])
            c.progress.rewound(found[1].step)
            if found[0] == c.folder:
                c.committer.adopt(found[1])
                if found[1].final:
                    self.state = "finished"
                    c.members.rewound(found[1].step, found[1].workers, {})
                    c.ending.already_over()
                    return
        self._gather()

    # -- shards --------------------------------------------------------------------------------

    def shard(self, index: int, hello: Mapping[str, Any], order: Callable[[Mapping[str, Any]], None]) -> None:
        """A shard says hello on a new stream. Raises Fenced when *this* coordinator is the old one."""
        attempt, view = int(hello["attempt"]), int(hello["view"])
        known = self.peers.get(index)
        if known is not None and attempt < known.attempt:
            order({"do": "fenced", "view": self.view})
            return
        carried = None if hello.get("carried") is None else int(hello["carried"])
        peer = ShardPeer(attempt, bool(hello["serving"]), int(hello["recovery"]), str(hello["mode"]), carried, order)
        self.peers[index] = peer
        self.c.drop_cut(f"shard {index} came anew")
        if view > self.view:
            self._rise(view)
        if self.state == "finished":
            order({"do": "finish"})
        elif not self.open or len(self.peers) < len(self.c.config.shards):
            self._gather()
        elif (missed := self._missed(index, peer)) is None:
            self._restore({index})
        else:
            order({"do": "adopt", "view": self.view})
            for body in (*missed, *self.joining.unanswered(index), *self.c.unprepared(index)):
                order(body)

    def _missed(self, index: int, peer: ShardPeer) -> list[Mapping[str, Any]] | None:
        """The orders that a shard which serves has lost with its stream; None: only a restore brings it to where the others are."""
        mode = self.c.mode
        if not peer.serving or (mode.rewinds_together and peer.recovery != self.recovery) or peer.mode != written(mode):
            return None
        return [] if self.c.deciding is None else self.c.deciding.missed(index, peer.carried)

    def announced(self, view: int) -> None:
        """A shard that is still starting tells of a higher view: rewind the workers while it imports and restores."""
        if view > self.view and self.state not in ("finished",):
            self._rise(view)
            if self.open and self.c.mode.rewinds_together:
                self.state = "electing"
                self._rewind_workers()

    def lost(self, index: int, order: Callable[[Mapping[str, Any]], None]) -> None:
        """The stream of a shard ended; it may still serve its workers."""
        peer = self.peers.get(index)
        if peer is not None and peer.order is order:
            self.c.drop_cut(f"shard {index} is out of reach")

    def order_all(self, body: Mapping[str, Any], but: Set[int] = frozenset()) -> None:
        for index, peer in sorted(self.peers.items(), reverse=True):  # shard 0's carries it out at once, in this thread
            if index not in but:
                peer.order(body)

    def answer(self, index: int, body: Mapping[str, Any]) -> None:
        did = body.get("did")
        if did == "initialised" and self.initialising and body.get("setup") == self._setup:
            self._done.add(index)
            self.check_initialised()
        elif did == "restored" and self.state == "restoring" and body.get("recovery") == self.recovery:
            self._done.add(index)
            if self._done >= self._only:
                self._open()
        elif did == "unrestored" and self.state == "restoring" and body.get("recovery") == self.recovery:
            self._newest_again(str(body.get("why")))
        elif did == "where":
            self.joining.where(index, body)

    # -- workers -------------------------------------------------------------------------------

    def worker(self, session: Session) -> None:
        """A worker said hello: welcome it, make it rewind, or let it wait."""
        if self.state == "finished":
            session.tell(Kind.FINISHED)
            self.c.ending.came_back()
            return
        if self._refused(session):
            return
        if self._behind(session):
            session.rewind()
            return
        if self.open:
            self.joining.join(session)
            return
        self.waiting[session.rank] = session
        if self.state in ("fresh", "initialising") and session.rank == 0:
            self._initialise(session)

    def tick(self, now: float) -> None:
        """Tell those who wait what for; try a failed restore again."""
        if self._gather_at is not None and now >= self._gather_at:
            self._gather()
        if now - self._told < WAITING_SECONDS:
            return
        self._told = now
        reason = self.reason(now)
        for session in list(self.waiting.values()):
            session.tell(Kind.WAITING, {"reason": reason})

    def reason(self, now: float) -> str | None:
        """Why nothing goes on, or None while training."""
        seconds = round(now - self._since)
        if self.state == "electing":
            missing = [i for i in range(len(self.c.config.shards)) if i not in self.peers]
            return f"shards {missing} have not come, for {seconds} s" if missing else None
        if self.state == "fresh":
            return f"worker 0 has not attached its model, for {seconds} s"
        if self.state in ("initialising", "restoring"):
            waiting = sorted(self._only - self._done)
            return f"shards {waiting} are {self.state}, for {seconds} s"
        return self.c.server.waiting_for

    # -- steps ---------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Go on once every shard is here."""
        c = self.c
        self._gather_at = None
        self._enter("electing")
        if len(self.peers) < len(c.config.shards):
            return
        if self.source is None and not any(p.serving for p in self.peers.values()):
            self._enter("fresh")
            if 0 in self.waiting:
                self._initialise(self.waiting[0])
            return
        self.source = self._newest() or self.source
        self._restore({i for i, p in self.peers.items() if not p.serving})

    def _initialise(self, session: Session) -> None:
        c = self.c
        c.drop_cut("rank 0 begins anew")
        self.table = tuple(TensorSpec(t["name"], tuple(t["shape"]), t["dtype"], t["group"]) for t in session.hello["table"])
        self.tables = tuple(TableSpec.from_json(spec) for spec in session.hello.get("tables", []))
        self.rule = rule_for(session.hello, c.config.update_at)
        self.aliases = {str(k): str(v) for k, v in dict(session.hello.get("aliases", {})).items()}
        self._enter("initialising")
        self._done, self._only, self.initial = set(), set(range(len(c.config.shards))), b""
        self._setup += 1
        self.order_all({"do": "setup", "setup": self._setup, "table": session.hello["table"], "rule": self.rule, "view": self.view,
                        "mode": written(c.mode), "tables": [spec.to_json() for spec in self.tables]})  # fmt: skip
        session.welcome(init=True, view=self.view, clock=0, recovery=self.recovery, assignment=list(c.store.assignment))

    def check_initialised(self) -> None:
        """All blocks and rank 0's buffers are here: commit the manifest of step 0 before any push is admitted."""
        if self.initialising and self._done >= self._only and self.initial and self.c.cuts.current is None:
            self.c.begin_cut(time.monotonic(), still=True)

    def initial_committed(self, path: Path, made: Manifest) -> None:
        self.source = (path, made)
        self._open()

    def _restore(self, blank: set[int]) -> None:
        """Bring shards back from the newest manifest: all of them in sync, in async only those that lost their blocks."""
        c = self.c
        found = self._newest() or self.source
        if found is None:
            raise RuntimeError("nothing to restore from")
        self.source = found
        mode = written(c.mode)
        together = c.mode.rewinds_together or any(p.serving and p.mode != mode for p in self.peers.values())
        if together or not any(p.serving for p in self.peers.values()):
            self._only = set(self.peers)
        else:
            self._only = blank
        if not self._only:
            self._open()
            return
        self._enter("restoring")
        self.recovery += 1
        self._done = set()
        folder, made = found
        saved = made.workers
        if made.run != c.place.run:  # another run's processes say nothing about this one's
            saved = {rank: {**entry, "start": 0, "rewinds": 0} for rank, entry in saved.items()}
        self.table, self.tables, self.rule = made.layout.table, tables_of(made), made.rule
        self.aliases = dict(made.extra.get("aliases", {}))
        self.initial = read_initial(folder, made) or self.initial
        if together or self._only == set(self.peers):
            self._rewind_workers()
            c.members.rewound(made.step, saved, read_records(folder, made))
            c.progress.rewound(made.step)
        elif 0 in self._only:
            c.members.rewound(made.step, saved, read_records(folder, made))
        fences = c.members.fences(set(self.waiting)) if together else {}
        # What a lost shard had answered of a worker's open clock, this one may not have whole; nobody begins another without it.
        sure = 0 not in self._only and c.place.number == 1 and c.store.admission.owned  # else this shard's own clocks may lag behind
        most = {str(rank): clock + 1 for rank, clock in c.store.clocks().items()} if sure else {}
        for index, peer in self.peers.items():
            if index in self._only:
                peer.order(
                    {"do": "restore", "view": self.view, "recovery": self.recovery, "folder": str(folder), "manifest": made.name,
                     "mode": mode, "fences": {str(r): f for r, f in fences.items()}, "most": most}
                )  # fmt: skip
            else:
                peer.order({"do": "adopt", "view": self.view})

    def rewind_all(self, why: str) -> None:
        """Everyone goes back to the last manifest; no shard was lost."""
        log.info("all rewind: %s", why)
        self.c.cuts.current = None
        self._restore(set(self.peers))

    def _open(self) -> None:
        c = self.c
        self._enter("open")
        if c.deciding is not None and self.source is not None:
            c.deciding.begin(self.source[1].step, self.source[1].workers)
        for peer in self.peers.values():
            peer.serving, peer.recovery, peer.mode = True, self.recovery, written(c.mode)
            peer.order({"do": "open", "view": self.view, "recovery": self.recovery})
        c.cuts.restart(c.progress.step, time.monotonic())
        waiting, self.waiting = self.waiting, {}
        for session in waiting.values():
            if c.sessions.get(session.rank) is not session:
                continue
            if self._behind(session):  # it was told so before, and may not be gone yet
                session.rewind()
            elif not self._refused(session):  # it may have come before there was a model
                self.joining.join(session)

    def _rise(self, view: int) -> None:
        self.view = view
        self.recovery = max(self.recovery, view << 20)
        claim.claim(self.c.folder, view, self.c.place.pod)

    def _rewind_workers(self) -> None:
        for session in list(self.c.sessions.values()):
            if session.welcomed:
                session.tell(Kind.REWIND, {"mode": written(self.c.mode)})
                session.hang_up()
            elif not session.done.is_set():
                self.waiting[session.rank] = session

    def _enter(self, state: str) -> None:
        if state != self.state:
            self._since = time.monotonic()
        self.state = state

    def _behind(self, session: Session) -> bool:
        """Is a worker of another mode, or of what a restore has undone?"""
        missed = not session.hello.get("fresh") and int(session.hello.get("recovery", 0)) != self.recovery
        return (missed and self.c.mode.rewinds_together) or session.mode != written(self.c.mode)

    def _refused(self, session: Session) -> bool:
        """Has a worker another model or rule than the job? Then it is told so."""
        problem = self._check(session)
        if problem:
            session.tell(Kind.ERROR, {"code": "refused", "error": problem})
            session.hang_up()
        return problem is not None

    def _check(self, session: Session) -> str | None:
        hello = session.hello
        if not isinstance(hello.get("table"), list):
            return "this worker's hello has no parameter table"
        known = (self.table, self.tables)
        if known == ((), ()) and self.source:
            known = (self.source[1].layout.table, tables_of(self.source[1]))
        if known == ((), ()):
            return table_problem(hello.get("tables"))
        rule = self.rule or (self.source[1].rule if self.source else "")
        return (
            difference(session.rank, known[0], hello["table"])
            or table_difference(session.rank, known[1], hello.get("tables", []))
            or rule_difference(session.rank, rule, rule_for(hello, self.c.config.update_at))
        )

    def _newest(self) -> tuple[Path, Manifest] | None:
        """The newest valid manifest of this run; of the run to resume from when this one has none yet."""
        c = self.c
        higher = claim.highest(c.folder)
        if higher is not None and higher[0] > self.view:
            raise Fenced(f"view {higher[0]} is claimed by {higher[1]}; this is view {self.view}", higher[0])
        c.busy()
        made, problems = manifest.newest(c.folder, c.place.run)
        for problem in problems:
            log.warning("%s", problem)
        if problems:
            c.progress.checkpoint_problem = problems[0]
        if made is not None:
            return c.folder, made
        return self.joining.foreign()

    def _newest_again(self, why: str) -> None:
        log.warning("restore failed: %s", why)
        self.c.progress.checkpoint_problem = why
        self._enter("electing")
        self._gather_at = time.monotonic() + AGAIN_SECONDS
