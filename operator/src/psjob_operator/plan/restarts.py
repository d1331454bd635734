"""Which shards and workers are started again, when, and the numbers they get; and which of their failures count.

`afresh` and `lost` answer with a RestartDecision. What befell processes together is one incident, and counts once against backoffLimit, as
one failed attempt does in a JobSet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from psjob_operator.api.rules import MOST_SHARDS
from psjob_operator.api.status import Incident, ProcessRestarts, Restarts, RoleCounts, index_set, index_text, stamp, unix
from psjob_operator.contract import MOST_RISE
from psjob_operator.plan import objects, placement
from psjob_operator.plan.job_state import JobState, Seat, last_commit
from psjob_operator.plan.observed_state import Process, Role
from psjob_operator.plan.process_outcome import SIGNALLED, UNFINISHED

FIRST_SECONDS = 10.0
LONGEST_SECONDS = 360.0
FORGET_SECONDS = 600.0
"""Commits for so long after the last counted failure set the count back to 0."""
SPACING_SECONDS, SPACING_MOST = 10.0, 120.0
"""Starts of one seat that end at once by no fault of theirs are so far apart, first and at most."""
CALM_SECONDS = 60.0
"""A process that ran for so long before it was lost begins that anew."""
TOGETHER_SECONDS = 3.0
"""Failures so soon after a counted one are of the same event, such as a node that dies with several processes."""
LIVED_SECONDS = 5.0
"""A process that fails sooner after its start is a crash loop, whatever else the job does."""
MOST_PROCESSES = 8
"""In status.restarts.byProcess."""
AT_ONCE = ("Deleted", "Fenced")
"""Causes that happen once: a person's deletion, a term that is passed by the next start."""


INCIDENT_SECONDS = 10.0
"""Processes that end within this time of the first one may have ended by one event."""
MOST_NODES = 8
"""Nodes that an incident names."""


@dataclass(frozen=True)
class RestartDecision:
    """The numbers as they should stand, and why."""

    term: int
    attempts: tuple[int, ...]
    """One for each shard, those that the spec no longer has included."""
    start: int
    raised: tuple[Seat, ...]
    """Seats that get a new number, as they were found."""
    held: tuple[tuple[float, Seat], ...]
    """Seats whose loss waits for its turn, each with its unix time."""
    afresh: bool
    """First sight or resumption: nothing failed."""
    volume_group: int | None
    """Of status.internal.placedTerm."""
    moving: bool
    """The shards go elsewhere, all of them."""
    rests_on_absence: bool
    """Something was raised because it was not seen, or because something not expected was."""

    @cached_property
    def _raised(self) -> frozenset[tuple[str, int]]:
        return frozenset((seat.role, seat.index) for seat in self.raised)

    @cached_property
    def _held(self) -> dict[tuple[str, int], float]:
        return {(seat.role, seat.index): at for at, seat in self.held}

    def is_raised(self, seat: Seat) -> bool:
        """The seat gets a new number."""
        return (seat.role, seat.index) in self._raised

    def held_until(self, seat: Seat) -> float | None:
        """Unix time until which the seat's loss waits for its turn; None where it does not."""
        return self._held.get((seat.role, seat.index))

    def number(self, seat: Seat) -> int:
        """The number that the seat has now."""
        if not self.is_raised(seat):
            return seat.number
        return self.attempts[seat.index] if seat.role == "shard" else self.start

    def name(self, job: str, seat: Seat) -> str:
        """Name of the process that the seat has now."""
        return objects.process_name(job, seat.role, seat.index, self.number(seat))


def afresh(state: JobState) -> RestartDecision | None:
    """At first sight, and when a suspension ends: everything is started."""
    return _decide(state, afresh=True) if state.afresh else None


def lost(state: JobState) -> RestartDecision:
    """Of a job that has begun: what was lost starts again."""
    return _decide(state, afresh=False)


