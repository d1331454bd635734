"""What stands around the processes of a job: the names of everything, the config file, Service, checkpoint claim and NetworkPolicies.

Names are deterministic: a name is the lock that keeps a thing from being made twice. The config (contract.CONFIG_FORMAT) says what every
process gets, the same for all of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from psjob_operator.api.spec import JobSpec, LocalMode, Stage, SyncMode
from psjob_operator.api.status import Pinned
from psjob_operator.contract import CONFIG_FORMAT, DATA_PORT, GRADIENT_MEBIBYTES, GROUP, LEAST_SHARE_MEBIBYTES, STATUS_PORT
from psjob_operator.plan.actions import CreateProcess, EnsureClaim, EnsureConfig, EnsureKey, EnsurePairClaim, EnsurePolicy, EnsureService
from psjob_operator.plan.observed_state import ObservedState, Role

Around = EnsureService | EnsureConfig | EnsureClaim | EnsurePolicy
CHECKPOINTS = "/psjob-checkpoints"
"""Where shards of a cluster see the checkpoint volume."""
CONNECT_SECONDS = 600.0


def process_name(job: str, role: Role, index: int, number: int) -> str:
    """Name of a pod: `<job>-shard-<i>-a<attempt>` or `<job>-worker-<i>-r<start>`."""
    return f"{job}-shard-{index}-a{number}" if role == "shard" else f"{job}-worker-{index}-r{number}"


def hostname(job: str, role: Role, index: int) -> str:
    """Hostname of a pod; the same for every start, so that peers find the present one under it."""
    return f"{job}-shard-{index}" if role == "shard" else f"{job}-worker-{index}"


def service_name(job: str) -> str:
    """The headless Service under which shards are found."""
    return f"{job}-shards"


def worker_selector(observed: ObservedState) -> str:
    """Label selector of the pods of this run's workers, as text: of the labels that render.objects gives them."""
    return f"{GROUP}/job-name={observed.name},{GROUP}/run={observed.uid},{GROUP}/role=worker"


def shard_address(job: str, index: int) -> str:
    """DNS name of a shard, as seen from a pod of the same namespace (the first entry of its search list completes it)."""
    return f"{hostname(job, 'shard', index)}.{service_name(job)}"


def key_secret_name(job: str, run: str, number: int) -> str:
    """The Secret that holds the run's keys; `number`: of the key, from 1. It names the run, so that no later job takes it for its own."""
    return f"{job}-key-{run[:8]}-{number}"


def policy_name(job: str, role: Role) -> str:
    """The NetworkPolicy of the job's shards, or of its workers."""
    return f"{job}-{role}s"


def config_name(job: str) -> str:
    """The ConfigMap that holds the config file."""
    return f"{job}-config"


def claim_name(job: str) -> str:
    """The checkpoint claim that is made where the spec names no volume."""
    return f"{job}-checkpoints"


def ensure(observed: ObservedState, pinned: Pinned) -> tuple[Around, ...]:
    """What is missing or differs; nothing while all stands. `pinned`: of the run."""
    actions: list[Around] = []
    config_format, encryption = pinned.config_format or CONFIG_FORMAT, pinned.encryption or "none"
    if not observed.objects.service:
        actions.append(EnsureService())
    if observed.objects.config_digest != config_digest(cluster_config(observed, config_format, encryption, pinned.resumed_from)):
        actions.append(EnsureConfig(config_format, encryption, pinned.resumed_from))
    if makes_claim(observed.spec) and observed.objects.claim is None:
        actions.append(EnsureClaim())
    actions += [EnsurePolicy(role) for role in observed.objects.unguarded]
    return tuple(actions)


def ensure_key(observed: ObservedState, pinned: Pinned) -> tuple[EnsureKey, ...]:
    """What pods about to be created need beside those: the Secret of the run's keys, unless this process knows it to be made."""
    if pinned.key is None or pinned.key == observed.key_made:
        return ()
    return (EnsureKey(pinned.key, pinned.encryption in ("auto", "tls")),)


