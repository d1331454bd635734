"""From a start or a lost shard to training: all shards and workers are brought to one term of the job, at one checkpoint.

The phases, in their order, are the sections of this file:

`reading`: the term is claimed, so that no earlier coordinator can commit any more, and the newest checkpoint is looked for.
`electing`: not all shards are here.
`fresh`, `initialising`: a new run waits for rank 0, which sends its values; they become the checkpoint of step 0.
`restoring`: the newest checkpoint is looked for again, then shards read it. In sync these are all shards, and all workers begin again; in
async only those that lost their blocks. One that cannot be read is passed over.
`open`: training.
`finished`: the run has its final manifest.

A shard that is lost comes back with a hello (`shard_came`), or tells of its term while it starts (`announced`); either leads to
`restoring`. Workers that come at the wrong time wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from psjob import contract
from psjob.layout.blocks import Layout
from psjob.modes import format_mode
from psjob.protocol import messages
from psjob.protocol.coordinator import checkpoints, ending, events, membership, updates
from psjob.protocol.coordinator.events import CheckpointFacts, StreamFacts
from psjob.protocol.coordinator.state import CoordinatorState, ShardPeer
from psjob.protocol.messages import Adopt, Fence, Finish, Open, Order, Restore, SetUp
from psjob.wire.frame import Kind

WAITING_SECONDS = 2.0
AGAIN_SECONDS = 1.0
"""After a restore that a shard could not read."""
CLAIM_AGAIN_SECONDS = 2.0
"""After a claim for which the volume had no room."""
LOST_AGAIN_SECONDS = 5.0
"""After a look that failed, or that met no checkpoint which could be read though none is known to be damaged."""
TRIES = 3
"""So often a checkpoint is tried that could not be read, though no file is known to be damaged."""

# -- reading: claim the term, find the newest checkpoint ---------------------------------------------


def take_up(state: CoordinatorState, event: events.ShardRestartedFromKeeper) -> None:
    """Shard 0 serves already, from memory. If all others serve the same, to them only a stream broke."""
    state.taken = event
    state.term, state.restore_id = max(state.term, event.term), max(state.restore_id, event.restore_id)
    state.snapshots.number = max(state.snapshots.number, event.snapshot)
    if event.clip is not None:
        updates.take_up_norm(state, event.restore_id, *event.clip)


def start(state: CoordinatorState) -> None:
    """Shard 0 has started: it is its own first peer."""
    state.since, taken = state.now, state.taken
    restore_id, mode = (0, "") if taken is None else (taken.restore_id, taken.mode)
    state.peers[0] = ShardPeer(0, state.job.attempt, taken is not None, restore_id, mode, 0)
    claim_current_term(state)


def claim_current_term(state: CoordinatorState) -> None:
    """Claim the present term."""
    state.search.claim_at, state.search.claimed = None, False
    state.emit(events.ClaimTerm(state.term))


def term_claimed(state: CoordinatorState, event: events.TermClaimed) -> None:
    """The term is this process's."""
    search = state.search
    if event.term != state.term:
        return
    if search.waits_for is not None:
        search.waits_for = state.progress.checkpoint_problem = None
    search.claimed = True
    if state.phase == "reading":
        look(state)
    elif state.phase == "electing" and search.gather_at is None:
        gather(state)
    elif search.looking and search.asked is None:
        look(state)


def term_unclaimed(state: CoordinatorState, event: events.TermUnclaimed) -> None:
    """The claim could not be written: on a full volume that is waited for."""
    if event.term != state.term:
        return
    if not event.full:
        state.emit(events.Leave(1, event.why))
        return
    state.search.waits_for = f"{event.why}; this run continues once there is room for a small file"
    state.progress.checkpoint_problem = state.search.waits_for
    state.search.claim_at = state.now + CLAIM_AGAIN_SECONDS


def look(state: CoordinatorState) -> None:
    """Look for the newest checkpoint, as soon as the term is claimed."""
    search = state.search
    search.asked = search.look_at = None
    search.looking = True
    if not search.claimed:
        return
    search.number += 1
    search.asked = search.number
    search.records = state.phase != "reading" and _reads_records(state)
    passed = frozenset(search.damaged) | {name for name, tries in search.failed.items() if tries >= TRIES}
    state.emit(events.ReadNewest(search.number, state.term, passed, search.records))


