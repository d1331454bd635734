"""What is known about one job at one moment: the input of `plan()`. Pure data, no I/O.

Both backends fill it: `cluster/` from the API server, `local/` from processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from psjob_operator.api.spec import JobSpec
from psjob_operator.api.status import JobStatus

Role = Literal["shard", "worker"]
Phase = Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]
SLOW_START_SECONDS = 60.0
"""A process that is scheduled but has not started for so long is slow: its Events are read, and shown."""
REFUSED_FIRST, REFUSED_MOST = 3.0, 10.0
"""Seconds until what the API server refused is tried again: after the first refusal, and at most. One create asks for all of a job."""


@dataclass(frozen=True)
class Exit:
    """How the trained container (or the process) ended."""

    code: int
    signal: int = 0
    reason: str = ""
    """Kubelet's word: Completed, Error, OOMKilled, ContainerCannotRun…; locally Error or Signal."""
    message: str = ""
    """Termination message, at most 2,048 bytes."""
    log_tail: str = ""
    at: float | None = None
    """Unix time of the end; None where it is not known."""


@dataclass(frozen=True)
class Process:
    """One pod, or one local process, of this job (any run, any attempt)."""

    name: str
    uid: str
    role: Role
    index: int
    number: int
    """Attempt of a shard, start of a worker."""
    run: str
    """Run it was made for (ownerReference uid); may differ from the job's uid for a leftover."""
    phase: Phase
    created: float
    ready: bool = False
    started: float | None = None
    """Unix time at which the trained container started; None before."""
    scheduled: float | None = None
    deleting: float | None = None
    """Unix time of deletionTimestamp; None while not deleting."""
    node: str = ""
    node_lost: bool = False
    """Its node is gone or out of reach, and nothing speaks for the process: what is left of it is fenced by the next number."""
    gone: bool = False
    """The pod has been removed; this is how it last was."""
    exit: Exit | None = None
    lingering: bool = False
    """The trained container has ended (`phase` says how) but the pod still runs: a sidecar lives on."""
    pod_reason: str = ""
    """status.reason / DisruptionTarget reason: Evicted, Preempting, NodeShutdown, Terminated, OutOfcpu, PreemptionByScheduler…"""
    pod_message: str = ""
    conditions: tuple[tuple[str, str], ...] = ()
    """(type, status) of the pod's conditions, but for those that every pod has."""
    waiting_reason: str = ""
    """Kubelet's waiting reason of an init or main container: ImagePullBackOff, CreateContainerConfigError…"""
    waiting_message: str = ""
    init_exit: Exit | None = None
    unschedulable: str = ""
    """The scheduler's own words while PodScheduled=False."""
    events: tuple[str, ...] = ()
    """Words of this pod's warning Events, newest first, when its start is slow."""
    sidecar_crash: str = ""
    """Name and reason of a sidecar in CrashLoopBackOff."""
    waited: int = 0
    """Of CreateProcess: the seconds that this start was held back, or that its volume group is given."""
    pair: int | None = None
    """Of CreateProcess."""
    keys: str = ""
    """Name of the Secret of run keys that its pod mounts; empty locally."""
    finalizers: tuple[str, ...] = ()
    """Who must agree before the pod goes."""
    unresponsive: bool = False
    """Local backend: no answer or heartbeat on its status port for progressDeadlineSeconds; the cluster's liveness probe kills instead."""

    @property
    def ended(self) -> bool:
        """Nothing of it runs any more, whether or not the pod is still there."""
        return self.phase in ("Succeeded", "Failed") and not self.lingering

    @property
    def slow_at(self) -> float | None:
        """When it will have been scheduled for SLOW_START_SECONDS without starting; None where it has started, ended or goes."""
        if self.scheduled is None or self.started is not None or self.phase != "Pending" or self.deleting is not None:
            return None
        return self.scheduled + SLOW_START_SECONDS


@dataclass(frozen=True)
class Claim:
    """The checkpoint claim as the API server has it."""

    name: str
    ours: bool
    """Carries this job's label (DESIGN §4: an existing claim is used only with our label)."""
    bound: bool
    deleting: bool = False
    message: str = ""
    """Words of its own Events while it cannot bind."""


