"""An operator around the plan, as small as can be: it observes the world, stores, acts, and can die at any write."""

from __future__ import annotations

from dataclasses import dataclass, field

from psjob_operator.api.status import JobStatus
from psjob_operator.plan import objects
from psjob_operator.plan.actions import (
    CreateProcess,
    DeleteJob,
    DeleteProcess,
    EnsureClaim,
    EnsureConfig,
    EnsureKey,
    EnsurePairClaim,
    EnsureService,
    Event,
    Plan,
)
from psjob_operator.plan.observed_state import Claim, Objects, ObservedState, Process
from psjob_operator.plan.plan import plan
from tests.simulation.world import Conflict, World


class Died(Exception):
    """The operator was killed."""


@dataclass
class Brain:
    """One process of the operator. What it remembers dies with it."""

    world: World
    dies_at: int | None = None
    """Number of the write at which it dies."""
    reply_lost: bool = False
    """It dies (or believes to have failed) after the write instead of before it."""
    writes: int = 0
    granted: set[str] = field(default_factory=set)
    key_made: int | None = None
    events: list[Event] = field(default_factory=list)
    stale: tuple[Process, ...] | None = None
    """What the watch last said, where it lags."""
    last: Plan | None = None

    def snapshot(self, live: bool) -> ObservedState:
        world = self.world
        pods = tuple(world.pods.values()) if live or self.stale is None else self.stale
        return ObservedState(
            name=world.name, namespace=world.namespace, uid=world.uid, generation=world.generation, resource_version=str(world.version),
            created=world.now, spec=world.spec, status=world.status, deleting=world.gone, processes=pods,
            objects=Objects(world.service, world.config, world.claim, tuple(world.pair_claims)),
            progress=world.progress(), progress_at=world.now,
            granted=frozenset(self.granted), key_made=self.key_made, live=live,
        )  # fmt: skip

    def turn(self) -> bool:
        """One turn; True where it did something."""
        if self.world.gone:
            return False
        seen = self.snapshot(live=self.stale is None)
        decided = plan(seen, self.world.now)
        if decided.needs_live:
            assert not decided.actions
            assert not decided.intent
            seen = self.snapshot(live=True)
            decided = plan(seen, self.world.now)
        assert not decided.needs_live
        check_plan(decided, seen)
        self.last = decided
        changed = decided.status != seen.status
        try:
            if decided.intent and changed:
                self._write(lambda: self.world.write_status(decided.status, int(seen.resource_version)))
                self.granted |= decided.grants
            for action in decided.actions:
                self._act(action)
            if not decided.intent and changed:
                self._write(lambda: self.world.write_status(decided.status, int(seen.resource_version)))
        except Conflict:
            return True
        if changed:
            self.events += decided.events
        return changed or bool(decided.actions)

    def _act(self, action: object) -> None:
        world = self.world
        match action:
            case EnsureService():
                self._write(lambda: setattr(world, "service", True))
            case EnsureConfig():
                self._write(lambda: setattr(world, "config", world.digest))
            case EnsureClaim():
                self._write(lambda: setattr(world, "claim", Claim(objects.claim_name(world.name), ours=True, bound=True)))
            case EnsurePairClaim(index=index, number=number):
                name = objects.pair_claim_name(world.name, world.uid, index, number)
                self._write(lambda: world.pair_claims.append(name))
            case EnsureKey(number=number):
                self._write(lambda: world.keys.add(number))
                self.key_made = number
            case CreateProcess(name=name):
                if name in self.granted:
                    self.granted.discard(name)
                    self._write(lambda: world.create(action))
            case DeleteProcess(name=name, uid=uid, grace_seconds=grace):
                self._write(lambda: world.delete(name, uid, grace))
            case DeleteJob():
                self._write(lambda: setattr(world, "gone", True))

    def _write(self, act: object) -> None:
        self.writes += 1
        if self.writes == self.dies_at and not self.reply_lost:
            raise Died
        assert callable(act)
        act()
        if self.writes == self.dies_at:
            raise Died


def check_plan(decided: Plan, seen: ObservedState) -> None:
    """What must hold of every plan."""
    creates = [action for action in decided.actions if isinstance(action, CreateProcess)]
    names = [action.name for action in creates]
    assert len(names) == len(set(names))
    there = {process.name for process in seen.processes}
    may = seen.granted | decided.grants
    for action in creates:
        assert action.name in may, f"{action.name} was never granted"
        assert action.name not in there
        assert action.name == objects.process_name(seen.name, action.role, action.index, action.number)
    assert not decided.grants or decided.intent
    ours = {(process.name, process.uid) for process in seen.processes if process.run == seen.uid}
    assert all((action.name, action.uid) in ours for action in decided.actions if isinstance(action, DeleteProcess))
    if seen.status is not None and seen.status.run == seen.uid and not decided.intent:
        assert decided.status.internal.term == seen.status.internal.term
        assert [shard.attempt for shard in decided.status.shards] == [shard.attempt for shard in seen.status.shards]
        assert decided.status.internal.worker_start == seen.status.internal.worker_start


def settle(brain: Brain, limit: int = 40) -> None:
    """Turns until there is nothing to do."""
    for _ in range(limit):
        if not brain.turn():
            return
    raise AssertionError(f"no rest after {limit} turns: {brain.last}")


def stored(world: World) -> JobStatus:
    assert world.status is not None
    return world.status
