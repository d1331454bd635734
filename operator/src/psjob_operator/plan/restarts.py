"""Which shards and workers are started again, when, and the numbers they get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from psjob_operator.api.status import ProcessRestarts, Restarts, RoleCounts
from psjob_operator.contract import MOST_RISE
from psjob_operator.plan import incidents, naming, pairs, volumegroup
from psjob_operator.plan.facts import Facts, Seat
from psjob_operator.plan.fate import UNFINISHED
from psjob_operator.plan.progress import last_commit
from psjob_operator.plan.snapshot import Process, Role
from psjob_operator.plan.text import stamp, unix

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
"""Causes that happen once: a person's deletion, a view that is passed by the next start."""


@dataclass(frozen=True)
class Raising:
    """The numbers as they should stand, and why."""

    view: int
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
    """Of status.placement."""
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
        return naming.process(job, seat.role, seat.index, self.number(seat))


def afresh(facts: Facts) -> Raising | None:
    """At first sight, and when a suspension ends: everything is started."""
    return _raising(facts, afresh=True) if facts.afresh else None


def lost(facts: Facts) -> Raising:
    """Of a job that has begun: what was lost starts again."""
    return _raising(facts, afresh=False)


def _raising(facts: Facts, afresh: bool) -> Raising:
    """Raises everything when `afresh`, else what was lost, did not appear, or failed and has waited long enough."""
    held: tuple[tuple[float, Seat], ...] = ()
    moving = False
    if afresh:
        raised = tuple(seat for seat in facts.seats if seat.role == "shard" or seat.fate.kind != "done")
    else:
        losses = [(again_at(facts, seat), seat) for seat in facts.seats if _needs(seat, facts)]
        leaving = volumegroup.moved(facts)
        if leaving:
            together = max(ends_at(seat) for seat in leaving)
            losses = [*((together, seat) for seat in leaving), *((at, seat) for at, seat in losses if seat.role == "worker")]
            moving = together <= facts.now
        losses = pairs.together(facts, losses)
        held = tuple((at, seat) for at, seat in losses if facts.now < at)
        raised = tuple(seat for at, seat in losses if facts.now >= at)
        if facts.too_late or (raised and facts.shards_done):
            # Nobody is left to tell those workers that training is done: the shards come back for that.
            raised = (*facts.shards, *raised)
    shards = [seat for seat in raised if seat.role == "shard"]
    attempts = list(facts.attempts)
    for seat in shards:
        attempts[seat.index] = max([attempts[seat.index], *(pod.number for pod in facts.ahead if _sits(pod.role, pod.index, seat))]) + 1
    view = facts.stored.view or 0
    start = facts.stored.workers.start
    workers = [seat for seat in raised if seat.role == "worker"]
    if workers:
        met = (min(seat.fate.fenced_by, start + MOST_RISE) for seat in workers)
        start = max([start, *met, *(pod.number for pod in facts.ahead if pod.role == "worker")]) + 1
    absent = any(seat.fate.kind == "absent" for seat in raised) and not afresh
    # Who writes a shard's last message cannot put the view out of every process's reach.
    view = max([view, *(min(seat.fate.fenced_by, view + MOST_RISE) for seat in shards)]) + 1 if shards else view
    return Raising(
        view=view,
        volume_group=view if moving or (afresh and shards) else facts.stored.placement,
        moving=moving,
        attempts=tuple(attempts),
        start=start,
        raised=raised,
        held=held,
        afresh=afresh,
        rests_on_absence=absent or any(_sits(pod.role, pod.index, seat) for pod in facts.ahead for seat in raised),
    )


def unchanged(facts: Facts) -> Raising:
    """No number changes, but for the view where the run does: the API server asks it of a writer that takes a status over."""
    view = facts.stored.view or 0
    return Raising(
        view=view + 1 if view and facts.first_seen else view,
        volume_group=facts.stored.placement,
        moving=False,
        attempts=facts.attempts,
        start=facts.stored.workers.start,
        raised=(),
        held=(),
        afresh=False,
        rests_on_absence=False,
    )


