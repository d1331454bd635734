"""How a job ends: workers leave, the last checkpoint is committed, everyone hears of it; or it is asked to stop, or to change its mode.

Another mode is what the mounted config asks of a running job, and so is a checkpoint now. The checkpoint is an ordinary one, of the mode
that runs. Every shard reads it back in the other mode and every worker begins again from it, as after a lost shard. So whatever dies on
the way, all run one mode or the other afterwards. A restarted coordinator takes the config's mode where the newest checkpoint allows it,
else that of the checkpoint.

A checkpoint answers the request that was seen before it was begun, and its manifest says which. So a coordinator that starts again
knows what is answered; for any other number it asks anew.
"""

from __future__ import annotations

from psjob import contract, modes
from psjob.modes import Bounded, ServedMode, format_mode
from psjob.protocol.coordinator import checkpoints, events
from psjob.protocol.coordinator.events import CheckpointFacts, StreamFacts
from psjob.protocol.coordinator.members import State
from psjob.protocol.coordinator.schedule import Snapshot
from psjob.protocol.coordinator.state import CoordinatorState
from psjob.protocol.messages import Finish, Stop
from psjob.wire.frame import Kind

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
"""So long it waits for workers that were asked to hang up."""
QUIT_SECONDS = 0.3
CONFIG_SECONDS = 2.0
"""From one look at the mounted config to the next."""

# -- the end -----------------------------------------------------------------------------------------


def tick(state: CoordinatorState) -> bool:
    """Order the last checkpoint once it is time. True while an ending decides which taken comes next."""
    ending, taken, now = state.ending, state.snapshots.current, state.now
    for rank, since in list(ending.lone.items()):
        if ending.stop_by is None and now - since > LONE_SECONDS:
            del ending.lone[rank]
            state.tell(rank, Kind.STOPPED)
    if ending.stop_by is not None and now > ending.stop_by:
        _quit(state, contract.EXIT_RETRY)
        return True
    leaving = bool(ending.leavers) and now - min(ending.leavers.values()) > TOGETHER_SECONDS
    finished = state.members.finished(state.job.policy)
    still = not state.members.alive
    if taken is not None:
        if taken.committing:
            return True
        if ending.stop_by is not None and taken.step is not None and not taken.stop and state.furthest < taken.step:
            checkpoints.stop_at(state, taken, taken.step)  # workers that stand still would never come to it
        moving = taken.marks or taken.step is not None
        if (not taken.final and (finished or still)) or (still and moving and len(taken.written) < state.job.shards):
            checkpoints.drop(state, "everyone is through")
        elif ending.stop_by is not None and not taken.final and taken.step is not None and taken.step > checkpoints.last_reachable(state):
            checkpoints.drop(state, "a worker that is gone never comes to it")
        else:
            return True
    if (finished or ending.stop_by is not None) and not state.snapshots.may_begin(now):
        return True
    if finished and (still or leaving or not ending.leavers):
        # Where the workers step by themselves, the job's weights are those that the last to leave has stored.
        checkpoints.begin(state, final=True, still=still or state.rule == "reduce")
        return True
    if ending.stop_by is not None:
        _begin_stop(state, still)
        return True
    if leaving and state.job.checkpoints:
        state.snapshots.requested = True
    return False


def _begin_stop(state: CoordinatorState, still: bool) -> None:
    """The last snapshot of a job that is asked to stop. Workers that are gone are not waited for: nobody starts them again."""
    ending = state.ending
    if not (state.members.missing and state.mode.marks()):
        checkpoints.begin(state, stop=True, still=still)
        return
    # A worker that is gone makes no mark. Once all others stand at the end of a step, no block moves.
    if not ending.told_to_stand:
        ending.told_to_stand = True
        state.tell_all(Kind.STOP)
    if all(member.rank in ending.lone for member in state.members.live() if member.here):
        checkpoints.begin(state, stop=True, still=True)


def committed(state: CoordinatorState, snapshot: Snapshot, made: CheckpointFacts) -> None:
    """A manifest is on disk: let go who waited for it."""
    ending = state.ending
    if snapshot.final:
        ending.over = True
        state.finish()
        state.tell_all(Kind.FINISHED)
        state.order_all(Finish())
        ending.quit_at = state.now + LINGER_SECONDS
        return
    # Where the last have left meanwhile, they wait for the final one: without them nobody would ask for it.
    for rank in list(ending.leavers) if not state.members.finished(state.job.policy) else ():
        if state.members[rank].state is not State.LEFT:
            del ending.leavers[rank]
        elif made.workers[rank].left is not None:
            del ending.leavers[rank]
            state.tell(rank, Kind.LEFT)
    if snapshot.stop:
        state.tell_all(Kind.STOPPED)
        _quit(state, contract.EXIT_RETRY)


def stop_job(state: CoordinatorState) -> None:
    """The whole job is asked to go (suspend, Ctrl-C): last snapshot, then everyone leaves."""
    if state.ending.stop_by is None and not state.ending.over:
        state.ending.stop_by = state.now + STOP_SECONDS
        if not state.open:
            _quit(state, contract.EXIT_RETRY)