def newest_read(state: CoordinatorState, event: events.NewestRead) -> None:
    """What was found: the first time it says what the job is, later what shards are restored from."""
    search, job = state.search, state.job
    if event.number != search.asked:
        return
    search.asked = None
    if not search.claimed:  # the term rose meanwhile
        return
    search.looking, search.waits_for = False, None
    for problem in event.problems:
        state.log("warning", problem)
    if event.problems:
        state.progress.checkpoint_problem = event.problems[0]
    if event.failed:
        _look_later(state, event.problems[0] if event.problems else "the folder cannot be read")
        return
    found, why = event.found, "; ".join((*search.damaged.values(), *event.problems))
    foreign = job.resume_from and (found is None or found.folder != job.folder)
    if foreign and (refused := _cannot_resume(state, found, why)) is not None:
        if state.source is None:
            state.emit(events.Leave(contract.EXIT_REFUSED, refused))
            return
        found = None
    if state.phase == "reading":
        _begin(state, found, why)
        return
    if found is None:
        _none_found(state, why)
    elif _comes_late(state, found):
        search.damaged[found.name] = f"checkpoint {found.name} is passed over: its coordinator had a successor when it was committed"
        look(state)
    elif found.final and found.folder == job.folder:  # an earlier coordinator committed it after this one's first look
        _is_over(state, found)
        _admit_waiting(state)
    elif _reads_records(state) and not search.records:
        look(state)
    else:
        _restore_from(state, found, event.records or {}, event.initial)


def _begin(state: CoordinatorState, found: CheckpointFacts | None, why: str) -> None:
    """The first look: it says what the job is."""
    if found is None and state.job.must_find:
        said = f" ({why})" if why else ""
        _leave_lost(state, f"no valid manifest in {state.job.folder}, though this run had a checkpoint{said}")
        return
    state.emit(events.SweepOrphans(state.term, state.snapshots.number + 1))
    state.source = found
    if found is not None:
        ending.take_mode_of(state, found)
        state.progress.rewound(found.step)
        if found.folder == state.job.folder:
            if found.final:
                _is_over(state, found)
            else:
                state.progress.adopt(found)
    _admit_waiting(state)


def _admit_waiting(state: CoordinatorState) -> None:
    """What the newest manifest says of the job is known: continue with who has come meanwhile."""
    waiting, state.waiting = state.waiting, {}
    if state.phase == "reading":
        state.enter("electing")
    for stream in waiting.values():
        if state.members[stream.rank].stream is stream:
            worker_came(state, stream)
    if state.phase != "finished":
        gather(state)
    else:
        state.order_all(Finish())


def _is_over(state: CoordinatorState, found: CheckpointFacts) -> None:
    """The run has ended."""
    state.progress.adopt(found)
    state.finish()
    state.members.rewound(found.workers, {})
    ending.already_over(state)


def _comes_late(state: CoordinatorState, found: CheckpointFacts) -> bool:
    """Did an earlier coordinator commit it after this one had continued from another? What it holds is undone on other shards."""
    search = state.search
    if found.folder != state.job.folder or found.term >= state.job.term:
        return False
    search.continued = search.continued or (found.term, found.step)
    return (found.term, found.step) > search.continued


def _look_later(state: CoordinatorState, why: str) -> None:
    """A disk that cannot be read now is asked again."""
    state.search.looking, state.search.waits_for = True, f"no checkpoint can be looked for: {why}"
    state.search.look_at = state.now + LOST_AGAIN_SECONDS


def _none_found(state: CoordinatorState, why: str) -> None:
    if state.search.failed:  # a volume that is away for a while takes all of them away
        state.search.failed.clear()
        _look_later(state, why)
        return
    said = f" ({why})" if why else ""
    _leave_lost(state, f"no checkpoint of this run in {state.job.folder} can be read{said}")