def restarts(facts: Facts, raising: Raising) -> Restarts:
    """The counts after these raises: written in the same write, so that no failure counts twice."""
    before = facts.stored.restarts
    failures = counted(facts)
    reset = {"counted": 0, "counted_by_role": RoleCounts(), "last_reset": stamp(facts.now)} if failures < before.counted else {}
    before = before.model_copy(update=reset)
    # Before the job first ran, an absent pod was most likely never made: its name was only reserved.
    starting = facts.stored.phase == "Pending"
    again = [seat for seat in raising.raised if seat.number and not (starting and seat.fate.kind == "absent")]
    if raising.afresh or not again:
        return before
    causes = Counter(before.causes)
    causes.update(cause(seat) for seat in again)
    added = incidents.counting(facts, again)
    by_role = before.counted_by_role
    return before.model_copy(
        update={
            "total": before.total + len(again),
            "causes": dict(sorted(causes.items())[:64]),
            "counted": before.counted + len(added.new),
            "counted_by_role": RoleCounts(shard=by_role.shard + added.of_shards, worker=by_role.worker + added.of_workers),
            "last_counted": stamp(facts.now) if added.new else before.last_counted,
            "last_incident": added.last,
            "by_process": _by_process(before.by_process, again, facts.now),
        }
    )


def _by_process(before: tuple[ProcessRestarts, ...], again: Iterable[Seat], now: float) -> tuple[ProcessRestarts, ...]:
    """The list with these starts in it. Who is new takes the place of the one with the fewest and oldest, so that it can come to more."""
    kept = {(entry.role, entry.index): entry for entry in before}
    for seat in again:
        if seat.fate.kind not in ("lost", "absent") or seat.fate.cause == "Moved":
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
    return seat.fate.cause or "Finished"


def _needs(seat: Seat, facts: Facts) -> bool:
    if any(_sits(pod.role, pod.index, seat) for pod in facts.ahead):
        return seat.fate.kind != "done"
    if seat.role == "worker" and facts.success_met:
        return False
    return seat.fate.kind == "lost" or (seat.fate.kind == "absent" and not seat.may_create)


def _sits(role: str, index: int, seat: Seat) -> bool:
    return role == seat.role and index == seat.index


def again_at(facts: Facts, seat: Seat) -> float:
    """Unix time before which the loss of `seat` is not answered."""
    ends = ends_at(seat)
    if ends > facts.now:
        return ends
    if seat.fate.cause == UNFINISHED:  # found so late that no further wait is needed
        return 0.0
    if seat.fate.counted:
        return 0.0 if _at_once(facts, seat) else not_before(facts)
    if seat.fate.kind != "lost" or seat.process is None or seat.fate.cause in AT_ONCE:
        return 0.0
    return seat.process.created + spacing(facts, seat)


def ends_at(seat: Seat) -> float:
    """Unix time by which a shard that was asked to end has ended: until then it takes a last checkpoint, which a successor would fence."""
    process = seat.process
    if seat.role != "shard" or process is None or process.deleting is None:
        return 0.0
    over = process.gone or process.node_lost or process.exit is not None or process.started is None
    return 0.0 if over else process.deleting


def spacing(facts: Facts, seat: Seat) -> float:
    """Seconds from a start that ended by no fault of its own to the next one: twice those before it, if nothing came of it."""
    process = seat.process
    if process is None or not process.waited or _lasted(facts, process):
        return SPACING_SECONDS
    return min(2.0 * process.waited, SPACING_MOST)


def _lasted(facts: Facts, process: Process) -> bool:
    """It ran long enough to be no loop, or training has come to a checkpoint since it was made."""
    ended, commit = process.exit.at if process.exit is not None else process.deleting, last_commit(facts)
    if commit is not None and process.started is not None and commit > process.started:
        return True
    return process.started is not None and ended is not None and ended - process.started >= CALM_SECONDS


def _at_once(facts: Facts, seat: Seat) -> bool:
    """No crash loop: what befell others too was answered, a failure was counted just now, or a checkpoint was committed since then."""
    if incidents.known(facts, seat):
        return True
    last, commit = unix(facts.stored.restarts.last_counted), last_commit(facts)
    if last is None or seat.process is None or facts.now - seat.process.created < LIVED_SECONDS:
        return False
    return facts.now - last <= TOGETHER_SECONDS or (commit is not None and commit > last)


def counted(facts: Facts, role: Role | None = None) -> int:
    """Failures that count now, of a role or of both: none, once commits went on for ten minutes after the last of them."""
    last = unix(facts.stored.restarts.last_counted)
    commit = last_commit(facts)
    if last is not None and commit is not None and commit - last >= FORGET_SECONDS:
        return 0
    by_role = facts.stored.restarts.counted_by_role
    return facts.stored.restarts.counted if role is None else by_role.shard if role == "shard" else by_role.worker


def not_before(facts: Facts) -> float:
    """Unix time before which a crash loop is not answered: the first failure is at once, then 10 s, 20 s, … up to 6 minutes."""
    last = unix(facts.stored.restarts.last_counted)
    failures = counted(facts)
    if last is None or failures == 0:
        return 0.0
    return last + min(FIRST_SECONDS * 2.0 ** min(failures - 1, 10), LONGEST_SECONDS)
