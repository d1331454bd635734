"""How a job ends: workers leave, the last checkpoint is committed, everyone is told; or the job is asked to stop."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from psjob import contract
from psjob.checkpoint.manifest import Manifest
from psjob.coordinator.cuts import Cut
from psjob.coordinator.members import State
from psjob.wire.frame import Kind

if TYPE_CHECKING:
    from psjob.coordinator.coordinator import Coordinator

TOGETHER_SECONDS = 0.3
"""Workers that end at the same step leave within this time, and one checkpoint holds them all."""
STOP_SECONDS = 22.0
LINGER_SECONDS = 1.5
FINISHED_SECONDS = 60.0
"""A shard 0 that comes back to a run that is over waits so long for the first worker,"""
COMPANY_SECONDS = 10.0
"""and so long after each for the next. The planner starts it again for whoever comes later."""


class Completion:
    """Who waits to go, whether the job is asked to stop, and when this shard may end."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.c = coordinator
        self.over = False
        self._leavers: dict[int, float] = {}
        self._lone: dict[int, float] = {}
        self._stop_by: float | None = None
        self._quit_at: float | None = None
        self._quit_code = contract.EXIT_DONE

    def left(self, rank: int) -> None:
        """A worker is through and waits until a manifest holds its end."""
        self._leavers.setdefault(rank, time.monotonic())

    def stop_job(self) -> None:
        """The whole job is asked to go (suspend, Ctrl-C): last cut, then everyone leaves."""
        if self._stop_by is None and not self.over:
            self._stop_by = time.monotonic() + STOP_SECONDS
            if not self.c.views.open:
                self._quit(contract.EXIT_RETRY)

    def stop_worker(self, rank: int) -> None:
        """One worker is asked to go (drain); it may as soon as its record is here."""
        cut = self.c.cuts.current
        if self._stop_by is not None and cut is not None and cut.stop:
            self.c.sessions[rank].tell(Kind.STOP, clock=cut.step or 0)
        self._lone.setdefault(rank, time.monotonic())

    def already_over(self) -> None:
        """This run has its final manifest: every hello is answered with FINISHED, then the shards go."""
        self.over = True
        self._quit_at = time.monotonic() + FINISHED_SECONDS
        self.c.server.finishing()

    def came_back(self) -> None:
        """A worker was told that the run is over: others may be on their way."""
        self._quit_at = time.monotonic() + COMPANY_SECONDS

    def committed(self, cut: Cut, made: Manifest) -> None:
        """A manifest is on disk: let go who waited for it."""
        c = self.c
        if cut.final:
            self.over = True
            c.views.state = "finished"
            c.tell_all(Kind.FINISHED)
            c.views.order_all({"do": "finish"})
            self._quit_at = time.monotonic() + LINGER_SECONDS
            return
        for rank in list(self._leavers):
            member = c.members[rank]
            if member.state is not State.LEFT:
                del self._leavers[rank]
            elif made.workers[str(rank)]["leftAt"] is not None:
                del self._leavers[rank]
                c.sessions[rank].tell(Kind.LEFT)
        if cut.stop:
            c.tell_all(Kind.STOPPED)
            self._quit(contract.EXIT_RETRY)

    def tick(self, now: float) -> bool:
        """True while an ending decides what is cut next."""
        c, cut = self.c, self.c.cuts.current
        for rank, since in list(self._lone.items()):
            if self._stop_by is None and now - since > TOGETHER_SECONDS:
                del self._lone[rank]
                c.sessions[rank].tell(Kind.STOPPED)
        if self._stop_by is not None and now > self._stop_by:
            self._quit(contract.EXIT_RETRY)
            return True
        leaving = bool(self._leavers) and now - min(self._leavers.values()) > TOGETHER_SECONDS
        finished = bool(self._leavers) and c.members.finished(c.config.success_policy)
        still = not c.members.live()
        if cut is not None:
            if self._stop_by is not None and cut.step is not None and not cut.stop and c.store.furthest() < cut.step:
                c.stop_at(cut, cut.step)  # workers that stand still would never come to it
            moving = cut.marks or cut.step is not None
            if (not cut.final and (finished or still)) or (still and moving and len(cut.written) < len(c.config.shards)):
                c.drop_cut("everyone is through")
            else:
                return True
        if (finished or self._stop_by is not None) and not c.cuts.may_begin(now):
            return True
        if finished and (still or leaving):
            # Where the workers step by themselves, the job's weights are those that the last to leave has stored.
            c.begin_cut(now, final=True, still=still or c.store.rule_name == "reduce")
            return True
        if self._stop_by is not None:
            c.begin_cut(now, stop=True, still=still)
            return True
        if leaving and not c.config.checkpoint.disabled:
            c.cuts.requested = True
        return False

    def due_to_go(self, now: float) -> int | None:
        """Exit status once this shard may go: everyone was told and hung up, or the wait is over."""
        if self._quit_at is None:
            return None
        told = all(session.done.is_set() for session in self.c.sessions.values())
        if now >= self._quit_at and (told or now >= self._quit_at + 10):
            return self._quit_code
        return None

    def _quit(self, code: int) -> None:
        self.over = True
        self._quit_code = code
        self._quit_at = time.monotonic() + 0.3
        self.c.views.order_all({"do": "stop"})