def _leave_lost(state: CoordinatorState, why: str) -> None:
    """No checkpoint is left to continue from, though there was one."""
    state.emit(events.Leave(contract.EXIT_CHECKPOINT_LOST, why))


def _cannot_resume(state: CoordinatorState, made: CheckpointFacts | None, why: str) -> str | None:
    """Why this run cannot begin from what `checkpoint.resumeFrom` names; None where it can."""
    job = state.job
    if made is None:
        return f"checkpoint.resumeFrom: no valid manifest in {job.resume_from}" + (f" ({why})" if why else "")
    if made.final:
        return f"checkpoint.resumeFrom: the run in {made.folder} is complete; load its final.safetensors in the script instead"
    if len(made.workers) != job.workers:
        return (
            f"checkpoint.resumeFrom: that run had {len(made.workers)} workers, this job has {job.workers}; "
            "set workers.replicas to the same number (another number of shards is fine)"
        )
    modes = contract.GOES_ON.get(made.mode, (made.mode,))
    if state.mode.name not in modes:
        return f"checkpoint.resumeFrom: that run was {made.mode}, this job is {state.mode.name}; training.mode may be {' or '.join(modes)}"
    return None


# -- electing: shards come -----------------------------------------------------------------------------


def gather(state: CoordinatorState) -> None:
    """Continue once every shard is here and the term is claimed."""
    state.search.stop()
    state.enter("electing")
    if len(state.peers) < state.job.shards or not state.search.claimed:
        return
    if state.source is None and not any(p.serving for p in state.peers.values()):
        state.enter("fresh")
        ask_first_values(state)
        return
    _restore(state, set())


def shard_came(state: CoordinatorState, hello: events.ShardHello) -> None:
    """A shard says hello on a new stream."""
    index, known = hello.index, state.peers.get(hello.index)
    if known is not None and hello.attempt < known.attempt:
        state.emit(events.Order(hello.link, Fence(state.term)))
        return
    if known is not None and hello.attempt > known.attempt:  # it may live on behind a node that is cut off, and workers with it
        state.emit(events.Order(known.link, Fence(max(state.term, hello.term))))
    peer = ShardPeer(hello.link, hello.attempt, hello.serving, hello.restore_id, hello.mode, hello.carried)
    state.peers[index] = peer
    state.blank.discard(index)
    checkpoints.drop(state, f"shard {index} has connected again")
    if hello.term > state.term:
        _rise(state, hello.term)
    if state.phase == "finished":
        state.order(index, Finish())
    elif state.phase == "reading":
        return
    elif not state.open or len(state.peers) < state.job.shards:
        gather(state)
    elif (missed := _missed(state, index, peer)) is None:
        _restore(state, {index})
    else:
        again = (*missed, *membership.unanswered(state, index), *checkpoints.unprepared(state, index))
        for order in (Adopt(state.term), *again):
            state.order(index, order)


def _missed(state: CoordinatorState, index: int, peer: ShardPeer) -> Sequence[Order] | None:
    """The orders that a shard which serves has lost with its stream; None: only a restore brings it to where the others are."""
    if not peer.serving or (state.mode.rewinds_together and peer.restore_id != state.restore_id) or peer.mode != format_mode(state.mode):
        return None
    return updates.missed(state, index, peer.carried)


def announced(state: CoordinatorState, term: int) -> None:
    """A shard that is still starting tells of a higher term: rewind the workers while it imports and restores."""
    if term > state.term and state.phase != "finished":
        _rise(state, term)
        if state.open and state.mode.rewinds_together:
            checkpoints.drop(state, "a shard starts again")  # it would commit steps that are undone
            state.enter("electing")
            _rewind_workers(state)


def shard_lost(state: CoordinatorState, index: int, link: int) -> None:
    """The stream of a shard ended; it may still serve its workers."""
    peer = state.peers.get(index)
    if peer is not None and peer.link == link:
        checkpoints.drop(state, f"shard {index} is out of reach")


def _rise(state: CoordinatorState, term: int) -> None:
    state.term = term
    state.restore_id = max(state.restore_id, term << 20)
    claim_current_term(state)


