"""What psjob says about a job: `status` of a PSTrainingJob.

Read leniently (an operator may meet a status that a newer one wrote), written by `to_manifest()`.
Times are RFC 3339 text in UTC with whole seconds, as in metav1.Time.

How status holds times, sets of indexes and sentences, as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, ValidationError

from psjob_operator.api.base import Model, OpenEnum, without
from psjob_operator.contract import MOST_NUMBER
from psjob_operator.printable import printable

Phase = Literal["Pending", "Running", "Recovering", "Suspended", "Complete", "Failed"]
ShardState = Literal["Pending", "Starting", "Serving", "Lost", "Finished"]
Truth = Literal["True", "False", "Unknown"]
Number = Annotated[int, Field(ge=0, le=MOST_NUMBER)]
"""One of those that never go back; processes refuse a larger one."""
Count = Annotated[int, Field(ge=0, le=MOST_NUMBER)]
"""A number of processes, or of what befell them."""
LARGEST = 2**53 - 1
Amount = Annotated[int, Field(ge=0, le=LARGEST)]
"""Steps, bytes and generations: the whole numbers that every reader of JSON keeps exactly."""
MESSAGE_LIMIT = 256
READINGS = 32
"""Readings of a status that cannot be read whole, each without what the one before could not read."""


Terminal = Literal["Complete", "Failed"]
TERMINAL: tuple[Terminal, ...] = get_args(Terminal)
"""Conditions that end a job: one that is True stays so within its run."""


class StatusModel(Model):
    """As Model, but a field of a newer version is passed over and lists may be tuples."""

    model_config = ConfigDict(extra="ignore", strict=False)


class JobStatus(StatusModel):
    """What was seen, and what was done. Conditions that end a job, attempts, term and worker start never go back."""

    observed_generation: Amount | None = None
    """Generation of the spec that this status answers."""
    phase: Annotated[Phase, OpenEnum(get_args(Phase))] | None = None
    """One word for people. Programs read conditions."""
    conditions: tuple[Condition, ...] = ()
    """One entry a type: Ready, Reconciling, Stalled, Suspended, Complete, Failed, CheckpointReady. Of what is wrong with a job that trains
    on, absent until True once: Degraded, Diverged, WorkersDiffer, BuffersDiffer, DataNotSharded, NonFiniteGradients, LargePushes,
    LearningRateHigh, Contended."""
    run: str | None = None
    """Identity of this training run: the job's uid. Names the folder of its checkpoints."""
    internal: Internal = Field(default_factory=lambda: Internal())
    """What the operator keeps for itself. It may change with any version: no client may rely on it."""
    shards: tuple[ShardStatus, ...] = ()
    """One entry a shard; never shrinks."""
    roles: tuple[RoleStatus, ...] | None = None
    """Shards and workers, counted, one entry a role."""
    shards_ready: str | None = None
    """Shards that serve, of those declared, such as 2/2."""
    workers: WorkersStatus = Field(default_factory=lambda: WorkersStatus())
    """The workers, counted; only those with a problem are named."""
    replicas: Count | None = None
    """Workers whose pod is there and has not ended."""
    selector: str | None = None
    """Label selector of the workers' pods."""
    workers_ready: str | None = None
    """Workers that run or have succeeded, of those declared, such as 4/4."""
    stages: tuple[StageStatus, ...] | None = None
    """One entry a stage of spec.stages, in their order; absent without stages."""
    stages_ready: str | None = None
    """Stages whose workers all run or have succeeded, of those declared, such as 2/2; absent without stages."""
    checkpoint: CheckpointStatus | None = None
    """The last committed checkpoint."""
    progress: ProgressStatus | None = None
    """How far training is, as shard 0 last reported; at most once a minute."""
    interruption: Interruption | None = None
    """What has been started again and has not made a step yet; absent while training continues."""
    last_recovery: Recovery | None = None
    """The last interruption that is over."""
    restarts: Restarts = Field(default_factory=lambda: Restarts())
    """Starts beyond the first, and failures that count against the limit."""
    start_time: str | None = None
    """When the job began, or last resumed: runPolicy.activeDeadlineSeconds counts from here."""
    completion_time: str | None = None
    """When the job became Complete or Failed: runPolicy.ttlSecondsAfterFinished counts from here."""

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> JobStatus:
        """What of `raw` can be read; never an exception. A word of a newer operator is kept unchanged."""
        for _ in range(READINGS):
            try:
                return cls.model_validate(raw)
            except ValidationError as error:
                raw = without(raw, [problem["loc"] for problem in error.errors(include_url=False)])
        return cls()

    @property
    def ended(self) -> bool:
        """The job has ended, be it in a way that only a newer operator knows."""
        return self.completion_time is not None or self.end is not None

    @property
    def end(self) -> Terminal | None:
        """The condition that ended the job; None if it has not ended."""
        return next((kind for kind in TERMINAL if self.holds(kind)), None)

    @property
    def running(self) -> bool:
        """All processes were there when it was last looked at, and none was lost since."""
        return self.internal.ready_time is not None and self.internal.lost_time is None

    @property
    def suspended(self) -> bool:
        """As in batch/v1, a job that is suspended has no start time."""
        return self.start_time is None

    def holds(self, kind: str) -> bool:
        """The condition of this type is True."""
        return any(it.type == kind and it.status == "True" for it in self.conditions)

    def condition(self, kind: str) -> Condition | None:
        """The condition of this type; None where it is not told."""
        return next((condition for condition in self.conditions if condition.type == kind), None)