def listening_workers(spec: JobSpec) -> int:
    """Workers that take streams of others, so that they need certificates: those of a model in stages."""
    return spec.workers.replicas if spec.stages else 0


def pair_claim_prefix(job: str, run: str) -> str:
    """With what the names of the run's pair claims begin; they name the run, so that no later job takes them for its own."""
    return f"{job}-pair-{run[:8]}-"


def pair_claim_name(job: str, run: str, index: int, number: int) -> str:
    """The claim of a volume that worker and shard of this index both mount; `number`: of CreateProcess.pair."""
    return f"{pair_claim_prefix(job, run)}{index}-{number}"


def ensure_pairs(observed: ObservedState, creating: Sequence[CreateProcess]) -> tuple[EnsurePairClaim, ...]:
    """The claims that pods about to be created mount and that are not there yet."""
    wanted = dict.fromkeys((it.index, it.pair) for it in creating if it.pair is not None)
    names = {key: pair_claim_name(observed.name, observed.uid, *key) for key in wanted}
    return tuple(EnsurePairClaim(*key) for key, name in names.items() if name not in observed.objects.pair_claims)


def makes_claim(spec: JobSpec) -> bool:
    """The job has a claim made for it: it keeps checkpoints and names no volume."""
    return spec.checkpoint.volume is None and not spec.checkpoint.disabled


def volume(name: str, spec: JobSpec) -> Mapping[str, Any] | None:
    """The pod volume source on which the checkpoints of the job of this name lie; None where it keeps none."""
    if spec.checkpoint.disabled:
        return None
    if spec.checkpoint.volume is not None:
        return spec.checkpoint.volume.source()
    return {"persistentVolumeClaim": {"claimName": claim_name(name)}}


def named_claim(spec: JobSpec) -> str:
    """The user's claim to which checkpoints go; empty where the job has its own or keeps none, or they go to another kind of volume."""
    if spec.checkpoint.volume is None or spec.checkpoint.disabled:
        return ""
    return claim_of(spec.checkpoint.volume.source())


def claim_of(source: Mapping[str, Any]) -> str:
    """The claim that a pod volume source names; empty if it is of another kind."""
    claim = source.get("persistentVolumeClaim")
    return str(claim.get("claimName") or "") if isinstance(claim, Mapping) else ""


def conflict(observed: ObservedState) -> str:
    """Why nothing may be created: a stranger holds a name that the job needs. Empty when none does."""
    if observed.objects.strangers:
        return f"{', '.join(sorted(observed.objects.strangers))} exists and is not this job's; delete it or rename the job"
    claim = observed.objects.claim
    if makes_claim(observed.spec) and claim is not None and not claim.ours:
        return (
            f"persistentvolumeclaim/{claim.name} exists without the label psjob.dev/job-name={observed.name};"
            f" set the label, name the claim in spec.checkpoint.volume, or rename the job"
        )
    return ""


def object_refusal(observed: ObservedState, pinned: Pinned) -> str:
    """The API server's words where it refuses one of these objects that pods wait for; empty where it does not."""
    wanted = {
        EnsureService: service_name(observed.name),
        EnsureConfig: config_name(observed.name),
        EnsureClaim: claim_name(observed.name),
    }
    names = {wanted[type(action)] for action in ensure(observed, pinned) if type(action) in wanted}
    names |= {key_secret_name(observed.name, observed.uid, action.number) for action in ensure_key(observed, pinned)}
    pairs = pair_claim_prefix(observed.name, observed.uid)
    return next((f"{it.name}: {it.message}" for it in observed.refusals if it.name in names or it.name.startswith(pairs)), "")


def unbound(observed: ObservedState) -> str:
    """The claim's own words while it cannot bind; empty when it is bound, or just waits for its first pod."""
    claim = observed.objects.claim
    if not makes_claim(observed.spec) or claim is None or claim.bound or claim.deleting:
        return ""
    return f"claim {claim.name}: {claim.message}" if claim.message else ""