# -- fresh, initialising: a new run's first values -----------------------------------------------------


def ask_first_values(state: CoordinatorState) -> None:
    """Ask rank 0 for the run's first values, if it waits for that. While one of those before is being committed, it waits."""
    snapshot, stream = state.snapshots.current, state.waiting.get(0)
    if stream is None or (snapshot is not None and snapshot.committing):
        return
    if state.phase == "fresh" or (state.initialising and stream.id != state.initialization.asked_of):
        _initialise(state, stream)


def _initialise(state: CoordinatorState, stream: StreamFacts) -> None:
    checkpoints.drop(state, "rank 0 starts again")
    initialization = state.initialization
    initialization.asked_of = stream.id
    state.tables, state.aliases = stream.tables, stream.aliases
    state.rule = membership.rule_for(stream.rule, state.job.update_at)
    state.lay_out(Layout.of(stream.table))
    state.enter("initialising")
    state.done, state.only, state.initial = set(), set(range(state.job.shards)), b""
    initialization.setup += 1
    state.order_all(SetUp(initialization.setup, stream.table, state.rule, state.term, format_mode(state.mode), state.tables))
    assignment = list(state.assignment)
    body = {"init": True, "term": state.term, "clock": 0, "restore_id": state.restore_id, "assignment": assignment}
    state.emit(events.Welcome(stream.id, body, init=True))


def first_buffers(state: CoordinatorState, rank: int, buffers: bytes) -> None:
    """A worker gives the run's first buffers. Only rank 0 does, when it was asked."""
    if rank == 0 and state.initialising:
        state.initial = buffers
        check_initialised(state)


def initialised(state: CoordinatorState, event: messages.Initialised) -> None:
    """A shard has all first values of a set-up."""
    if state.initialising and event.setup == state.initialization.setup:
        state.done.add(event.shard)
        check_initialised(state)


def check_initialised(state: CoordinatorState) -> None:
    """All blocks and rank 0's buffers are here: commit the manifest of step 0 before any push is admitted."""
    if state.initialising and state.done >= state.only and state.initial and state.snapshots.may_begin(state.now):
        checkpoints.begin(state, still=True)


def first_committed(state: CoordinatorState, made: CheckpointFacts) -> None:
    """The manifest of step 0 is there."""
    state.source = made
    if state.initialising:
        state.restored = {}
        _open_all(state)
    else:  # a shard came anew meanwhile
        gather(state)


# -- restoring: shards read the newest checkpoint ------------------------------------------------------


def rewind_all(state: CoordinatorState, why: str) -> None:
    """Everyone goes back to the last manifest; no shard was lost."""
    state.log("info", f"all rewind: {why}")
    checkpoints.drop(state, "all rewind")
    _restore(state, set(state.peers))


def _restore(state: CoordinatorState, blank: set[int]) -> None:
    """Bring shards back from the newest manifest, once that is found."""
    state.blank |= blank
    checkpoints.drop(state, "shards are restored")
    state.tries.moved = {}
    state.enter("restoring")
    state.done, state.only = set(), set(state.peers)
    look(state)


def _together(state: CoordinatorState) -> bool:
    """Must all shards be restored: in sync, after a change of mode, and where none serves?"""
    peers, mode = state.peers.values(), format_mode(state.mode)
    other = any(p.serving and p.mode != mode for p in peers)
    return state.mode.rewinds_together or other or not any(p.serving for p in peers)


def _reads_records(state: CoordinatorState) -> bool:
    """Will workers be placed by what the manifest has of them?"""
    return _together(state) or 0 in state.blank or not state.peers[0].serving