class Condition(StatusModel):
    """One aspect of the job (metav1.Condition)."""

    type: str
    """Name of the aspect."""
    status: Annotated[Truth, OpenEnum(get_args(Truth))]
    """Whether it holds."""
    reason: str
    """Why, as one CamelCase word for programs."""
    message: str = ""
    """Why, as a sentence for people."""
    last_transition_time: str
    """When `status` last changed."""
    observed_generation: Amount | None = None
    """Generation of the spec that this condition answers."""


class Internal(StatusModel):
    """What the operator keeps for itself."""

    term: Number | None = None
    """Number of the present set of attempts; rises with each start of a shard."""
    placed_term: Number | None = None
    """Term in which all shards last began together."""
    worker_start: Number = 0
    """Highest start number given to a worker of this job; never goes back."""
    pending_starts: str = ""
    """Workers whose pod of this start number was not seen yet, such as 3:0-2,7."""
    ready_time: str | None = None
    """When all processes first ran, since the job began or resumed."""
    lost_time: str | None = None
    """Since when some are missing."""
    pinned: Pinned | None = None
    """What this run began with: all its pods and its config are made of it until it ends."""


class Pinned(StatusModel):
    """What a run was begun with."""

    runtime_image: str | None = None
    """Image from which its pods copy the library. Absent with injection None, and locally."""
    config_format: Count | None = None
    """Format of what the operator and its processes exchange."""
    wire: Count | None = None
    """Version of the frames between its processes."""
    container: str | None = None
    """Container of spec.workers.template that is trained in."""
    encryption: str | None = None
    """Which streams are encrypted: none, auto (between two hosts), tls (all). Absent: none."""
    templates: str | None = None
    """Digest of its pod templates without labels, annotations and placement."""
    resumed_from: str | None = None
    """Run from whose last checkpoint it began. Absent: it began anew."""
    key: Number | None = None
    """Number of its keys, from 1. The name of its Secret ends in it. It rises when the job is resumed."""


class ShardStatus(StatusModel):
    """One shard."""

    index: Count
    """Number of the shard, from 0."""
    replica: Count = 0
    """0: each shard has one process."""
    attempt: Number
    """Number of its present start, from 1; never goes back."""
    state: Annotated[ShardState, OpenEnum(get_args(ShardState))] = "Pending"
    """Pending (no process yet), Starting (restoring), Serving, Lost, Finished."""
    pod: str | None = None
    """Its pod."""


class RoleStatus(StatusModel):
    """The processes of one role, in the words of JobSet's replicatedJobsStatus."""

    name: str
    """shard or worker."""
    desired: Count = 0
    """Processes declared."""
    active: Count = 0
    """Those whose pod is there and has not ended, ready or not."""
    ready: Count = 0
    """Those of the active that serve, or run."""
    succeeded: Count = 0
    """Those that ended with exit code 0."""
    failed: Count = 0
    """Those that ended otherwise, until they are started again."""


class WorkersStatus(StatusModel):
    """The workers, counted."""

    desired: Count = 0
    """Workers declared."""
    ready: Count = 0
    """Workers that run now."""
    succeeded_indexes: str = ""
    """Workers that ended with exit code 0, as 0-99,101."""
    failed_indexes: str = ""
    """Workers that ended otherwise and are not started again."""
    problems: tuple[WorkerProblem, ...] = ()
    """The first eight workers that do not run, and why."""


class WorkerProblem(StatusModel):
    """Why one worker does not run."""

    index: Count
    """Number of the worker (its rank), from 0."""
    pod: str | None = None
    """Its pod."""
    reason: str
    """One CamelCase word: Unschedulable, ImagePullBackOff, OOMKilled, Error."""
    message: str = ""
    """The words of the kubelet, the scheduler or the API server."""


