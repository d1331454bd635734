"""Faults that are put into the shipped decisions on purpose: the simulator must find each.

`ISSUED` were found in use, at real size; the others are what somebody might take away. Each patches the code of this very process, so it is
run in a fork. `FOUND` has a cheap seed that finds each; `python -m tests.simulation.protocol.mutants` prints it as the table of
docs/design/0001-protocol-machine.md.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from psjob.protocol.coordinator import checkpoints, events, machine, membership, recovery, updates
from psjob.protocol.coordinator.decisions import Orders
from psjob.protocol.coordinator.members import Members
from psjob.protocol.coordinator.state import CoordinatorState
from psjob.protocol.shard import machine as shard_machine
from psjob.protocol.shard.events import Discard, DropSessions, Release
from psjob.protocol.worker import machine as worker_machine
from psjob.shard import coordinated_updates, deduplication
from psjob.shard.coordinated_updates import ClipNorms
from psjob.shard.store import Store
from psjob.wire.frame import Flag, Kind
from tests.simulation.protocol import link, records, shard
from tests.simulation.protocol.plan import CRASHING, Plan, draw
from tests.simulation.protocol.run import run

Mutant = Callable[[], None]
Result = TypeVar("Result")
LONGEST_BODY = 400
"""A limit that simulated jobs come to: their control bodies are small."""


def _wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> Mutant:
    """Put `make(was)` in the place of a function; raises AttributeError if the owner itself has none of that name."""

    def apply() -> None:
        if name not in vars(owner):
            raise AttributeError(f"{owner.__name__} has no {name} any more: this mutant changes nothing")
        setattr(owner, name, make(getattr(owner, name)))

    return apply


def _without(*kinds: type) -> Callable[[Any], Any]:
    """The same actions without these."""
    return lambda was: lambda self, *args, **kw: [action for action in was(self, *args, **kw) if not isinstance(action, kinds)]


def _several(*mutants: Mutant) -> Mutant:
    def apply() -> None:
        for mutant in mutants:
            mutant()

    return apply


def _void_after_minute(was: Any) -> Any:
    def tick(state: Any) -> None:
        was(state)
        snapshot = state.snapshots.current
        if snapshot is not None and state.now - snapshot.began > 60.0:
            checkpoints.void(state, "a minute is over", state.snapshots.failed)

    return tick


def _payload_seconds(was: Any) -> Any:
    def tick(self: Any, now: float) -> None:
        was(self, now)
        records_out = self.worker.machine.records
        self.began = now if records_out.through or self.end is None else getattr(self, "began", now)
        if self.index == 0 and self.end is not None and now - self.began > 1.0:
            self.worker.machine.records.relinked()
            self.worker.world.shards[0].records = type(self.worker.world.shards[0].records)()
            self.end.close()
            self._ended()

    return tick


def _early(was: Any) -> Any:
    def try_commit(state: Any) -> None:
        snapshot = state.snapshots.current
        if snapshot is not None and not snapshot.committing and len(snapshot.written) == state.job.shards - 1:
            missing = next(index for index in range(state.job.shards) if index not in snapshot.written)
            snapshot.written[missing] = next(iter(snapshot.written.values()))
        was(state)

    return try_commit


def _unfenced_row(was: Any) -> Any:
    def meet(self: Any, worker: int, incarnation: tuple[int, int]) -> bool:
        self.rows[worker].incarnation = incarnation
        return True

    return meet


def _twice(was: Any) -> Any:
    def admit(self: Any, worker: int, incarnation: tuple[int, int], clock: int, position: int) -> Any:
        row = self.rows[worker]
        if clock == row.complete and position in row.open:
            return deduplication.Verdict.ADMIT
        return was(self, worker, incarnation, clock, position)

    return admit


def _never_over(was: Any) -> Any:
    def begin(state: Any, found: Any, why: str) -> None:
        was(state, found if found is None else type(found)(**{**found.__dict__, "final": False}), why)

    return begin


def _lost_if_long(was: Any) -> Any:
    def answer(self: Any, body: Any) -> None:
        if len(json.dumps(body)) <= LONGEST_BODY:
            was(self, body)

    return answer


def _held_later(was: Any) -> Any:
    def order(self: Any, order: Any) -> Any:
        if self._writer is None:
            return was(self, order)
        actions = was(self, dataclasses.replace(order, clocks=None))
        self._next = order
        return actions

    return order


def _without_leave(was: Any) -> Any:
    def relinked(self: Any, link: Any) -> Any:
        leaving, self.leaving = self.leaving, False
        try:
            return was(self, link)
        finally:
            self.leaving = leaving

    return relinked


def _first_opens(was: Any) -> Any:
    def restored(state: Any, event: Any) -> None:
        if event.restore_id == state.restore_id:
            state.only = state.only & (state.done | {event.shard})
        was(state, event)

    return restored


def _let_in(state: Any, stream: Any) -> None:
    if stream.incarnation > state.members[stream.rank].incarnation:
        membership.heartbeat(state, stream.rank)
    state.members.came(stream)
    recovery.worker_came(state, stream)


def _ordered_once(was: Any) -> Any:
    def measured(state: Any, event: Any) -> None:
        last = state.norms.last
        if last is None or (event.restore_id, event.version) != (last.restore_id, last.version):
            was(state, event)

    return measured


def _later(was: Any) -> Any:
    def resume(*args: Any, **kw: Any) -> Any:
        clock = was(*args, **kw)
        return None if clock is None else clock + 1

    return resume


ISSUED: dict[str, Mutant] = {
    "1: a shard that reads counts as hung": _wrap(
        shard.SimShard, "healthy", lambda was: lambda self: was(self) and not (self.up and self.machine.reading)
    ),
    "2: a snapshot that is written for a minute is void": _wrap(checkpoints, "tick", _void_after_minute),
    "3: void snapshots leave their files": _several(
        _wrap(shard_machine.ShardSnapshots, "void", _without(Discard)), _wrap(shard_machine.ShardSnapshots, "drop", _without(Discard))
    ),
    "4: a control body above the limit is lost silently": _wrap(shard.SimShard, "answer", _lost_if_long),
    "5: a record has a second in all, and begins anew": _wrap(link.SimLink, "tick", _payload_seconds),
    "6: an older record's residual is put back": _wrap(
        worker_machine.WorkerMachine,
        "_welcomed",
        lambda was: lambda self, event, now: (was(self, event, now), setattr(self, "residual", True))[0],
    ),
}


def _versions(make: Callable[[int], int]) -> Callable[[Any], Any]:
    """The same of blocks at other versions."""
    return lambda was: lambda versions, ranks: was([make(version) for version in versions], ranks)


OWN: dict[str, Mutant] = {
    "a commit does not wait for one shard": _wrap(checkpoints, "try_commit", _early),
    "a worker that comes back is given the newest weights": _wrap(
        Store, "pull", lambda was: lambda self, header, *args: was(self, header._replace(flags=Flag.NONE), *args)
    ),
    "a worker resumes a clock too far (sync)": _wrap(membership, "resume_sync", _later),
    "a worker resumes a clock too far (async)": _wrap(membership, "resume_async", _later),
    "a push that is here is taken again": _wrap(deduplication.Admission, "admit", _twice),
    "orders are not repeated after a break": _wrap(
        Orders, "missed", lambda was: lambda self, shard, carried: None if was(self, shard, carried) is None else []
    ),
    "arrivals are not repeated after a break": _wrap(coordinated_updates.CoordinatedUpdates, "tell_again", lambda was: lambda self: None),
    "squares are not told again after a break": _wrap(ClipNorms, "tell_again", lambda was: lambda self: None),
    "an order to clip is not repeated after a break": _wrap(updates, "norm_measured", _ordered_once),
    "questions are not repeated after a break": _wrap(membership, "unanswered", lambda was: lambda state, index: []),
    "pushes are not repeated after a break": _wrap(worker_machine.Requests, "again", lambda was: lambda self, *args: []),
    "a restore does not rewind the workers": _several(
        _wrap(recovery, "_rewind_workers", lambda was: lambda state: None),
        _wrap(membership, "is_behind", lambda was: lambda state, stream: False),
        _wrap(shard_machine.ShardMachine, "_restore", _without(DropSessions)),
    ),
    "the last commit comes when one worker has left": _wrap(
        Members, "finished", lambda was: lambda self, policy: any(m.left_at is not None for m in self.all.values())
    ),
    "nobody looks for a higher claim": _wrap(records, "check", lambda was: _nothing_checked),
    "a coordinator stays though its term is fenced": _wrap(
        machine, "_of_disk", lambda was: lambda state, event: isinstance(event, events.TermFenced) or was(state, event)
    ),
    "a run that is over begins again": _wrap(recovery, "_begin", _never_over),
    "a worker's end is not told again after a break": _wrap(worker_machine.WorkerMachine, "_relinked", _without_leave),
    "training begins when one shard has read": _wrap(recovery, "shard_restored", _first_opens),
    "a later attempt is not given what the one before had answered": _wrap(
        worker_machine.Requests, "attempt_rose", lambda was: lambda self: None
    ),
    "a checkpoint does not wait for records": _wrap(Members, "missing_records", lambda was: lambda self, step, pins: set()),
    "a snapshot outlives the rewind": _several(
        _wrap(recovery, "announced", lambda was: _undropped(was)),
        _wrap(recovery, "_restore", lambda was: _undropped(was)),
    ),
    "a void snapshot releases nobody": _several(
        _wrap(shard_machine.ShardSnapshots, "drop", _without(Release)),
        _wrap(
            CoordinatorState,
            "tell_all",
            lambda was: lambda self, kind, **kw: None if kind is Kind.RELEASE else was(self, kind, **kw),
        ),
    ),
    "a decided snapshot is held when the one before has let go": _wrap(shard_machine.ShardSnapshots, "order", _held_later),
    "an older process of a rank may join": _several(
        _wrap(deduplication.Admission, "meet", _unfenced_row),
        _wrap(shard.SimShard, "outdated", lambda was: lambda self, session, old: False),
        _wrap(machine, "_hello", lambda was: _let_in),
    ),
    "what a crash lost counts as taken": _wrap(deduplication, "taken_by", _versions(lambda version: version + 1)),
    "what outlived a crash is taken again": _wrap(deduplication, "taken_by", _versions(lambda version: max(0, version - 1))),
    "a snapshot's number is given again after a crash": _wrap(
        recovery, "take_up", lambda was: lambda state, event: was(state, dataclasses.replace(event, snapshot=0))
    ),
    "training continues after a crash though another shard is behind": _wrap(recovery, "_serve_all", lambda was: lambda state, *args: True),
    "a crash forgets who has left": _wrap(
        Members, "took_up", lambda was: lambda self, workers: was(self, [dataclasses.replace(w, left=None) for w in workers])
    ),
    "squares told before training continues are lost": _wrap(updates, "count_early_norms", lambda was: lambda state: None),
    "an order to clip is lost with the process": _several(
        _wrap(ClipNorms, "take_up", lambda was: lambda self, ordered: None),
        _wrap(updates, "take_up_norm", lambda was: lambda state, *args: None),
        _wrap(updates, "is_beyond", lambda was: lambda state, event: None),
    ),
}
"""Mutants of our own choice."""


def _nothing_checked(volume: Any, pod: str, term: int, owner: bool = True) -> Any:
    yield volume.seconds(pod)


def _undropped(was: Any) -> Any:
    def act(state: Any, *args: Any) -> None:
        drop = checkpoints.drop
        checkpoints.drop = lambda state, why: None
        try:
            was(state, *args)
        finally:
            checkpoints.drop = drop

    return act


@dataclasses.dataclass(frozen=True)
class Found:
    """A seed that finds a mutant, the mode that it is played in (None: its own), and the promise that breaks."""

    seed: int
    promise: str
    mode: str | None = None
    hurried: bool = True
    """The job is complete in a quarter of the time without the mutant."""

    @property
    def plan(self) -> Plan:
        """What is played: the plan of the seed, with less patience, since a job that hangs costs most while nothing comes of it."""
        plan = draw(self.seed, self.mode)
        if not self.hurried:
            return plan
        return Hurried(**{field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)})


class Hurried(Plan):
    """A job must be complete in a quarter of the time."""

    @property
    def patience(self) -> float:
        return super().patience / 4


HANGS = "the job hangs"
FOUND: dict[str, Found] = {
    "1: a shard that reads counts as hung": Found(119, HANGS),
    "2: a snapshot that is written for a minute is void": Found(119, HANGS),
    "3: void snapshots leave their files": Found(355, "files pile up"),
    "4: a control body above the limit is lost silently": Found(8, HANGS),
    "5: a record has a second in all, and begins anew": Found(43, HANGS),
    "6: an older record's residual is put back": Found(1114, "a residual counts twice"),
    "a commit does not wait for one shard": Found(0, "not one snapshot"),
    "a worker that comes back is given the newest weights": Found(3, "not the undisturbed history", "sync-delay"),
    "a worker resumes a clock too far (sync)": Found(15, HANGS, "sync"),
    "a worker resumes a clock too far (async)": Found(5, HANGS),
    "a push that is here is taken again": Found(200, "applied twice"),
    "orders are not repeated after a break": Found(484, "not one snapshot"),
    "arrivals are not repeated after a break": Found(17, HANGS),
    "squares are not told again after a break": Found(3217, HANGS, "sync"),
    "an order to clip is not repeated after a break": Found(3217, HANGS, "sync"),
    "questions are not repeated after a break": Found(1147, HANGS),
    "pushes are not repeated after a break": Found(14, HANGS),
    "a restore does not rewind the workers": Found(365, HANGS),
    "the last commit comes when one worker has left": Found(1, "a step is missing"),
    "nobody looks for a higher claim": Found(14, "a superseded coordinator stays"),
    "a coordinator stays though its term is fenced": Found(14, "a superseded coordinator stays"),
    "a run that is over begins again": Found(33, HANGS, hurried=False),
    "a worker's end is not told again after a break": Found(1976, HANGS),
    "training begins when one shard has read": Found(1, HANGS),
    "a later attempt is not given what the one before had answered": Found(14, HANGS),
    "a checkpoint does not wait for records": Found(190, HANGS),
    "a snapshot outlives the rewind": Found(364, "a finished job trains again"),
    "a void snapshot releases nobody": Found(184, HANGS),
    "a decided snapshot is held when the one before has let go": Found(2, "not one snapshot"),
    "an older process of a rank may join": Found(273, "an older process counts"),
    "what a crash lost counts as taken": Found(7, HANGS, CRASHING),
    "what outlived a crash is taken again": Found(11, HANGS, CRASHING),
    "a snapshot's number is given again after a crash": Found(32, "the job failed", CRASHING),
    "training continues after a crash though another shard is behind": Found(752, HANGS, CRASHING),
    "a crash forgets who has left": Found(11, HANGS, CRASHING),
    "squares told before training continues are lost": Found(0, HANGS, CRASHING),
    "an order to clip is lost with the process": Found(575, HANGS, CRASHING),
}
"""Cheap seeds, not the lowest ones."""


def table() -> str:
    """`FOUND` in Markdown."""
    rows = [f"| {name} | {found.seed}{f', mode {found.mode}' if found.mode else ''} | {found.promise} |" for name, found in FOUND.items()]
    return "\n".join(["| mutant | seed | promise that it breaks |", "| --- | --- | --- |", *rows])


def replayed(name: str) -> str | None:
    """The promise that a mutant breaks at its seed."""
    return with_mutant(name, _broken, FOUND[name])


def _broken(found: Found) -> str | None:
    return run(found.plan).broken


def found_at(name: str, seeds: Iterable[int], mode: str | None = None) -> tuple[int, str] | None:
    """The first seed that finds a mutant in a mode (None: the seed's own), and the promise that it breaks; None where none does."""
    return with_mutant(name, _search, list(seeds), mode)


def with_mutant(name: str, act: Callable[..., Result], *args: Any) -> Result:
    """What `act(*args)` comes to in a fork of this process in which the mutant is put. Raises AttributeError if its target is gone."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_apply, (name, act, args))


def _apply(name: str, act: Callable[..., Result], args: Sequence[Any]) -> Result:
    {**ISSUED, **OWN}[name]()
    return act(*args)


def _search(seeds: list[int], mode: str | None) -> tuple[int, str] | None:
    for seed in seeds:
        made = run(draw(seed, mode))
        if made.broken is not None:
            return seed, made.broken
    return None


if __name__ == "__main__":
    print(table())
