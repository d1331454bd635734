"""The objects that stand around the processes: Service, config, checkpoint claim and NetworkPolicies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psjob_operator.api.spec import JobSpec
from psjob_operator.api.status import Pinned
from psjob_operator.contract import CONFIG_FORMAT
from psjob_operator.plan import naming
from psjob_operator.plan.actions import EnsureClaim, EnsureConfig, EnsureKey, EnsurePolicy, EnsureService
from psjob_operator.plan.config import cluster_config, digest
from psjob_operator.plan.snapshot import Snapshot

Around = EnsureService | EnsureConfig | EnsureClaim | EnsurePolicy


def ensure(snapshot: Snapshot, pinned: Pinned) -> tuple[Around, ...]:
    """What is missing or differs; nothing while all stands. `pinned`: of the run."""
    actions: list[Around] = []
    config_format, encryption = pinned.config_format or CONFIG_FORMAT, pinned.encryption or "none"
    if not snapshot.objects.service:
        actions.append(EnsureService())
    if snapshot.objects.config_digest != digest(cluster_config(snapshot, config_format, encryption, pinned.resumed_from)):
        actions.append(EnsureConfig(config_format, encryption, pinned.resumed_from))
    if makes_claim(snapshot.spec) and snapshot.objects.claim is None:
        actions.append(EnsureClaim())
    actions += [EnsurePolicy(role) for role in snapshot.objects.unguarded]
    return tuple(actions)


def ensure_key(snapshot: Snapshot, pinned: Pinned) -> tuple[EnsureKey, ...]:
    """What pods about to be created need beside those: the Secret of the run's keys, unless this process knows it to be made."""
    if pinned.key is None or pinned.key == snapshot.key_made:
        return ()
    return (EnsureKey(pinned.key, pinned.encryption in ("auto", "tls")),)


def listening_workers(spec: JobSpec) -> int:
    """Workers that take streams of others, so that they need certificates: those of a model in stages."""
    return spec.workers.replicas if spec.stages else 0


def makes_claim(spec: JobSpec) -> bool:
    """The job has a claim made for it: it keeps checkpoints and names no volume."""
    return spec.checkpoint.volume is None and not spec.checkpoint.disabled


def volume(name: str, spec: JobSpec) -> Mapping[str, Any] | None:
    """The pod volume source on which the checkpoints of the job of this name lie; None where it keeps none."""
    if spec.checkpoint.disabled:
        return None
    if spec.checkpoint.volume is not None:
        return spec.checkpoint.volume.source()
    return {"persistentVolumeClaim": {"claimName": naming.claim(name)}}


def named_claim(spec: JobSpec) -> str:
    """The user's claim to which checkpoints go; empty where the job has its own or keeps none, or they go to another kind of volume."""
    if spec.checkpoint.volume is None or spec.checkpoint.disabled:
        return ""
    return claim_of(spec.checkpoint.volume.source())


def claim_of(source: Mapping[str, Any]) -> str:
    """The claim that a pod volume source names; empty if it is of another kind."""
    claim = source.get("persistentVolumeClaim")
    return str(claim.get("claimName") or "") if isinstance(claim, Mapping) else ""


def conflict(snapshot: Snapshot) -> str:
    """Why nothing may be created: a stranger holds a name that the job needs. Empty when none does."""
    if snapshot.objects.strangers:
        return f"{', '.join(sorted(snapshot.objects.strangers))} exists and is not this job's; delete it or rename the job"
    claim = snapshot.objects.claim
    if makes_claim(snapshot.spec) and claim is not None and not claim.ours:
        return (
            f"persistentvolumeclaim/{claim.name} exists without the label psjob.dev/job-name={snapshot.name};"
            f" set the label, name the claim in spec.checkpoint.volume, or rename the job"
        )
    return ""


def refused(snapshot: Snapshot, pinned: Pinned) -> str:
    """The API server's words where it refuses one of these objects that pods wait for; empty where it does not."""
    wanted = {
        EnsureService: naming.service(snapshot.name),
        EnsureConfig: naming.config(snapshot.name),
        EnsureClaim: naming.claim(snapshot.name),
    }
    names = {wanted[type(action)] for action in ensure(snapshot, pinned) if type(action) in wanted}
    names |= {naming.key(snapshot.name, snapshot.uid, action.number) for action in ensure_key(snapshot, pinned)}
    return next((f"{it.name}: {it.message}" for it in snapshot.refusals if it.name in names), "")


def unbound(snapshot: Snapshot) -> str:
    """The claim's own words while it cannot bind; empty when it is bound, or just waits for its first pod."""
    claim = snapshot.objects.claim
    if not makes_claim(snapshot.spec) or claim is None or claim.bound or claim.deleting:
        return ""
    return f"claim {claim.name}: {claim.message}" if claim.message else ""


def leaving(snapshot: Snapshot) -> tuple[str, str] | None:
    """(reason, sentence) where the claim with the checkpoints is being deleted, or is not there; None where it stays."""
    claim, own = snapshot.objects.claim, makes_claim(snapshot.spec)
    name = naming.claim(snapshot.name) if own else named_claim(snapshot.spec)
    if snapshot.objects.named == "missing":
        return "ClaimMissing", f"claim {name} is not there; make it, or make the job anew with another in spec.checkpoint.volume"
    if (own and claim is not None and claim.deleting) or snapshot.objects.named == "going":
        words = "it goes with all checkpoints when no pod uses it; copy them before the job is suspended or ends"
        return "ClaimTerminating", f"claim {name} is being deleted: {words}"
    return None