def _restore_from(state: CoordinatorState, found: CheckpointFacts, records: Mapping[int, bytes], initial: bytes) -> None:
    """Bring shards back from this manifest: all of them in sync, in async only those that lost their blocks."""
    state.source = found
    taken, state.taken = state.taken, None
    if taken is not None and _serve_all(state, taken, found):
        _serve_on(state, taken, found, initial)
        return
    together = _together(state)
    state.only = set(state.peers) if together else state.blank | {i for i, p in state.peers.items() if not p.serving}
    state.blank, state.restored, state.done = set(), {}, set()
    if not state.only:
        _open_all(state)
        return
    whole = together or state.only == set(state.peers)
    state.restore_id += 1
    if 0 in state.only:
        state.restored_by = state.restore_id
    saved = found.workers
    if found.run != state.job.run:  # another run's processes say nothing about this one's
        saved = tuple(type(worker)(worker.clock, left=worker.left, record=worker.record) for worker in saved)
    _take_model(state, found, initial)
    if whole:
        _rewind_workers(state)
        state.members.rewound(saved, records)
        state.progress.rewound(found.step)
    elif 0 in state.only:
        state.members.rewound(saved, records)
    state.fences = state.members.fences(set(state.waiting)) if together else {}
    _order_restores(state, found)


def _take_model(state: CoordinatorState, found: CheckpointFacts, initial: bytes) -> None:
    state.lay_out(found.layout)
    state.tables, state.rule, state.aliases = found.tables, found.rule, found.aliases
    state.initial = initial or state.initial


def _order_restores(state: CoordinatorState, found: CheckpointFacts) -> None:
    # What a lost shard had answered of a worker's open clock, this one may not have whole; nobody begins another without it.
    # Where shard 0 is restored too, or was before, its own clocks may lag behind.
    state.sure = 0 not in state.only and state.job.attempt == 1 and (bool(state.tables) or 0 in state.assignment)
    order = Restore(state.term, state.restore_id, found.folder, found.name, format_mode(state.mode), state.fences)
    for index, peer in state.peers.items():
        if index in state.only:
            peer.serving = False
            state.emit(events.Order(peer.link, order, state.sure))
        else:
            state.order(index, Adopt(state.term))


def _rewind_workers(state: CoordinatorState) -> None:
    for member in state.members.all.values():
        if member.stream is None or not member.here:
            continue
        if member.welcomed:
            state.rewind(member.stream.id)
            member.welcomed = False
        else:
            state.waiting[member.rank] = member.stream


def shard_restored(state: CoordinatorState, event: messages.ShardRestored) -> None:
    """A shard has read what it was ordered to."""
    if state.restoring and not state.search.looking and event.restore_id == state.restore_id:
        state.done.add(event.shard)
        state.restored[event.shard] = event
        if state.done >= state.only:
            _open_all(state)


def shard_unrestored(state: CoordinatorState, event: messages.Unrestored) -> None:
    """A shard could not read the checkpoint: where a file is damaged the one before counts, else it is tried again."""
    source, search, progress = state.source, state.search, state.progress
    if not state.restoring or search.looking or event.restore_id != state.restore_id or source is None:
        return
    state.enter("electing")
    if event.damaged:
        search.damaged[source.name] = f"checkpoint {source.name} is passed over: {event.why}"
        progress.checkpoint_problem = search.damaged[source.name]
    else:
        search.failed[source.name] = search.failed.get(source.name, 0) + 1
        progress.checkpoint_problem = event.why
    state.log("warning", f"restore failed: {event.why}")
    search.gather_at = state.now + AGAIN_SECONDS


def _serve_all(state: CoordinatorState, taken: events.ShardRestartedFromKeeper, found: CheckpointFacts) -> bool:
    """Does every shard serve what shard 0 had served, and does a checkpoint hold the end of each worker that has left?

    The last record of a worker that has left since may be lost with the process.
    """
    ended = all(worker.left is None or found.workers[rank].left is not None for rank, worker in enumerate(taken.workers))
    same = taken.restore_id == state.restore_id and taken.mode == format_mode(state.mode) and taken.layout == found.layout
    peers = state.peers.values()
    return ended and same and not state.blank and all(p.serving and (p.restore_id, p.mode) == (taken.restore_id, taken.mode) for p in peers)


def _serve_on(state: CoordinatorState, taken: events.ShardRestartedFromKeeper, found: CheckpointFacts, initial: bytes) -> None:
    """Nobody goes back: workers say hello again, and are let in where they stand."""
    _take_model(state, found, initial)
    state.members.took_up(taken.workers)
    state.restored, state.done, state.only = {}, set(), set()
    state.log("info", f"all shards serve on at term {state.term}; no worker begins again")
    state.order_all(Adopt(state.term))
    _let_in(state)
    updates.count_early_norms(state)


