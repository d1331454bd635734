"""A stand-in for the operator: it raises attempt, term and start before it starts a process, by the operator's own rules.

It may be away, slow, or believe an old observation. The planner itself is tested in `tests/simulation/test_chaos.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from psjob import contract
from tests.simulation.protocol.kernel import Process

if TYPE_CHECKING:
    from tests.simulation.protocol.world import World

LOOKS = 0.5
"""Seconds between two looks."""
GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL."""
FATAL = (contract.EXIT_REFUSED, contract.EXIT_CHECKPOINT_LOST)


class Planner:
    """`term`, `attempts` and `starts` are what its status holds; they only rise."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.term = 1
        self.attempts = dict.fromkeys(range(world.plan.shards), 1)
        self.starts = dict.fromkeys(range(world.plan.workers), 1)
        self.away_until = 0.0
        self.suspended = False
        self.complete = False
        self.failed: str | None = None
        self.done: set[tuple[str, int]] = set()
        """Shards and workers that have ended well and are not started again."""
        self.cut_off: set[str] = set()
        """Pods whose kubelet is out of reach: the planner takes them for lost and cannot end them."""
        self.mode = world.plan.mode
        self.request = 0
        """checkpoint.request; 0: none."""
        self.knows = False
        """It has read of a checkpoint beyond step 0."""
        self._due: dict[tuple[str, int], float] = {}
        self._killed_at: float | None = None
        self._ill: dict[str, float] = {}

    def begin(self) -> None:
        """Start every process."""
        for shard in self.attempts:
            self.world.start_shard(shard, 1, 1)
        for rank in self.starts:
            self.world.start_worker(rank, 1)
        self.world.kernel.after(LOOKS, self._look)

    def suspend(self) -> None:
        """Ask every process to go; what is still there after the grace period is killed."""
        if not self.complete:
            self.suspended = True
            self._killed_at = self.world.kernel.now + GRACE
            for process in self._all():
                process.terminate()

    def resume(self) -> None:
        """Start every process again."""
        self.suspended = False
        self._due.clear()

    # -- a look ------------------------------------------------------------------------------------

    def _look(self) -> None:
        world, now = self.world, self.world.kernel.now
        if self.complete or self.failed:
            return
        world.kernel.after(LOOKS * (0.5 + world.kernel.random.random()), self._look)
        if now < self.away_until:
            return
        if self.suspended:
            if self._killed_at is not None and now >= self._killed_at:
                for process in self._all():
                    process.kill()
            return
        world.polled()
        self._probe(now)
        self._shards(now)
        self._workers(now)

    def _all(self) -> list[Any]:
        return [p for p in (*self.world.shards.values(), *self.world.workers.values()) if p.alive and p.pod not in self.cut_off]

    def _probe(self, now: float) -> None:
        """What kubelets do: a shard that makes no progress for the timeout is killed."""
        for shard in self.world.shards.values():
            if not shard.alive or shard.pod in self.cut_off:
                continue
            if shard.healthy():
                self._ill.pop(shard.pod, None)
            elif now - self._ill.setdefault(shard.pod, now) > self.world.plan.shard_timeout:
                shard.trace("is killed: no progress")
                shard.kill()

    def _lost(self, process: Process) -> bool:
        return not process.alive or process.pod in self.cut_off

    def _shards(self, now: float) -> None:
        lost: list[int] = []
        for index, shard in self.world.shards.items():
            if ("shard", index) in self.done or not self._lost(shard):
                continue
            if shard.pod not in self.cut_off:
                if shard.code == contract.EXIT_DONE:
                    self.done.add(("shard", index))
                    if index == 0:
                        self._complete()
                        return
                    continue
                if shard.code in FATAL:
                    self.failed = f"{shard.pod} ended with {shard.code}: {shard.message}"
                    return
                fenced = shard.message.get("fenced")
                if fenced:
                    self.term = max(self.term, int(fenced["term"]))
            if self._waited(("shard", index), now):
                lost.append(index)
        if lost:
            self.term += 1
            for index in lost:
                self.attempts[index] += 1
                self.cut_off.discard(self.world.shards[index].pod)
                self.world.start_shard(index, self.attempts[index], self.term)

    def _workers(self, now: float) -> None:
        for rank, worker in self.world.workers.items():
            if ("worker", rank) in self.done or not self._lost(worker):
                continue
            if worker.pod not in self.cut_off:
                if worker.code == contract.EXIT_DONE:
                    self.done.add(("worker", rank))
                    continue
                if worker.code in FATAL:
                    self.failed = f"{worker.pod} ended with {worker.code}: {worker.message}"
                    return
            if self._waited(("worker", rank), now):
                self.starts[rank] += 1
                self.cut_off.discard(worker.pod)
                self.world.start_worker(rank, self.starts[rank])

    def _waited(self, who: tuple[str, int], now: float) -> bool:
        """A process is started again some time after its end was seen."""
        due = self._due.setdefault(who, now + self.world.kernel.random.uniform(0.1, 1.5))
        if now < due:
            return False
        del self._due[who]
        return True

    def _complete(self) -> None:
        self.complete = True
        self.world.kernel.trace("planner", "the job is complete")