class StageStatus(StatusModel):
    """One stage of a model. Its workers measure the numbers, and shard 0 reports them at most once a minute."""

    name: str
    """Name of the stage."""
    workers_ready: str = ""
    """Its workers that run or have succeeded, such as 2/2."""
    step: Amount | None = None
    """Lowest complete step of its workers."""
    staleness: float | None = None
    """Updates between the weights of a gradient and those to which it is applied; 0 where each step is a flush."""
    idle_fraction: float | None = None
    """Mean part of the last 32 steps' time, 0..1, that its workers waited for other stages or shards."""
    memory_bytes: Amount | None = None
    """Bytes of RAM of the worker of this stage that holds most."""
    peak_memory_bytes: Amount | None = None
    """The most bytes of RAM that one of its workers has held."""
    peak_device_bytes: Amount | None = None
    """The most bytes of tensors that one of its workers had on its CUDA device; absent without one."""
    waiting: str | None = None
    """What one of its workers waits for, from whom, and since when; absent while they continue. The first eight
    such stages say it."""


class CheckpointStatus(StatusModel):
    """The last committed checkpoint."""

    step: Amount
    """Step it was taken at."""
    time: str
    """When it was committed."""
    bytes: Amount | None = None
    """Size of its files together."""
    path: str | None = None
    """Its folder, relative to the volume."""
    observed_request: Amount | None = None
    """The newest spec.checkpoint.request that was read when this checkpoint began. If it equals the spec's, that one is answered."""


class ProgressStatus(StatusModel):
    """How far training is."""

    step: Amount
    """Lowest complete step of all workers."""
    mode: str | None = None
    """The mode in which it trains now."""
    loss: float | None = None
    """Last loss that the script reported; absent where it is not a number."""
    steps_per_second: float | None = None
    """Steps a second."""
    eta_seconds: float | None = None
    """Seconds until the last step, where the script reported how many there are."""
    codecs: str | None = None
    """Codecs between shard 0 and the workers, such as push int8, pull bf16; absent: none."""
    transport: str | None = None
    """How blocks and rows go between the workers and shard 0: shared, tcp, or mixed."""
    time: str | None = None
    """When this was read."""


class Interruption(StatusModel):
    """Training was interrupted, and no step was seen since."""

    since: str
    """When the operator saw the loss."""
    cause: str
    """Why the first of the lost processes was started again: one of restarts.causes."""
    step: Amount | None = None
    """Last known step of training."""
    attempt: Number = 0
    """Attempt of shard 0 at that time."""
    steps_lost: Amount = 0
    """Steps lost until then, as shard 0 counted them."""
    updates_lost: Amount = 0
    """Updates lost until then, as shard 0 counted them."""


class Recovery(StatusModel):
    """An interruption that is over."""

    cause: str
    """Why the first of the lost processes was started again."""
    duration_seconds: float
    """From when the operator saw the loss to the first step that all workers had passed after it."""
    steps_lost: Amount | None = None
    """Steps from the checkpoint to where training was. Absent in async and bounded."""
    updates_lost: Amount | None = None
    """Pushes that had been applied and are lost with a shard. Only in async and bounded."""
    time: str
    """When that first step was passed."""


class Restarts(StatusModel):
    """Starts beyond the first."""

    total: Count = 0
    """All of them."""
    causes: dict[str, Count] = Field(default_factory=dict)
    """How many by cause, such as OOMKilled: 2."""
    counted: Count = 0
    """Failures that count against runPolicy.backoffLimit; 0 after ten minutes of commits. Losses at one time are one."""
    counted_by_role: RoleCounts = Field(default_factory=lambda: RoleCounts())
    """The same by role, against runPolicy.backoffLimitPerRole."""
    steps_lost: Amount = 0
    """Steps done again in all recoveries together."""
    updates_lost: Amount = 0
    """Updates lost in all recoveries together."""
    last_counted: str | None = None
    """When a failure was last counted: the next start waits from here."""
    last_reset: str | None = None
    """When `counted` last went back to 0."""
    last_incident: Incident | None = None
    """The failure that was counted last, with all processes that it befell."""
    by_process: tuple[ProcessRestarts, ...] = ()
    """The eight processes that were started again most often, most first."""