# -- open: training, and workers that come -------------------------------------------------------------


def _open_all(state: CoordinatorState) -> None:
    """Every shard has what it serves: training continues."""
    if state.updates is not None and state.source is not None:
        updates.begin(state, state.updates, state.source.step, state.source.workers)
    for index, peer in state.peers.items():
        peer.serving, peer.restore_id, peer.mode = True, state.restore_id, format_mode(state.mode)
        state.order(index, Open(state.term, state.restore_id))
    _let_in(state)


def _let_in(state: CoordinatorState) -> None:
    """Training is on: who waits joins."""
    state.enter("open")
    state.snapshots.restart(state.progress.step, state.now)
    waiting = {**membership.opened(state), **state.waiting}
    state.waiting = {}
    for stream in waiting.values():
        if state.members[stream.rank].stream is not stream or not state.open:
            continue
        if membership.is_behind(state, stream):  # it was told so before, and may not be gone yet
            state.rewind(stream.id)
        elif not membership.refuse_mismatch(state, stream):  # it may have come before there was a model
            _join(state, stream)
    membership.ask(state)


def worker_came(state: CoordinatorState, stream: StreamFacts) -> None:
    """A worker said hello: welcome it, make it rewind, or let it wait."""
    if state.phase == "finished":
        state.emit(events.Tell(stream.id, Kind.FINISHED))
        ending.came_back(state, stream)
        return
    if state.phase == "reading":
        state.waiting[stream.rank] = stream  # it is looked at when it is known what the job is
        return
    if membership.refuse_mismatch(state, stream):
        return
    if membership.is_behind(state, stream):
        state.rewind(stream.id)
        return
    if state.open:
        _join(state, stream)
        membership.ask(state)
        return
    state.waiting[stream.rank] = stream
    if state.phase in ("fresh", "initialising") and stream.rank == 0:
        ask_first_values(state)


def _join(state: CoordinatorState, stream: StreamFacts) -> None:
    why = membership.join(state, stream)
    if why is not None:
        rewind_all(state, why)


def positions_told(state: CoordinatorState, event: messages.WorkerPositions) -> None:
    """A shard says how far the workers are that wait to be placed."""
    why = membership.answered(state, event)
    if why is not None:
        rewind_all(state, why)
        membership.ask(state)


# -- while anybody waits -------------------------------------------------------------------------------


def tick(state: CoordinatorState) -> None:
    """Try again what failed; tell those who wait what for."""
    search, now = state.search, state.now
    if search.claim_at is not None and now >= search.claim_at:
        claim_current_term(state)
    if search.gather_at is not None and now >= search.gather_at:
        gather(state)
    if search.look_at is not None and now >= search.look_at:
        look(state)
    membership.ask(state)
    if now - state.said_why >= WAITING_SECONDS:
        state.said_why = now
        why = reason(state, now)
        for stream in state.waiting.values():
            state.emit(events.Tell(stream.id, Kind.WAITING, {"reason": why}))
    check_initialised(state)


def reason(state: CoordinatorState, now: float) -> str | None:
    """Why nothing continues, or None while training."""
    seconds, search = round(now - state.since), state.search
    if search.waits_for is not None:
        return search.waits_for
    if state.phase == "electing":
        missing = [i for i in range(state.job.shards) if i not in state.peers]
        return f"shards {missing} have not come, for {seconds} s" if missing else None
    if state.phase == "fresh":
        return f"worker 0 has not attached its model, for {seconds} s"
    if search.looking:
        return f"the newest checkpoint is looked for, for {seconds} s"
    if state.initialising or state.restoring:
        waiting = sorted(state.only - state.done)
        if state.initialising and not waiting:
            return f"the checkpoint of step 0 is not written yet, for {seconds} s"
        return f"shards {waiting} are {state.phase}, for {seconds} s"
    return None