def leaving(observed: ObservedState) -> tuple[str, str] | None:
    """(reason, sentence) where the claim with the checkpoints is being deleted, or is not there; None where it stays."""
    claim, own = observed.objects.claim, makes_claim(observed.spec)
    name = claim_name(observed.name) if own else named_claim(observed.spec)
    if observed.objects.named == "missing":
        return "ClaimMissing", f"claim {name} is not there; make it, or make the job anew with another in spec.checkpoint.volume"
    if (own and claim is not None and claim.deleting) or observed.objects.named == "going":
        words = "it goes with all checkpoints when no pod uses it; copy them before the job is suspended or ends"
        return "ClaimTerminating", f"claim {name} is being deleted: {words}"
    return None


class ConfigSource(Protocol):
    """What the config and the rendered objects need to know of a job; an ObservedState is one."""

    @property
    def name(self) -> str:
        """metadata.name."""

    @property
    def namespace(self) -> str:
        """metadata.namespace."""

    @property
    def uid(self) -> str:
        """metadata.uid, which is the run."""

    @property
    def spec(self) -> JobSpec:
        """The spec."""


def job_config(
    job: ConfigSource,
    shards: Sequence[tuple[str, int, int]],
    checkpoints: str = CHECKPOINTS,
    config_format: int = CONFIG_FORMAT,
    encryption: str = "auto",
    resumed_from: str | None = None,
) -> dict[str, Any]:
    """The config of `job`; `shards` are (host, port, status port) in index order, `checkpoints` the folder as shards see it.
    `encryption` and `resumed_from`: of status.internal.pinned.

    Raises KeyError for a format that this version does not write (contract.CONFIG_FORMATS).
    """
    return {"format": config_format, **WRITERS[config_format](job, shards, checkpoints, resumed_from), "encryption": encryption}


def _format_1(job: ConfigSource, shards: Sequence[tuple[str, int, int]], checkpoints: str, resumed_from: str | None) -> dict[str, Any]:
    """What runs of this format read. Another value where a job says nothing, or a key that goes, is another format."""
    spec = job.spec
    checkpoint, sync = spec.checkpoint, spec.training.sync or SyncMode()
    own = getattr(spec.training, spec.training.mode, None)  # the block of the job's mode; validation refuses those of others
    return {
        "job": job.name,
        "run": job.uid,
        "specHash": spec_hash(spec),
        "mode": spec.training.mode,
        "backupWorkers": sync.backup_workers,
        "staleness": getattr(own, "staleness", None),
        "splits": getattr(own, "splits", None),
        "local": (spec.training.local or LocalMode()).to_manifest() if spec.training.mode == "local" else None,
        "seed": spec.training.seed,
        "updateAt": "server" if spec.training.update_at == "shard" else spec.training.update_at,
        "updateRule": spec.training.update_rule,
        "ruleOptions": spec.training.rule_options or {},
        "reduction": sync.reduction,
        "lrScaling": spec.training.lr_scaling,
        "warmupSteps": spec.training.warmup_steps,
        "maxGradNorm": sync.max_grad_norm,
        "maxPushNorm": spec.training.max_push_norm,
        "nonFinite": spec.training.non_finite,
        "transport": spec.training.transport,
        "streams": _streams(spec),
        "gradientBytes": gradient_mebibytes(spec) << 20,
        "compression": spec.training.compression.to_manifest(),
        "workers": spec.workers.replicas,
        "shards": [{"host": host, "port": port, "statusPort": status} for host, port, status in shards],
        "checkpoint": {
            "intervalSeconds": float(checkpoint.period_seconds),
            "everySteps": checkpoint.every_steps,
            "keep": checkpoint.keep,
            "request": checkpoint.request,
            "disabled": bool(checkpoint.disabled),
            "resumeFrom": {"path": f"{checkpoints.rstrip('/')}/{resumed_from}"} if resumed_from else None,
        },
        "successPolicy": spec.run_policy.success_policy,
        "shardTimeoutSeconds": float(spec.shards.progress_deadline_seconds),
        "stepTimeoutSeconds": None if spec.workers.progress_deadline_seconds is None else float(spec.workers.progress_deadline_seconds),
        "connectSeconds": CONNECT_SECONDS,
        **_chosen(spec),
        **_delayed(spec),
        **_several(spec),
        **_summed(spec),
        **_staged(spec),
    }