def stop_worker(state: CoordinatorState, rank: int) -> None:
    """One worker is asked to go (drain); it may as soon as its record is here."""
    snapshot = state.snapshots.current
    if state.ending.stop_by is not None and snapshot is not None and snapshot.stop:
        state.tell(rank, Kind.STOP, clock=snapshot.step or 0)
    state.ending.lone.setdefault(rank, state.now)


def already_over(state: CoordinatorState) -> None:
    """This run has its final manifest: every hello is answered with FINISHED, then the shards go."""
    state.ending.over = True
    state.ending.quit_at = state.now + FINISHED_SECONDS


def came_back(state: CoordinatorState, stream: StreamFacts) -> None:
    """A worker has heard that the run is over: others may be on their way. The wait is not renewed by a process that came before."""
    if (stream.rank, stream.incarnation) not in state.ending.back:
        state.ending.back.add((stream.rank, stream.incarnation))
        state.ending.quit_at = state.now + COMPANY_SECONDS


def leave(state: CoordinatorState) -> None:
    """End this process once everyone has heard of it and hung up, or the wait is over."""
    ending = state.ending
    if ending.quit_at is None or state.now < ending.quit_at:
        return
    told = not any(member.here for member in state.members.all.values())
    if told or state.now >= ending.quit_at + TOLD_SECONDS:
        ending.quit_at = None
        state.emit(events.Leave(ending.quit_code))


def _quit(state: CoordinatorState, code: int) -> None:
    if state.ending.over:
        return
    state.ending.over = True
    state.ending.quit_code = code
    state.ending.quit_at = state.now + QUIT_SECONDS
    state.order_all(Stop())


# -- another mode ------------------------------------------------------------------------------------


def take_mode_of(state: CoordinatorState, made: CheckpointFacts) -> None:
    """This coordinator continues from a checkpoint of its own run, or of one that this run resumes.

    The config is read again before a request is compared: what this process began with may be older than the checkpoint.
    """
    state.change.request = made.request if made.folder == state.job.folder else None
    allowed = contract.GOES_ON.get(made.mode)
    wished = state.change.wish.name
    if allowed is not None and wished != made.mode and (wished not in allowed or _fixed(state, made.rule)):
        _take(state, modes.parse_mode(made.mode))


def look_at_config(state: CoordinatorState) -> None:
    """Read the config from time to time; where another mode is asked for, ask for a checkpoint."""
    change = state.change
    if state.now - change.looked < CONFIG_SECONDS:
        return
    change.looked = state.now
    if not change.asked:
        change.asked = True
        state.emit(events.ReadWish())
    _request(state)


def wished(state: CoordinatorState, event: events.ModeWished) -> None:
    """What the config names now."""
    change = state.change
    change.asked = False
    if event.problem is not None:
        state.log("warning", event.problem)
    if event.request is not None and event.request != change.request:
        change.request = event.request
        if state.job.checkpoints:
            state.snapshots.ask(state.now)
    if event.mode is None or event.mode == change.wish:
        return
    change.wish = event.mode
    if event.mode != state.mode and next_mode(state) is None:
        why = _fixed(state, state.rule) or "it is fixed while a job runs"
        state.log("warning", f"training.mode {format_mode(event.mode)} is asked for; the job stays {format_mode(state.mode)}: {why}")
    _request(state)


def _request(state: CoordinatorState) -> None:
    if state.open and state.snapshots.current is None and next_mode(state) is not None:
        state.snapshots.requested = True


def change_mode(state: CoordinatorState, snapshot: Snapshot, made: CheckpointFacts) -> str | None:
    """A checkpoint is on disk: go over to the next mode, if there is one. Returns why all must go back to that checkpoint then."""
    mode = next_mode(state)
    if mode is None or snapshot.final or snapshot.stop or not state.open:
        return None
    before = format_mode(state.mode)
    _take(state, mode)
    return f"from step {made.step} on the mode is {format_mode(mode)}, it was {before}"


def next_mode(state: CoordinatorState) -> ServedMode | None:
    """The mode to go over to; None where the one that runs is asked for, or nothing can be done.

    From async to sync by way of bounded: its checkpoints bring all workers to one step, and nobody skips a batch.
    """
    return None if _fixed(state, state.rule) else following(state.mode, state.change.wish)


def _fixed(state: CoordinatorState, rule: str) -> str | None:
    """What goes with the mode that runs and with no other; None: nothing."""
    job, mode = state.job, state.mode.name
    if rule == "reduce":
        return "the workers' optimizer has no rule on the shards"
    if job.update_rule is not None:
        return f"training.updateRule {job.update_rule} goes with mode {mode}"
    if job.reduction != "mean":
        return f"training.sync.reduction {job.reduction} goes with mode {mode}"
    return None


def _take(state: CoordinatorState, mode: ServedMode) -> None:
    state.mode = mode
    state.snapshots.follow(mode.marks(), mode.ahead)


def following(runs: ServedMode, wish: ServedMode) -> ServedMode | None:
    """The mode that comes after `runs` on the way to `wish`; None: there is none, or no way."""
    if wish == runs or not {runs.name, wish.name} <= set(contract.GOES_ON):
        return None
    return wish if wish.name in contract.GOES_ON[runs.name] else Bounded(delay=wish.delay)