@dataclass(frozen=True)
class Objects:
    """Children that are not processes. `None` claim: absent. Digests let apply be skipped when nothing differs."""

    service: bool = False
    config_digest: str = ""
    """Value of the digest label on the live ConfigMap, empty when absent."""
    claim: Claim | None = None
    pair_claims: tuple[str, ...] = ()
    """Names of the claims of this run's pairs that are there and stay."""
    modes: tuple[str, ...] | None = None
    """Access modes of the claim that the job names as its own; None where it names none, or the claim cannot be read (yet)."""
    named: Literal["", "going", "missing"] = ""
    """Of the claim that the job names as its own: it is being deleted, or not there. Empty where neither is known."""
    unguarded: tuple[Role, ...] = ()
    """Roles whose NetworkPolicy is to be made, or made whole again; none where this operator makes no policies."""
    strangers: tuple[str, ...] = ()
    """`kind/name` of live objects with a child's name that are not ours: NameConflict."""


@dataclass(frozen=True)
class ResumeSource:
    """The job that `checkpoint.resumeFrom` names, as the API server has it."""

    run: str
    """Its run; empty where it has none yet."""
    checkpoint: bool
    """That run has committed one."""
    volume: Mapping[str, Any] | None
    """Pod volume source on which its checkpoints lie; None where it keeps none."""


@dataclass(frozen=True)
class Refusal:
    """A create that the API server refused, remembered by the process that tried."""

    name: str
    code: int
    """403 quota or pod security; any code a policy or webhook chose; 409 a stranger's or a terminating object holds the name."""
    message: str
    at: float
    tries: int
    invalid: bool = False
    """The API server's own validation refused the object: trying again cannot help."""

    @property
    def again_at(self) -> float:
        """Unix time of the next try: after 3 s, doubling up to 10 s."""
        return self.at + min(REFUSED_FIRST * 2.0 ** min(max(self.tries, 1) - 1, 10), REFUSED_MOST)


@dataclass(frozen=True)
class ObservedState:
    """One job at one moment."""

    name: str
    namespace: str
    uid: str
    generation: int
    resource_version: str
    created: float
    spec: JobSpec
    status: JobStatus | None
    """As stored; None when never written by an operator (only the schema's default)."""
    deleting: bool = False
    spec_problems: tuple[str, ...] = ()
    """Sentences of `api.validate` that the API server could not say."""
    processes: tuple[Process, ...] = ()
    objects: Objects = field(default_factory=Objects)
    progress: Mapping[str, Any] | None = None
    """Last JSON pulled from shard 0's status port (contract.STATUS_KEYS), None when out of reach."""
    progress_at: float | None = None
    contended: str = ""
    """Which objects another operator keeps changing; empty for none."""
    progress_problem: str = ""
    """Why nothing is believed that shard 0's status port says; empty where that is not so."""
    gone: tuple[Process, ...] = ()
    """The newest process of each seat whose pod was seen to be removed: its absence needs no proof, and its end is known."""
    farewell: Process | None = None
    """The last shard 0 that had ended when its pod was removed: its last words are newer than what was pulled from it."""
    granted: frozenset[str] = frozenset()
    """Names of pods whose number *this process* raised and that it may still create."""
    refusals: tuple[Refusal, ...] = ()
    resume_source: ResumeSource | None = None
    """The job that the spec names to continue from; None where it names none, or there is none, and once its run is pinned."""
    key_made: int | None = None
    """Number of the run's keys whose Secret *this process* knows to be made; None: it knows of none."""
    key_taken: int | None = None
    """Number of keys whose Secret was there before the run had a pod: others may know them. None: of none is that known."""
    live: bool = False
    """True when `processes` come from a live read made for this state: only then may absence be believed."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the job object (only for Kueue keys later; never copied)."""
    runtime_image: str = ""
    """What this operator gives the pods of a run that it begins; empty locally."""
    auto_encryption: str = "auto"
    """What `training.encryption: auto` means for a run that begins now: auto, or none on one host and where a mesh encrypts."""
    one_machine: bool = False
    """The times at which `processes` ended are of the machine that plans, as on a laptop."""
    written_at: float | None = None
    """Unix time at which this process of the operator last stored the job's status; None: never, or not known. Counters and words of
    `status` are written at most every 10 s and every 60 s after it; None writes them at once (right for a laptop)."""

    def mounts(self, secret: str) -> bool:
        """Does a pod of this run mount this Secret of run keys? Then the operator had made it. Labels tell nothing: anyone writes them."""
        return any(process.run == self.uid and process.keys == secret for process in self.processes)
