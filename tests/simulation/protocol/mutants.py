"""Faults that are put into the shipped decisions on purpose: the simulator must find each.

`ISSUED` were found in use, at real size; the others are what somebody might take away. Each patches the code of this very process, so it is
run in a fork.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from typing import Any

from psjob.protocol.coordinator import completion, cutting, finding, joining, machine, members, orders, recovery
from psjob.protocol.shard import cutting as shard_cutting
from psjob.protocol.shard import machine as shard_machine
from psjob.protocol.worker import machine as worker_machine
from psjob.protocol.worker import requests
from psjob.shard import admission, decided
from tests.simulation.protocol import link, records, shard
from tests.simulation.protocol.plan import draw
from tests.simulation.protocol.run import run

Mutant = Callable[[], None]


def _wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> Mutant:
    return lambda: setattr(owner, name, make(getattr(owner, name)))


def _without(kinds: tuple[str, ...]) -> Callable[[Any], Any]:
    """The same actions without these."""
    return lambda was: lambda self, *args, **kw: [action for action in was(self, *args, **kw) if type(action).__name__ not in kinds]


def _several(*mutants: Mutant) -> Mutant:
    def apply() -> None:
        for mutant in mutants:
            mutant()

    return apply


def _void_after_minute(was: Any) -> Any:
    def tick(self: Any, now: float) -> None:
        was(self, now)
        cut = self.cuts.current
        if cut is not None and now - cut.began > 60.0:
            self.void("a minute is over", self.cuts.failed)

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
    def try_commit(self: Any) -> None:
        cut = self.cuts.current
        if cut is not None and not cut.committing and len(cut.written) == self.c.job.shards - 1:
            missing = next(index for index in range(self.c.job.shards) if index not in cut.written)
            cut.written[missing] = next(iter(cut.written.values()))
        was(self)

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
            return admission.Verdict.ADMIT
        return was(self, worker, incarnation, clock, position)

    return admit


def _never_over(was: Any) -> Any:
    def begin(self: Any, found: Any, why: str) -> None:
        was(self, found if found is None else type(found)(**{**found.__dict__, "final": False}), why)

    return begin


def _later(was: Any) -> Any:
    def resume(*args: Any) -> Any:
        clock = was(*args)
        return None if clock is None else clock + 1

    return resume


ISSUED: dict[str, Mutant] = {
    "1: a shard that reads counts as hung": _wrap(
        shard.SimShard, "healthy", lambda was: lambda self: was(self) and not (self.up and self.machine.reading)
    ),
    "2: a cut that is written for a minute is void": _wrap(cutting.Cutting, "tick", _void_after_minute),
    "3: void cuts leave their files": _several(
        _wrap(shard_cutting.Cutting, "void", _without(("Discard",))), _wrap(shard_cutting.Cutting, "drop", _without(("Discard",)))
    ),
    "5: a record has a second in all, and begins anew": _wrap(link.SimLink, "tick", _payload_seconds),
    "6: an older record's residual is put back": _wrap(
        worker_machine.WorkerMachine,
        "_welcomed",
        lambda was: lambda self, event, now: (was(self, event, now), setattr(self, "residual", True))[0],
    ),
}
OWN: dict[str, Mutant] = {
    "a commit does not wait for one shard": _wrap(cutting.Cutting, "try_commit", _early),
    "a worker resumes a clock too far (sync)": _wrap(joining, "resume_sync", _later),
    "a worker resumes a clock too far (async)": _wrap(joining, "resume_async", _later),
    "a push that is here is taken again": _wrap(admission.Admission, "admit", _twice),
    "orders are not repeated after a break": _wrap(
        orders.Orders, "missed", lambda was: lambda self, shard, carried: None if was(self, shard, carried) is None else []
    ),
    "arrivals are not repeated after a break": _wrap(decided.DecidedPushes, "tell_again", lambda was: lambda self: None),
    "questions are not repeated after a break": _wrap(joining.Joining, "unanswered", lambda was: lambda self, index: []),
    "pushes are not repeated after a break": _wrap(requests.Requests, "again", lambda was: lambda self, *args: []),
    "a restore does not rewind the workers": _several(
        _wrap(recovery.Recovery, "_rewind_workers", lambda was: lambda self: None),
        _wrap(recovery.Recovery, "_behind", lambda was: lambda self, stream: False),
        _wrap(shard_machine.ShardMachine, "_restore", _without(("DropSessions",))),
    ),
    "the last commit comes when one worker has left": _wrap(
        members.Members, "finished", lambda was: lambda self, policy: any(m.left_at is not None for m in self.all.values())
    ),
    "nobody looks for a higher claim": _several(
        lambda: setattr(records, "check", _nothing_checked), _wrap(machine.Coordinator, "_of_disk", lambda was: was)
    ),
    "a run that is over begins again": _wrap(finding.Finding, "_begin", _never_over),
    "the last commit needs somebody who waits for it": _wrap(
        members.Members, "finished", lambda was: lambda self, policy: was(self, policy) and any(m.here for m in self.all.values())
    ),
    "a cut outlives the rewind": _several(
        _wrap(recovery.Recovery, "announced", lambda was: _undropped(was)),
        _wrap(recovery.Recovery, "_restore", lambda was: _undropped(was)),
    ),
    "a void cut releases nobody": _several(
        _wrap(shard_cutting.Cutting, "drop", _without(("Release",))),
        _wrap(
            machine.Coordinator,
            "tell_all",
            lambda was: lambda self, kind, **kw: None if kind.name == "RELEASE" else was(self, kind, **kw),
        ),
    ),
    "an older process of a rank may join": _several(
        _wrap(admission.Admission, "meet", _unfenced_row),
        _wrap(completion.Completion, "stop_job", lambda was: was),
    ),
}
"""Mutants of our own choice."""


def _nothing_checked(volume: Any, pod: str, view: int, owner: bool = True) -> Any:
    yield volume.seconds(pod)


def _undropped(was: Any) -> Any:
    def act(self: Any, *args: Any) -> None:
        drop = cutting.Cutting.drop
        cutting.Cutting.drop = lambda self, why: None  # type: ignore[method-assign]
        try:
            was(self, *args)
        finally:
            cutting.Cutting.drop = drop  # type: ignore[method-assign]

    return act


def found_at(name: str, seeds: Iterable[int]) -> tuple[int, str] | None:
    """The first seed that finds a mutant, and the promise that it breaks; None where none does. Patches a fork of this process."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_search, (name, list(seeds)))


def _search(name: str, seeds: list[int]) -> tuple[int, str] | None:
    ({**ISSUED, **OWN})[name]()
    for seed in seeds:
        made = run(draw(seed))
        if made.broken is not None:
            return seed, made.broken
    return None
