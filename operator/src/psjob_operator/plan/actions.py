"""What `plan()` answers: the status to store and the acts to do, in order. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from psjob_operator.api.status import JobStatus, Pinned
from psjob_operator.contract import CONFIG_FORMAT
from psjob_operator.plan.observed_state import Role


@dataclass(frozen=True)
class EnsureService:
    """The headless Service (server-side apply)."""


@dataclass(frozen=True)
class EnsureConfig:
    """The ConfigMap with the config file (server-side apply)."""

    format: int = CONFIG_FORMAT
    encryption: str = "auto"
    resumed_from: str | None = None
    """All of status.internal.pinned."""


@dataclass(frozen=True)
class EnsureClaim:
    """The default checkpoint claim (server-side apply; never over a stranger's)."""


@dataclass(frozen=True)
class EnsurePairClaim:
    """The claim of the volume that a worker and its shard both mount. Create once, by POST; never over a stranger's."""

    index: int
    number: int
    """Of CreateProcess.pair."""


@dataclass(frozen=True)
class EnsurePolicy:
    """The NetworkPolicy of the shards or of the workers (server-side apply). Where it is refused pods are made without it."""

    role: Role


@dataclass(frozen=True)
class EnsureKey:
    """The Secret with the run's keys. Create once, by POST, before the first pod: it is never read and never changed."""

    number: int
    """Of status.internal.pinned."""
    certificates: bool = True
    """With a certificate for each process that listens."""


@dataclass(frozen=True)
class Beside:
    """The process whose node a pod requires."""

    role: Role
    index: int
    number: int


@dataclass(frozen=True)
class CreateProcess:
    """Create once, by POST; the name is unique in (role, index, number)."""

    role: Role
    index: int
    number: int
    term: int
    """Shards: the term it starts in. Workers: informative."""
    name: str
    checkpoint_known: bool = False
    """Shards: status.checkpoint.step > 0, so a manifest must be found (contract.ENV_MIN_STEP)."""
    waited: int = 0
    """Seconds since the start before, where that was lost by no fault of its own; the next wait is longer."""
    volume_group: int | None = None
    """Shards: the number that those who share a volume have in common, 0 in a run that has none yet; None where they share none."""
    pinned: Pinned = field(default_factory=Pinned)
    """Of the run."""
    beside: Beside | None = None
    """Of shards and workers that go in pairs: the other, where it stands or starts. None: any node."""
    pair: int | None = None
    """With spec.shards.pairStorageClassName: the number of the volume that it mounts with the other of its pair. None: it mounts none."""


@dataclass(frozen=True)
class DeleteProcess:
    """Delete, with its uid as precondition."""

    name: str
    uid: str
    """Precondition."""
    grace_seconds: int | None = None
    """None: the pod's own; 0: force (only for a lost node)."""
    why: str = ""


@dataclass(frozen=True)
class DeleteJob:
    """ttlSecondsAfterFinished has passed."""


Action = EnsureService | EnsureConfig | EnsureClaim | EnsurePairClaim | EnsurePolicy | EnsureKey | CreateProcess | DeleteProcess | DeleteJob


@dataclass(frozen=True)
class Event:
    """A Kubernetes Event (locally: a line of the display), written only after the status that tells it."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True)
class Plan:
    """One answer of `plan()`."""

    status: JobStatus
    """The whole status as it should stand."""
    intent: bool
    """True: `status` must be stored (compare-and-swap on resourceVersion) before any action is done; the store
    grants this process the names in `grants`."""
    grants: frozenset[str] = frozenset()
    """Names of the processes whose number `status` raises, or first writes."""
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    wake_at: float | None = None
    """Exact unix time at which to plan again though nothing happened; None: only on a wake."""
    needs_live: bool = False
    """The decision rests on an absence in an observed state that was not live: read live and plan again; do nothing else."""
    want_progress: bool = False
    """Pull progress from shard 0 (at most once a minute on the cluster)."""
