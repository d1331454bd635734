"""Updates that wait for the coordinator: in a decided mode which pushes count, and by what factor a gradient of all shards is clipped.

Shards tell of each whole push, or of the sum of squares of their part of a mean gradient. Once all have told, one order goes to all. An
order that a shard has not heard is repeated on its next stream.

The norm is √Σ squares, the shards in their order; factor = min(1, limit / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` has it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from psjob.protocol import messages
from psjob.protocol.coordinator import events
from psjob.protocol.coordinator.decisions import DecisionOrder, Decisions, Orders
from psjob.protocol.coordinator.events import WorkerFacts
from psjob.protocol.coordinator.schedule import Snapshot
from psjob.protocol.coordinator.state import CoordinatorState, DecisionState
from psjob.protocol.messages import Clip, Decide, Where

WISH_SECONDS = 10.0
"""How long a snapshot waits for large records that are younger than the last snapshot's,"""
RECORD_SECONDS = 5.0
"""and then for those of the very clocks that it holds. After that older ones do: their workers make a few steps again."""
EPSILON: Final = 1e-6
ASK_SECONDS: Final = 1.0
"""After so long a shard that has not told is asked whether it has made the update without a norm."""

# -- which pushes count ------------------------------------------------------------------------------


def begin(state: CoordinatorState, updates: DecisionState, version: int, workers: Sequence[WorkerFacts]) -> None:
    """Training begins, or continues from a manifest at `version` that names `workers`."""
    owning = [i for i in range(state.job.shards) if state.tables or i in state.assignment]
    updates.leaving.clear()
    updates.orders = Orders(owning)
    clocks = {rank: worker.clock for rank, worker in enumerate(workers)}
    updates.decisions = Decisions(state.mode, owning, version, clocks, (m.rank for m in state.members.live()))
    snapshot_is_over(state, updates)


def push_arrived(state: CoordinatorState, event: messages.PushArrived) -> None:
    """A shard has a whole push. What it told before a restore is void."""
    updates = state.updates
    if updates is not None and updates.decisions is not None and state.open and event.restore_id == state.restore_id:
        updates.orders.carried(event.shard, event.carried)
        _order(state, updates, updates.decisions.told(event.shard, event.worker, event.clock, event.base, state.now))


def worker_left(state: CoordinatorState, rank: int) -> None:
    """A worker is through: it waits until no push of it waits for a decision, then until a manifest holds its end."""
    updates = state.updates
    if updates is None:
        state.ending.leavers.setdefault(rank, state.now)
    elif updates.decisions is not None and state.open:
        updates.leaving.add(rank)
        _order(state, updates, updates.decisions.left(rank, state.now))


def tick(state: CoordinatorState) -> None:
    """Ask the mode again when it wanted that; ask shards that have not told of an update's norm."""
    ask_for_norm(state)
    updates, now = state.updates, state.now
    if updates is not None and updates.decisions is not None and updates.decisions.until is not None and now >= updates.decisions.until:
        _order(state, updates, updates.decisions.ask(now))


def _order(state: CoordinatorState, updates: DecisionState, order: DecisionOrder | None) -> None:
    if order is not None:
        state.order_all(updates.orders.add(order), but=state.peers.keys() - updates.orders.shards)
    for rank in [rank for rank in updates.leaving if decided_clock(updates, rank) >= (state.members[rank].left_at or 0)]:
        updates.leaving.discard(rank)
        state.ending.leavers.setdefault(rank, state.now)


def decided_clock(updates: DecisionState, rank: int) -> int:
    """The clock at which a worker that comes back continues: the first of its that is not decided."""
    return 0 if updates.decisions is None else updates.decisions.clocks[rank]


def missing(state: CoordinatorState) -> list[int]:
    """Workers of whom no push waits for a decision."""
    return [] if state.updates is None or state.updates.decisions is None else state.updates.decisions.missing()


def missed(state: CoordinatorState, shard: int, carried: int | None) -> list[Decide] | None:
    """The orders that a shard has lost with its stream; None: it cannot continue without a restore. See `Orders`."""
    if state.updates is None:
        return []
    return state.updates.orders.missed(shard, carried)


# -- what a checkpoint needs in a decided mode ---------------------------------------------------------


def wait_for_records(state: CoordinatorState) -> bool:
    """Should a snapshot that is due wait for newer records? Those that do not come at every step are asked for by every answer."""
    updates = state.updates
    if updates is None or not any(m.here and _behind(state, updates, m.rank) for m in state.members.all.values()):
        return False
    if updates.wished is None:
        updates.wished = state.now
        state.emit(events.WishRecords(True))
    return state.now - updates.wished < WISH_SECONDS


def _behind(state: CoordinatorState, updates: DecisionState, rank: int) -> bool:
    member = state.members[rank]
    return member.left_at is None and max(member.records, default=-1) < decided_clock(updates, rank) - 1