def _decide(state: JobState, afresh: bool) -> RestartDecision:
    """Raises everything when `afresh`, else what was lost, did not appear, or failed and has waited long enough."""
    held: tuple[tuple[float, Seat], ...] = ()
    moving = False
    if afresh:
        raised = tuple(seat for seat in state.seats if seat.role == "shard" or seat.outcome.kind != "done")
    else:
        losses = [(again_at(state, seat), seat) for seat in state.seats if _needs(seat, state)]
        leaving = placement.moved_shards(state)
        if leaving:
            together = max(ends_at(seat) for seat in leaving)
            losses = [*((together, seat) for seat in leaving), *((at, seat) for at, seat in losses if seat.role == "worker")]
            moving = together <= state.now
        losses = placement.move_together(state, losses)
        held = tuple((at, seat) for at, seat in losses if state.now < at)
        raised = tuple(seat for at, seat in losses if state.now >= at)
        if state.too_late or (raised and state.shards_done):
            # Nobody is left to tell those workers that training is done: the shards come back for that.
            raised = (*state.shards, *raised)
    shards = [seat for seat in raised if seat.role == "shard"]
    attempts = list(state.attempts)
    for seat in shards:
        attempts[seat.index] = max([attempts[seat.index], *(pod.number for pod in state.ahead if _sits(pod.role, pod.index, seat))]) + 1
    term = state.stored.internal.term or 0
    start = state.stored.internal.worker_start
    workers = [seat for seat in raised if seat.role == "worker"]
    if workers:
        met = (min(seat.outcome.fenced_by, start + MOST_RISE) for seat in workers)
        start = max([start, *met, *(pod.number for pod in state.ahead if pod.role == "worker")]) + 1
    absent = any(seat.outcome.kind == "absent" for seat in raised) and not afresh
    # Who writes a shard's last message cannot put the term out of every process's reach.
    term = max([term, *(min(seat.outcome.fenced_by, term + MOST_RISE) for seat in shards)]) + 1 if shards else term
    return RestartDecision(
        term=term,
        volume_group=term if moving or (afresh and shards) else state.stored.internal.placed_term,
        moving=moving,
        attempts=tuple(attempts),
        start=start,
        raised=raised,
        held=held,
        afresh=afresh,
        rests_on_absence=absent or any(_sits(pod.role, pod.index, seat) for pod in state.ahead for seat in raised),
    )


def unchanged(state: JobState) -> RestartDecision:
    """No number changes, but for the term where the run does: the API server asks it of a writer that takes a status over."""
    term = state.stored.internal.term or 0
    return RestartDecision(
        term=term + 1 if term and state.first_seen else term,
        volume_group=state.stored.internal.placed_term,
        moving=False,
        attempts=state.attempts,
        start=state.stored.internal.worker_start,
        raised=(),
        held=(),
        afresh=False,
        rests_on_absence=False,
    )


def restarts(state: JobState, decision: RestartDecision) -> Restarts:
    """The counts after these raises: written in the same write, so that no failure counts twice."""
    before = state.stored.restarts
    failures = counted(state)
    reset = {"counted": 0, "counted_by_role": RoleCounts(), "last_reset": stamp(state.now)} if failures < before.counted else {}
    before = before.model_copy(update=reset)
    # Before the job first ran, an absent pod was most likely never made: its name was only reserved.
    starting = not state.has_run
    again = [seat for seat in decision.raised if seat.number and not (starting and seat.outcome.kind == "absent")]
    if decision.afresh or not again:
        return before
    causes = Counter(before.causes)
    causes.update(cause(seat) for seat in again)
    added = counting(state, again)
    by_role = before.counted_by_role
    return before.model_copy(
        update={
            "total": before.total + len(again),
            "causes": dict(sorted(causes.items())[:64]),
            "counted": before.counted + len(added.new),
            "counted_by_role": RoleCounts(shard=by_role.shard + added.of_shards, worker=by_role.worker + added.of_workers),
            "last_counted": stamp(state.now) if added.new else before.last_counted,
            "last_incident": added.last,
            "by_process": _by_process(before.by_process, again, state.now),
        }
    )


def _by_process(before: tuple[ProcessRestarts, ...], again: Iterable[Seat], now: float) -> tuple[ProcessRestarts, ...]:
    """The list with these starts in it. Who is new takes the place of the one with the fewest and oldest, so that it can come to more."""
    kept = {(entry.role, entry.index): entry for entry in before}
    for seat in again:
        if seat.outcome.kind not in ("lost", "absent") or seat.outcome.cause == "Moved":
            continue
        known = kept.pop((seat.role, seat.index), None)
        if known is None and len(kept) >= MOST_PROCESSES:
            del kept[min(kept, key=lambda place: (kept[place].count, kept[place].time, place))]
        kept[seat.role, seat.index] = ProcessRestarts(
            role=seat.role,
            index=seat.index,
            count=(known.count if known else 0) + 1,
            cause=cause(seat),
            node=(seat.process.node if seat.process is not None else "") or None,
            time=stamp(now),
        )
    return tuple(sorted(kept.values(), key=lambda entry: (-entry.count, entry.role, entry.index)))


