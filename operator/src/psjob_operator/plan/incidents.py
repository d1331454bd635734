"""Which failures are one: what befell processes together counts once against backoffLimit, as one failed attempt does in a JobSet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from psjob_operator.api.rules import MOST_SHARDS
from psjob_operator.api.status import Incident
from psjob_operator.plan.facts import Facts, Seat
from psjob_operator.plan.fate import SIGNALLED
from psjob_operator.plan.snapshot import Role
from psjob_operator.plan.text import index_set, index_text, stamp, unix

INCIDENT_SECONDS = 10.0
"""Processes that end within this time of the first one may have ended by one event."""
MOST_NODES = 8
"""Nodes that an incident names."""


@dataclass(frozen=True)
class Failing:
    """A failure that counts: who, how, where and when."""

    role: Role
    index: int
    number: int
    cause: str
    code: int
    """Exit code of the process or its init container; 0 where it has none."""
    node: str
    at: float
    """Unix time of its end, as its node has it."""
    ended: bool = True
    """Its end was seen; else it was found to make no progress, at `at`."""
    each: bool = False
    """A rule says that it counts by itself."""


@dataclass(frozen=True)
class Tally:
    """What failures add to the counts."""

    new: tuple[Incident, ...]
    """Incidents that were not counted before, in the order in which they began."""
    of_shards: int
    """How many incidents, new or known, befall a shard for the first time."""
    of_workers: int
    last: Incident | None
    """The incident that later failures may belong to."""

    def of(self, role: Role) -> int:
        """What they add to the count of a role."""
        return self.of_shards if role == "shard" else self.of_workers


def failing(seat: Seat, now: float) -> Failing:
    """What is to know of a seat whose failure counts."""
    process = seat.process
    exit = None if process is None else process.exit or process.init_exit
    code = 0 if exit is None else SIGNALLED + exit.signal if exit.signal else exit.code
    at = exit.at if exit is not None and exit.at is not None else now
    node = "" if process is None else process.node
    return Failing(seat.role, seat.index, seat.number, seat.fate.cause, code, node, at, exit is not None, seat.fate.each)


def tally(failures: Iterable[Failing], known: Incident | None, start: int) -> Tally:
    """Groups failures. `known`: the incident counted last; `start`: highest number of a worker by now.

    Failures are of one incident when they end within INCIDENT_SECONDS of its first one, on one of its nodes or alike. Alike are those of
    one role with one cause and one exit code. A seat is in an incident once: who fails again after its restart has failed anew.
    """
    found = [] if known is None else [known]
    first_new = len(found)
    before = {"shard": 0, "worker": 0}
    for failure in sorted(failures, key=lambda it: (it.at, it.role, it.index)):
        # Of what makes no progress each one may be what the others waited for, as is seen once it was started again.
        among = range(0 if failure.ended else first_new, len(found))
        place = None if failure.each else next((i for i in among if _belongs(failure, found[i])), None)
        if place is None:
            found.append(_begun(failure, start))
            before[failure.role] += 1
        else:
            before[failure.role] += not _befell(found[place], failure.role)
            found[place] = _joined(found[place], failure)
    new = tuple(found[first_new:])
    return Tally(new, before["shard"], before["worker"], found[-1] if found else None)


def counting(facts: Facts, seats: Iterable[Seat]) -> Tally:
    """What the failures among `seats` add to the counts of the job."""
    counted = (failing(seat, facts.now) for seat in seats if seat.fate.counted)
    return tally(counted, facts.stored.restarts.last_incident, facts.stored.workers.start)


def known(facts: Facts, seat: Seat) -> bool:
    """The seat's failure is of the incident that was counted last."""
    last = facts.stored.restarts.last_incident
    if last is None or not seat.fate.counted or seat.fate.each:
        return False
    failure = failing(seat, facts.now)
    return failure.ended and _belongs(failure, last)


def _begun(failure: Failing, start: int) -> Incident:
    code = failure.code or None
    return _joined(Incident(time=stamp(failure.at), role=failure.role, cause=failure.cause, exit_code=code, start=start + 1), failure)


def _joined(incident: Incident, failure: Failing) -> Incident:
    nodes = {*incident.nodes, failure.node} - {""}
    shards = index_set(incident.shards, MOST_SHARDS) if failure.role == "shard" else frozenset()
    befallen = {"shards": index_text({*shards, failure.index})} if failure.role == "shard" else {"workers": incident.workers + 1}
    where = {"nodes": tuple(sorted(nodes))} if len(nodes) <= MOST_NODES else {}
    return incident.model_copy(update={**where, **befallen})


def _befell(incident: Incident, role: Role) -> bool:
    return bool(incident.shards) if role == "shard" else incident.workers > 0


def _belongs(failure: Failing, incident: Incident) -> bool:
    began = unix(incident.time)
    if began is None or abs(failure.at - began) > INCIDENT_SECONDS:
        return False
    # What was started in answer to it cannot have been befallen by it.
    if failure.role == "worker" and failure.number >= incident.start:
        return False
    if failure.role == "shard" and failure.index in index_set(incident.shards, MOST_SHARDS):
        return False
    alike = (failure.role, failure.cause, failure.code) == (incident.role, incident.cause, incident.exit_code or 0)
    return alike or (bool(failure.node) and failure.node in incident.nodes)