class Incident(StatusModel):
    """Failures of several processes that count as one."""

    time: str
    """When the first of them ended."""
    role: str
    """Role of the first: shard or worker."""
    cause: str
    """Why the first was lost: one of `causes`."""
    exit_code: Count | None = None
    """Exit code of the first; absent where it has none."""
    nodes: tuple[str, ...] = ()
    """Where they ran; eight nodes at most."""
    workers: Count = 0
    """How many workers it befell."""
    shards: str = ""
    """Shards that it befell, such as 0-2,5."""
    start: Number = 0
    """Workers with this start number or a higher one were started after it."""


class RoleCounts(StatusModel):
    """A number of each role."""

    shard: Count = 0
    """Of shards."""
    worker: Count = 0
    """Of workers."""


class ProcessRestarts(StatusModel):
    """How often one process was started again."""

    role: str
    """shard or worker."""
    index: Count
    """Its number, from 0."""
    count: Count
    """How often, since it is in this list."""
    cause: str
    """Why, the last time."""
    node: str | None = None
    """If it ran, the last time."""
    time: str
    """When it was last started again."""


def with_phase(status: JobStatus) -> JobStatus:
    """The status with the one word that sums it up for people. It is made last, and nothing is decided by it."""
    phase: Phase
    if status.end is not None:
        phase = status.end
    elif status.suspended and not status.holds("Reconciling"):
        phase = "Suspended"
    elif status.internal.ready_time is None:
        phase = "Pending"
    else:
        phase = "Running" if status.running else "Recovering"
    return status.model_copy(update={"phase": phase})


def stamp(at: float) -> str:
    """Unix seconds as RFC 3339 in UTC with whole seconds; the fraction is cut off."""
    return datetime.fromtimestamp(int(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def stamp_exact(at: float) -> str:
    """As `stamp`, with milliseconds."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def unix(text: str | None) -> float | None:
    """Text as unix seconds; None where there is none, or where it is not such a time (then it is no fact)."""
    if not text:
        return None
    try:
        read = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()


def index_text(indexes: Iterable[int]) -> str:
    """A set of indexes as ranges in rising order, such as `0-2,5`; empty text for no index."""
    ranges: list[list[int]] = []
    for index in sorted(set(indexes)):
        if ranges and index == ranges[-1][1] + 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def index_set(text: str, below: int) -> frozenset[int]:
    """The indexes under `below` that the text names; parts that are not ranges name none (status can be edited by hand)."""
    found: set[int] = set()
    for part in text.split(","):
        low, _, high = part.strip().partition("-")
        if low.isdecimal() and (not high or high.isdecimal()):
            found.update(range(int(low), min(int(high or low), below - 1) + 1))
    return frozenset(index for index in found if index < below)


def starts_text(pending: Mapping[int, int]) -> str:
    """Which workers were given a start number and were not seen with it yet, as text: `3:0-2,7 4:5`.

    Without it a failure would count twice when the operator dies between raising the number and creating the pod. The next operator finds
    the failed pod of the start before, and the one number for all workers does not tell whose failure it answered.
    """
    groups: dict[int, list[int]] = {}
    for index, number in pending.items():
        groups.setdefault(number, []).append(index)
    return " ".join(f"{number}:{index_text(groups[number])}" for number in sorted(groups))


def starts_map(text: str, below: int, most: int) -> dict[int, int]:
    """Start number by index, of indexes under `below` and numbers up to `most`; what is neither says nothing."""
    found: dict[int, int] = {}
    for group in text.split():
        number, _, which = group.partition(":")
        if number.isdecimal() and 0 < int(number) <= most:
            for index in index_set(which, below):
                found[index] = max(int(number), found.get(index, 0))
    return found


def short(text: str, limit: int = MESSAGE_LIMIT) -> str:
    """The text on one line, cut in its middle to `limit` characters: the start names, the end holds the error."""
    line = printable(" ".join(text.split()))
    if len(line) <= limit:
        return line
    head = limit * 2 // 3
    return f"{line[:head]}…{line[-(limit - head - 1) :]}"


def condition_reason(text: str, otherwise: str = "Waiting") -> str:
    """The text as a condition's reason (one CamelCase word); `otherwise` where it is none."""
    return text[:64] if re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", text[:64]) else otherwise


def plural(number: int, noun: str) -> str:
    """`1 shard`, `2 shards`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def named_indexes(noun: str, which: Sequence[int]) -> str:
    """`shard 1`, `shards 0-2`; the list is cut after some ranges."""
    ranges = index_text(which).split(",")
    listed = ",".join(ranges[:6]) + (",…" if len(ranges) > 6 else "")
    return f"{noun}{'' if len(which) == 1 else 's'} {listed}"
