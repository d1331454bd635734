"""How a job ends: workers leave, the last checkpoint is committed, everyone is told; or the job is asked to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from psjob import contract
from psjob.protocol.coordinator import actions
from psjob.protocol.coordinator.events import CheckpointFacts, Stream
from psjob.protocol.coordinator.members import State
from psjob.protocol.coordinator.schedule import Cut
from psjob.wire.frame import Kind

if TYPE_CHECKING:
    from psjob.protocol.coordinator.machine import Coordinator

TOGETHER_SECONDS = 0.3
"""Workers that end at the same step leave within this time, and one checkpoint holds them all."""
LONE_SECONDS = 1.0
"""A worker that is asked to go waits so long for the whole job to be asked: the last checkpoint needs all that are here."""
STOP_SECONDS = 22.0
LINGER_SECONDS = 1.5
FINISHED_SECONDS = 60.0
"""A shard 0 that comes back to a run that is over waits so long for the first worker,"""
COMPANY_SECONDS = 10.0
"""and so long after each for the next. The planner starts it again for a worker that comes later."""
TOLD_SECONDS = 10.0
"""So long it waits for workers that were told to hang up."""
QUIT_SECONDS = 0.3


class Completion:
    """Who waits to go, whether the job is asked to stop, and when this shard may end."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.c = coordinator
        self.over = False
        self._leavers: dict[int, float] = {}
        self._lone: dict[int, float] = {}
        self._stop_by: float | None = None
        self._told_to_stand = False
        self._quit_at: float | None = None
        self._quit_code = contract.EXIT_DONE
        self._back: set[tuple[int, tuple[int, int]]] = set()
        """Ranks and incarnations that came when the run was over."""

    def left(self, rank: int) -> None:
        """A worker is through and waits until a manifest holds its end."""
        self._leavers.setdefault(rank, self.c.now)

    def stop_job(self) -> None:
        """The whole job is asked to go (suspend, Ctrl-C): last cut, then everyone leaves."""
        if self._stop_by is None and not self.over:
            self._stop_by = self.c.now + STOP_SECONDS
            if not self.c.recovery.open:
                self._quit(contract.EXIT_RETRY)

    def stop_worker(self, rank: int) -> None:
        """One worker is asked to go (drain); it may as soon as its record is here."""
        cut = self.c.cutting.cuts.current
        if self._stop_by is not None and cut is not None and cut.stop:
            self.c.tell(rank, Kind.STOP, clock=cut.step or 0)
        self._lone.setdefault(rank, self.c.now)

    def already_over(self) -> None:
        """This run has its final manifest: every hello is answered with FINISHED, then the shards go."""
        self.over = True
        self._quit_at = self.c.now + FINISHED_SECONDS

    def came_back(self, stream: Stream) -> None:
        """A worker was told that the run is over: others may be on their way. The wait is not renewed by a process that came before."""
        if (stream.rank, stream.incarnation) not in self._back:
            self._back.add((stream.rank, stream.incarnation))
            self._quit_at = self.c.now + COMPANY_SECONDS

    def committed(self, cut: Cut, made: CheckpointFacts) -> None:
        """A manifest is on disk: let go who waited for it."""
        c = self.c
        if cut.final:
            self.over = True
            c.recovery.finish()
            c.tell_all(Kind.FINISHED)
            c.recovery.order_all({"do": "finish"})
            self._quit_at = c.now + LINGER_SECONDS
            return
        # Where the last have left meanwhile, they wait for the final one: without them nobody would ask for it.
        for rank in list(self._leavers) if not c.members.finished(c.job.policy) else ():
            if c.members[rank].state is not State.LEFT:
                del self._leavers[rank]
            elif made.workers[rank].left is not None:
                del self._leavers[rank]
                c.tell(rank, Kind.LEFT)
        if cut.stop:
            c.tell_all(Kind.STOPPED)
            self._quit(contract.EXIT_RETRY)

    def tick(self, now: float) -> bool:
        """True while an ending decides what is cut next."""
        c, cutting = self.c, self.c.cutting
        cut = cutting.cuts.current
        for rank, since in list(self._lone.items()):
            if self._stop_by is None and now - since > LONE_SECONDS:
                del self._lone[rank]
                c.tell(rank, Kind.STOPPED)
        if self._stop_by is not None and now > self._stop_by:
            self._quit(contract.EXIT_RETRY)
            return True
        leaving = bool(self._leavers) and now - min(self._leavers.values()) > TOGETHER_SECONDS
        finished = c.members.finished(c.job.policy)
        still = not c.members.alive
        if cut is not None:
            if cut.committing:
                return True
            if self._stop_by is not None and cut.step is not None and not cut.stop and c.furthest < cut.step:
                cutting.stop_at(cut, cut.step)  # workers that stand still would never come to it
            moving = cut.marks or cut.step is not None
            if (not cut.final and (finished or still)) or (still and moving and len(cut.written) < c.job.shards):
                cutting.drop("everyone is through")
            elif self._stop_by is not None and not cut.final and cut.step is not None and cut.step > cutting.last_reachable:
                cutting.drop("a worker that is gone never comes to it")
            else:
                return True
        if (finished or self._stop_by is not None) and not cutting.cuts.may_begin(now):
            return True
        if finished and (still or leaving or not self._leavers):
            # Where the workers step by themselves, the job's weights are those that the last to leave has stored.
            cutting.begin(final=True, still=still or c.recovery.rule == "reduce")
            return True
        if self._stop_by is not None:
            self._begin_stop(still)
            return True
        if leaving and c.job.checkpoints:
            cutting.cuts.requested = True
        return False

    def _begin_stop(self, still: bool) -> None:
        """The last cut of a job that is asked to stop. Workers that are gone are not waited for: nobody starts them again."""
        c = self.c
        if not (c.members.missing and c.mode.marks()):
            c.cutting.begin(stop=True, still=still)
            return
        # A worker that is gone makes no mark. Once all others stand at the end of a step, no block moves.
        if not self._told_to_stand:
            self._told_to_stand = True
            c.tell_all(Kind.STOP)
        if all(member.rank in self._lone for member in c.members.live() if member.here):
            c.cutting.begin(stop=True, still=True)

    def go(self, now: float) -> None:
        """End this process once everyone was told and hung up, or the wait is over."""
        if self._quit_at is None or now < self._quit_at:
            return
        told = not any(member.here for member in self.c.members.all.values())
        if told or now >= self._quit_at + TOLD_SECONDS:
            self._quit_at = None
            self.c.emit(actions.Leave(self._quit_code))

    def _quit(self, code: int) -> None:
        if self.over:
            return
        self.over = True
        self._quit_code = code
        self._quit_at = self.c.now + QUIT_SECONDS
        self.c.recovery.order_all({"do": "stop"})
