"""Which pods are created and deleted, and what all pods of a run are made of until it ends (status.internal.pinned).

The pins are stored with the first intent and read from then on, whatever operator serves the run. With `checkpoint.resumeFrom` they keep
the run that this one continues from. A job's name is looked up once. What is in the way is waited for: under GitOps the other job may come
later. A suspended run may be placed anew, as in batch/v1 (KEP-2926), and its templates may change in nothing else. The API server
cannot compare a template that it does not know whole, so the operator holds a run whose pods would be other ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from psjob_operator.api.immutability import DESCRIBING, PLACEMENT
from psjob_operator.api.spec import JobSpec
from psjob_operator.api.status import Pinned
from psjob_operator.api.template import TRAINED, container_of
from psjob_operator.contract import CONFIG_FORMAT, CONFIG_FORMATS, WIRE, WIRES
from psjob_operator.plan import objects, placement
from psjob_operator.plan.actions import CreateProcess, DeleteProcess
from psjob_operator.plan.job_state import JobState, Seat, checkpoint_known
from psjob_operator.plan.observed_state import Process, Refusal, Role
from psjob_operator.plan.restarts import AT_ONCE, RestartDecision, spacing

CONFLICT = 409
FORCE = 0
"""For a pod whose kubelet is out of reach and cannot confirm: its number has been passed, and whatever lives on there is fenced by that."""
UNRESPONSIVE_GRACE = 1
"""As the liveness probe's: a process that does not answer does not save either."""
HUNG_GRACE = 1
"""From SIGTERM to SIGKILL: who has not ended by itself when it was asked to, as it hangs, will not do so now."""


LOOK_SECONDS = 5.0
"""Until the other job is looked up again."""


@dataclass(frozen=True)
class Creating:
    """What to create now, what waits, and until when."""

    actions: tuple[CreateProcess, ...]
    conflicts: tuple[str, ...]
    """Names held by something that is not this job's."""
    wake: float | None


def create_pods(state: JobState, decision: RestartDecision, pinned: Pinned) -> Creating:
    """Creates every seat that was just raised, or was granted before and is not there yet; shards first, in index order."""
    taken = {process.name for process in state.observed.processes}
    actions, conflicts, wakes = [], [], []
    known = checkpoint_known(state)
    numbers = {(seat.role, seat.index): decision.number(seat) for seat in decision.raised}
    moved = {(seat.role, seat.index) for seat in decision.raised if placement.colocated(state.observed) and seat.outcome.cause == "Moved"}
    for seat in state.seats:
        if not decision.is_raised(seat) and not seat.may_create:
            continue
        number = decision.number(seat)
        name = decision.name(state.observed.name, seat)
        if name in taken:
            conflicts.append(name)
            continue
        again = state.now if decision.is_raised(seat) or seat.refusal is None else seat.refusal.again_at
        if again > state.now:
            wakes.append(again)
            continue
        spaced = decision.is_raised(seat) and seat.outcome.kind == "lost" and not seat.outcome.counted and seat.outcome.cause not in AT_ONCE
        waited = round(spacing(state, seat)) if spaced else 0
        shard = seat.role == "shard"
        if shard and decision.moving:
            waited = placement.group_waited(state)
        if (seat.role, seat.index) in moved:
            waited = placement.pair_waited(state, seat.index)
        beside = placement.required_node(state, seat, numbers)
        group = (decision.volume_group or 0) if shard and placement.shares_volume(state.observed) else None
        pair = placement.pair_volume(state, seat, numbers)
        actions.append(
            CreateProcess(seat.role, seat.index, number, decision.term, name, shard and known, waited, group, pinned, beside, pair)
        )
    return Creating(tuple(actions), tuple(conflicts), min(wakes, default=None))


def pod_refusal(seat: Seat) -> Refusal | None:
    """The API server's refusal that keeps the seat empty."""
    return seat.refusal if seat.may_create else None