def _streams(spec: JobSpec) -> int:
    """As a library reads it that knows no others than those that are named."""
    return spec.training.streams if isinstance(spec.training.streams, int) else 1


def _chosen(spec: JobSpec) -> dict[str, Any]:
    """As `_staged`, of a job that names its streams."""
    return {} if isinstance(spec.training.streams, int) else {"autoStreams": True}


def _delayed(spec: JobSpec) -> dict[str, Any]:
    """As `_staged`, of a job without a delay."""
    return {"delay": spec.training.delay} if spec.training.delay else {}


def _several(spec: JobSpec) -> dict[str, Any]:
    """As `_staged`, of a job whose workers have one process."""
    return {"processes": spec.processes()} if spec.processes() > 1 else {}


def _summed(spec: JobSpec) -> dict[str, Any]:
    """The same. It decides no bit, so a run may continue with another one."""
    return {"localSum": spec.workers.local_sum} if spec.processes() > 1 and spec.workers.local_sum != "auto" else {}


def _staged(spec: JobSpec) -> dict[str, Any]:
    """Keys that a job without stages does not have: the text of its config stays as runs know it that began before there were any."""
    if not spec.stages:
        return {}
    pipeline = spec.training.pipeline
    return {"stages": [_stage(stage) for stage in spec.stages], "pipeline": None if pipeline is None else pipeline.to_manifest()}


def _stage(stage: Stage) -> dict[str, Any]:
    return {"name": stage.name, "replicas": stage.replicas, "cut": stage.cut}


WRITERS: Mapping[int, Callable[[ConfigSource, Sequence[tuple[str, int, int]], str, str | None], dict[str, Any]]] = {1: _format_1}
"""By format: the config without its number."""


def gradient_mebibytes(spec: JobSpec) -> int:
    """MiB of gradients that a shard may hold of all workers together."""
    given = spec.training.gradient_mebibytes
    return max(GRADIENT_MEBIBYTES, LEAST_SHARE_MEBIBYTES * spec.workers.replicas) if given is None else given


def cluster_config(
    job: ConfigSource, config_format: int = CONFIG_FORMAT, encryption: str = "auto", resumed_from: str | None = None
) -> dict[str, Any]:
    """The config of `job` on a cluster, where shards are found by name."""
    shards = [(shard_address(job.name, index), DATA_PORT, STATUS_PORT) for index in range(job.spec.shards.replicas)]
    return job_config(job, shards, config_format=config_format, encryption=encryption, resumed_from=resumed_from)


def config_text(config: dict[str, Any]) -> str:
    """The file's text; the same for equal configs."""
    return json.dumps(config, indent=1, sort_keys=True) + "\n"


def config_digest(config: dict[str, Any]) -> str:
    """Short name of the config's content, fit for a label."""
    return text_digest(config_text(config))


def text_digest(text: str) -> str:
    """The same of the file's text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def spec_hash(spec: JobSpec) -> str:
    """sha256 of what decides which updates are made: training, the number of workers and the stages. Shards may differ between runs."""
    training = {name: value for name, value in spec.training.to_manifest().items() if name not in ("encryption", "delay")}
    training |= {"streams": _streams(spec), **_delayed(spec)}
    relevant: dict[str, Any] = {"training": training, "workers": spec.workers.replicas}
    relevant |= _several(spec)
    if spec.stages:
        relevant["stages"] = [_stage(stage) for stage in spec.stages]
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()