def cause(seat: Seat) -> str:
    """One CamelCase word: why the seat is started again."""
    return seat.outcome.cause or "Finished"


def _needs(seat: Seat, state: JobState) -> bool:
    if any(_sits(pod.role, pod.index, seat) for pod in state.ahead):
        return seat.outcome.kind != "done"
    if seat.role == "worker" and state.success_met:
        return False
    return seat.outcome.kind == "lost" or (seat.outcome.kind == "absent" and not seat.may_create)


def _sits(role: str, index: int, seat: Seat) -> bool:
    return role == seat.role and index == seat.index


def again_at(state: JobState, seat: Seat) -> float:
    """Unix time before which the loss of `seat` is not answered."""
    ends = ends_at(seat)
    if ends > state.now:
        return ends
    if seat.outcome.cause == UNFINISHED:  # found so late that no further wait is needed
        return 0.0
    if seat.outcome.counted:
        return 0.0 if _at_once(state, seat) else not_before(state)
    if seat.outcome.kind != "lost" or seat.process is None or seat.outcome.cause in AT_ONCE:
        return 0.0
    return seat.process.created + spacing(state, seat)


def ends_at(seat: Seat) -> float:
    """Unix time by which a shard that was asked to end has ended: until then it takes a last checkpoint, which a successor would fence."""
    process = seat.process
    if seat.role != "shard" or process is None or process.deleting is None:
        return 0.0
    over = process.gone or process.node_lost or process.exit is not None or process.started is None
    return 0.0 if over else process.deleting


def spacing(state: JobState, seat: Seat) -> float:
    """Seconds from a start that ended by no fault of its own to the next one: twice those before it, if nothing came of it."""
    process = seat.process
    if process is None or not process.waited or _lasted(state, process):
        return SPACING_SECONDS
    return min(2.0 * process.waited, SPACING_MOST)


def _lasted(state: JobState, process: Process) -> bool:
    """It ran long enough to be no loop, or training has come to a checkpoint since it was made."""
    ended, commit = process.exit.at if process.exit is not None else process.deleting, last_commit(state)
    if commit is not None and process.started is not None and commit > process.started:
        return True
    return process.started is not None and ended is not None and ended - process.started >= CALM_SECONDS


def _at_once(state: JobState, seat: Seat) -> bool:
    """No crash loop: what befell others too was answered, a failure was counted just now, or a checkpoint was committed since then."""
    if of_last_incident(state, seat):
        return True
    last, commit = unix(state.stored.restarts.last_counted), last_commit(state)
    if last is None or seat.process is None or state.now - seat.process.created < LIVED_SECONDS:
        return False
    return state.now - last <= TOGETHER_SECONDS or (commit is not None and commit > last)


def counted(state: JobState, role: Role | None = None) -> int:
    """Failures that count now, of a role or of both: none, once commits continued for ten minutes after the last of them."""
    last = unix(state.stored.restarts.last_counted)
    commit = last_commit(state)
    if last is not None and commit is not None and commit - last >= FORGET_SECONDS:
        return 0
    by_role = state.stored.restarts.counted_by_role
    return state.stored.restarts.counted if role is None else by_role.shard if role == "shard" else by_role.worker


def not_before(state: JobState) -> float:
    """Unix time before which a crash loop is not answered: the first failure is at once, then 10 s, 20 s, … up to 6 minutes."""
    last = unix(state.stored.restarts.last_counted)
    failures = counted(state)
    if last is None or failures == 0:
        return 0.0
    return last + min(FIRST_SECONDS * 2.0 ** min(failures - 1, 10), LONGEST_SECONDS)


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
    return Failing(seat.role, seat.index, seat.number, seat.outcome.cause, code, node, at, exit is not None, seat.outcome.each)


def tally_failures(failures: Iterable[Failing], known: Incident | None, start: int) -> Tally:
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


def counting(state: JobState, seats: Iterable[Seat]) -> Tally:
    """What the failures among `seats` add to the counts of the job."""
    counted = (failing(seat, state.now) for seat in seats if seat.outcome.counted)
    return tally_failures(counted, state.stored.restarts.last_incident, state.stored.internal.worker_start)


def of_last_incident(state: JobState, seat: Seat) -> bool:
    """The seat's failure is of the incident that was counted last."""
    last = state.stored.restarts.last_incident
    if last is None or not seat.outcome.counted or seat.outcome.each:
        return False
    failure = failing(seat, state.now)
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