def left_over(state: JobState) -> tuple[DeleteProcess, ...]:
    """What cleanPodPolicy says: processes still running, all of them, or none."""
    policy = state.observed.spec.run_policy.clean_pod_policy
    if policy == "None":
        return ()
    return tuple(
        DeleteProcess(pod.name, pod.uid, FORCE if pod.node_lost else None, why="the job has ended")
        for pod in state.pods
        if (pod.deleting is None or pod.node_lost) and (policy == "All" or not pod.ended)
    )


def replaced(state: JobState, decision: RestartDecision) -> tuple[DeleteProcess, ...]:
    """Replaced processes that still run, and ended ones but for the newest of each seat (its log is what people ask for)."""
    numbers = {(seat.role, seat.index): decision.number(seat) for seat in state.seats}
    newest: dict[tuple[str, int], int] = {}
    old = [pod for pod in state.pods if (pod.deleting is None or pod.node_lost) and pod.number < numbers.get((pod.role, pod.index), 0)]
    for pod in old:
        if pod.ended:
            newest[pod.role, pod.index] = max(pod.number, newest.get((pod.role, pod.index), 0))
    return tuple(
        DeleteProcess(pod.name, pod.uid, _grace(state, pod), why="it was replaced")
        for pod in sorted((*old, *_out_of_sight(state, numbers)), key=lambda pod: (pod.role, pod.index, pod.number))
        if not pod.ended or pod.node_lost or pod.number < newest[pod.role, pod.index]
    )


def _out_of_sight(state: JobState, numbers: Mapping[tuple[Role, int], int]) -> tuple[Process, ...]:
    """Replaced pods that vanished without having been asked to end: perhaps they only lost our labels, and run on."""
    names = {pod.name for pod in state.pods}
    return tuple(
        pod
        for pod in state.known
        if pod.gone
        and pod.deleting is None
        and not pod.ended
        and pod.name not in names
        and pod.number < numbers.get((pod.role, pod.index), 0)
    )


def _grace(state: JobState, pod: Process) -> int | None:
    if pod.node_lost:
        return FORCE
    if pod.role == "worker" and state.hung.get(pod.index, (0, 0.0))[0] == pod.number:
        return HUNG_GRACE
    return UNRESPONSIVE_GRACE if pod.unresponsive else None


def pinned(state: JobState, afresh: bool) -> Pinned:
    """What every process and the config of this run are made of: what the status says, and of a run that begins this operator's.

    `afresh`: everything is started now. A resumed run then has no process of before, and is pinned anew, with keys of its own.
    """
    spec, stored, resumed = state.observed.spec, state.stored.internal.pinned or Pinned(), afresh and state.resuming
    kept = Pinned() if resumed else stored
    key = (stored.key or 0) + 1 if resumed else kept.key or 1
    if key == state.observed.key_taken and not state.observed.mounts(objects.key_secret_name(state.observed.name, state.observed.uid, key)):
        key += 1
    return Pinned(
        runtime_image=kept.runtime_image or (state.observed.runtime_image or None if spec.injection == "Auto" else None),
        config_format=kept.config_format or CONFIG_FORMAT,
        wire=kept.wire or WIRE,
        container=kept.container or (container_of(spec.workers.template, TRAINED) or {}).get("name"),
        encryption=kept.encryption or (None if kept.key else encryption(spec, state.observed.auto_encryption)),
        templates=stored.templates or templates_digest(spec),
        resumed_from=resumed_run(state),
        key=key,
    )


def templates_changed_message(state: JobState) -> str:
    """Why a run that was suspended does not continue; empty where its pods are what they were, wherever they are placed."""
    kept = state.stored.internal.pinned.templates if state.stored.internal.pinned is not None else None
    if state.first_seen or kept is None or kept == templates_digest(state.observed.spec):
        return ""
    return (
        "a pod template was changed while the job was suspended, in more than labels, annotations and placement."
        " Set spec.suspend to true, put it back and resume, or make a new job with resumeFrom"
    )


def encryption(spec: JobSpec, auto: str) -> str:
    """Which streams of a run that begins now are encrypted, one of contract.ENCRYPTION. `auto`: what auto means here."""
    return auto if spec.training.encryption == "auto" else spec.training.encryption