def hold(state: CoordinatorState, updates: DecisionState, snapshot: Snapshot) -> dict[int, int]:
    """Note what the snapshot holds: each worker's decided pushes. Returns who has left with none undecided, and at which clock."""
    snapshot.clocks = clocks = {rank: decided_clock(updates, rank) for rank in state.members.all}
    return {m.rank: m.left_at for m in state.members.all.values() if m.left_at is not None and m.left_at <= clocks[m.rank]}


def oldest_needed(state: CoordinatorState, rank: int) -> int | None:
    """The oldest record of a worker that a restore may need: that of its decided clock, or the newest before it. None: not decided."""
    if state.updates is None:
        return None
    snapshot = state.snapshots.current
    clock = decided_clock(state.updates, rank) if snapshot is None or snapshot.clocks is None else snapshot.clocks[rank]
    found = state.members[rank].newest(clock)
    return -1 if found is None else found


def has_records(state: CoordinatorState, snapshot: Snapshot) -> bool:
    """Are the records of a snapshot here, or has it waited long enough?"""
    clocks = snapshot.clocks
    assert clocks is not None
    lacking = any(clocks[m.rank] and clocks[m.rank] not in m.records for m in state.members.live())
    return not lacking or state.now - snapshot.began > RECORD_SECONDS


def snapshot_is_over(state: CoordinatorState, updates: DecisionState) -> None:
    """No snapshot is due or under way any more."""
    if updates.wished is not None:
        updates.wished = None
        state.emit(events.WishRecords(False))


# -- the norm of a gradient ----------------------------------------------------------------------------


def norm_measured(state: CoordinatorState, event: messages.NormMeasured) -> None:
    """A shard holds an update until it knows the norm of all blocks. What it told before a restore is void.

    Each shard tells of each update once, and again on a new stream. It leaves a second report.
    """
    norms = state.norms
    if event.restore_id != state.restore_id:
        return
    if not state.open:
        norms.early[event.shard] = event
        return
    if norms.last is not None and (event.restore_id, event.version) == (norms.last.restore_id, norms.last.version):
        state.order(event.shard, norms.last)  # the stream that it was sent down has ended
        return
    if (event.restore_id, event.version) != (norms.restore_id, norms.version):
        norms.restore_id, norms.version, norms.shares = event.restore_id, event.version, {}
    norms.shares[event.shard] = event
    norms.since = state.now
    _clip_when_whole(state)


def ask_for_norm(state: CoordinatorState) -> None:
    """Ask shards that have not told of an update. A worker may ask for a norm at one shard only, and others would wait forever."""
    norms = state.norms
    if not norms.shares or state.now - norms.since < ASK_SECONDS or not state.open:
        return
    norms.since = state.now
    norms.question += 1
    for index in _owning(state):
        if index not in norms.shares:
            state.order(index, Where(norms.question, ()))


def is_beyond(state: CoordinatorState, event: messages.WorkerPositions) -> None:
    """A shard says where its blocks are: beyond the update under way it has no part in the norm."""
    norms = state.norms
    if event.ask != norms.question or not norms.shares or event.position.lo <= norms.version:
        return
    norms.shares.setdefault(event.shard, messages.NormMeasured(event.shard, norms.restore_id, norms.version, 0.0, math.inf))
    _clip_when_whole(state)


def take_up_norm(state: CoordinatorState, restore_id: int, version: int, factor: float) -> None:
    """Another process has given this order: a shard that has not heard it tells again, and hears it from here."""
    state.norms.last = Clip(restore_id, version, factor)


def count_early_norms(state: CoordinatorState) -> None:
    """All shards serve on: what they told while that was not known counts."""
    early, state.norms.early = state.norms.early, {}
    for event in early.values():
        norm_measured(state, event)


def _owning(state: CoordinatorState) -> list[int]:
    return sorted(set(state.assignment))


def _clip_when_whole(state: CoordinatorState) -> None:
    norms, owning = state.norms, _owning(state)
    if not norms.shares.keys() >= set(owning):
        return
    shares = [norms.shares[index] for index in owning]
    norm = math.sqrt(sum(each.squares for each in shares))
    norms.last = Clip(norms.restore_id, norms.version, clip_factor(norm, min(each.limit for each in shares)))
    norms.shares = {}
    state.progress.note_norm(norm)
    for each in reversed(shares):  # shard 0 last: it carries an order out at once
        state.order(each.shard, norms.last)


def clip_factor(norm: float, limit: float) -> float:
    """By what a gradient of this norm is multiplied; NaN where the norm is NaN, as torch has it."""
    if math.isnan(norm):
        return math.nan
    return min(1.0, limit / (norm + EPSILON))