def unknown_version_message(state: JobState) -> str:
    """Why nothing of this run is made here: it was begun by a version that this operator does not know. Empty where it does."""
    if not state.first_seen and state.stored.shards and state.stored.internal.term is None:
        return (
            "this run was begun by a version whose status has no status.internal.term: what runs continues, nothing lost is replaced."
            " Make a new job with resumeFrom"
        )
    now = pinned(state, afresh=True)
    if now.config_format in CONFIG_FORMATS and now.wire in WIRES:
        return ""
    theirs, ours = _named((now.config_format or CONFIG_FORMAT,), (now.wire or WIRE,)), _named(CONFIG_FORMATS, WIRES)
    return (
        f"this run has {theirs}, this operator serves {ours}: what runs continues, nothing lost is replaced."
        " Install an operator of the version that began it, or suspend and resume the job"
    )


def _named(config_formats: tuple[int, ...], wires: tuple[int, ...]) -> str:
    return f"config format {' or '.join(map(str, config_formats))} and wire {' or '.join(map(str, wires))}"


def resumed_run(state: JobState) -> str | None:
    """The run from whose last checkpoint this one begins. None where it begins anew, and while that run is not known."""
    pinned, asked = state.stored.internal.pinned, state.observed.spec.checkpoint.resume_from
    if pinned is not None and pinned.resumed_from:
        return pinned.resumed_from
    if asked is None or asked.run:
        return None if asked is None else asked.run
    source = state.observed.resume_source
    return None if source is None or waits_for_source(state) else source.run


def waits_for_source(state: JobState) -> tuple[str, str] | None:
    """(reason, sentence) of what is in the way of a job that continues from another one by its name; None where nothing is."""
    observed, asked = state.observed, state.observed.spec.checkpoint.resume_from
    if asked is None or asked.job is None or (state.stored.internal.pinned is not None and state.stored.internal.pinned.resumed_from):
        return None
    source, said = observed.resume_source, f"spec.checkpoint.resumeFrom: job {asked.job}"
    if source is None:
        return "WaitingForJob", f"{said} is not there; this job begins when it is and has a checkpoint"
    if source.volume is None:
        return "CheckpointElsewhere", f"{said} keeps no checkpoints (spec.checkpoint.disabled); make this job anew without resumeFrom"
    mine = objects.volume(observed.name, observed.spec)
    if not _same_volume(mine, source.volume):
        remedy = f"make this job anew with volume: {_written_volume(source.volume)}"
        return (
            "CheckpointElsewhere",
            f"{said} keeps its checkpoints on {_named_volume(source.volume)}, this job on {_named_volume(mine)}; {remedy}",
        )
    if not source.run or not source.checkpoint:
        return "WaitingForJob", f"{said} has no checkpoint yet; this job begins when it has one"
    return None


def _same_volume(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    claims = [objects.claim_of(volume or {}) for volume in (one, other)]
    return claims[0] == claims[1] if all(claims) else one == other


def _named_volume(volume: Mapping[str, Any] | None) -> str:
    if claim := objects.claim_of(volume or {}):
        return f"claim {claim}"
    return f"a volume of kind {', '.join(volume or ()) or 'none'}"


def _written_volume(volume: Mapping[str, Any]) -> str:
    if claim := objects.claim_of(volume):
        return f"{{persistentVolumeClaim: {{claimName: {claim}}}}}"
    return f"{{{', '.join(volume)}: as there}}"


def templates_digest(spec: JobSpec) -> str:
    """Short name of what the templates make, wherever that is placed."""
    told = [
        _without_placement(spec.workers.template),
        _without_placement(spec.shards.template or {}),
        *(_without_placement(stage.template or {}) for stage in spec.stages or ()),
    ]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def _without_placement(template: Mapping[str, Any]) -> Mapping[str, Any]:
    parts = {"metadata": DESCRIBING, "spec": PLACEMENT}
    found = {}
    for name, value in template.items():
        part = {key: it for key, it in value.items() if key not in parts[name]} if name in parts and isinstance(value, Mapping) else value
        if part not in ({}, None):
            found[name] = part
    return found
