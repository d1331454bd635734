"""What a user asks for: PSTrainingJob, the whole object, and its `spec`.

Ranges and rules across fields are in rules.py, for the API server and `psjob run` alike; here are names, types and defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from psjob_operator.api.base import Model, NumberOrWord
from psjob_operator.api.status import JobStatus
from psjob_operator.api.template import processes_of
from psjob_operator.contract import MODES, UPDATE_RULES


class PSTrainingJob(Model):
    """Trains a PyTorch model with a parameter server."""

    api_version: Literal["psjob.dev/v1alpha1"] = "psjob.dev/v1alpha1"
    kind: Literal["PSTrainingJob"] = "PSTrainingJob"
    metadata: Metadata
    spec: JobSpec
    """What to train."""
    status: JobStatus | None = None
    """What psjob says about it. Written only by the operator."""


class Metadata(Model):
    """The part of ObjectMeta that psjob reads; the rest is carried along unseen."""

    model_config = ConfigDict(extra="allow", strict=False)

    name: str
    namespace: str | None = None
    uid: str | None = None
    generation: int | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, Any] = Field(default_factory=dict)


class JobSpec(Model):
    """What to train, on how many processes, and what to keep of it.

    Only `suspend`, `checkpoint.request`, `training.mode` with `training.bounded`, and some of `runPolicy` may change.
    """

    training: Training = Field(default_factory=lambda: Training())
    """How pushes become updates. The optimizer itself is the script's."""
    shards: ShardSet
    """The shards: processes that hold the parameters and apply pushes to them."""
    workers: Workers
    """The processes that run the training script."""
    stages: list[Stage] | None = None
    """The parts of a model that is cut in stages, in the order in which they run; 2..64, at most 256 workers. Ranks are counted through
    them: with 2, 1 and 1 replicas, ranks 0 and 1 have the first stage."""
    checkpoint: Checkpoint = Field(default_factory=lambda: Checkpoint())
    """What is kept on disk, how often, and where."""
    run_policy: RunPolicy = Field(default_factory=lambda: RunPolicy())
    """When the job counts as done or failed, and what is cleaned up then."""
    suspend: bool | None = None
    """true: take a last checkpoint and end all pods. false or absent: run. May change at any time; a queue may own it."""
    managed_by: str | None = None
    """The controller that runs this job, such as example.com/scheduler. Absent or psjob.dev/operator: this operator. Another value: this
    operator leaves the job alone."""
    injection: Literal["Auto", "None"] = "Auto"
    """Auto: put the psjob library into the worker's image when the pod starts. None: the image has it installed."""

    @model_validator(mode="before")
    @classmethod
    def _count_workers(cls, data: Any) -> Any:
        return with_replicas(data)

    def stage_of(self, rank: int) -> Stage | None:
        """The stage that a worker has; None without stages, and for a rank of none."""
        for stage in self.stages or ():
            if 0 <= rank < stage.replicas:
                return stage
            rank -= stage.replicas
        return None

    def worker_template(self, rank: int) -> dict[str, Any]:
        """The pod template of a worker: its stage's own, or that of all workers."""
        stage = self.stage_of(rank)
        return self.workers.template if stage is None or stage.template is None else stage.template

    def processes(self) -> int:
        """Processes of each worker."""
        return processes_of(self.workers.processes, self.workers.template)

    def worker_templates(self) -> dict[str, dict[str, Any]]:
        """By path, each pod template that some worker is made of, in the order of ranks."""
        found: dict[str, dict[str, Any]] = {}
        for number, stage in enumerate(self.stages or ()):
            if stage.template is not None:
                found[f"spec.stages[{number}].template"] = stage.template
            else:
                found.setdefault("spec.workers.template", self.workers.template)
        return found or {"spec.workers.template": self.workers.template}


if TYPE_CHECKING:
    Mode = str
    UpdateRule = str
else:  # The words of the contract, which mypy cannot read as literals.
    Mode = Literal[tuple(MODES)]
    UpdateRule = Literal[tuple(UPDATE_RULES)]


class Training(Model):
    """How pushes become updates."""

    mode: Mode = "sync"
    """sync: each step sums one push of every worker. bounded: no worker is more than `staleness` steps ahead. softsync: each update takes
    replicas / `splits` pushes. async: each push counts when it comes. threshold: as async, but pushes older than `staleness` updates are
    dropped. local: workers step by themselves, and exchange after `local.innerSteps` steps."""
    sync: SyncMode | None = None
    bounded: BoundedMode | None = None
    softsync: SoftsyncMode | None = None
    threshold: ThresholdMode | None = None
    local: LocalMode | None = None
    delay: int = 0
    """Pushes of a worker that may be under way while it computes on the weights that it has; 0..8, in sync 0 or 1. They count toward
    `bounded.staleness`. 0: it waits for each."""
    seed: int = 0
    """Seed of the data's order and the workers' random numbers; 0..2147483647."""
    update_at: Literal["shard", "worker"] | None = None
    """Where the optimizer runs. Absent: on the shards where psjob has a rule for it, else on the workers (sync only)."""
    update_rule: UpdateRule | None = None
    """Optimizer rule that a push goes through in mode async. Absent: that of the script's optimizer. dana-slim is for many
    workers. delayed-nesterov in mode local: a round counts when it comes, without waiting."""
    rule_options: dict[str, float] | None = None
    """Hyperparameters of `updateRule` that the script's optimizer does not have, by name."""
    lr_scaling: Literal["none", "linear"] = "none"
    """linear: the script's learning rate is multiplied by replicas - sync.backupWorkers, and by the processes of a worker."""
    warmup_steps: int = 0
    """Steps of a worker in which the learning rate rises from that of one process to the full one; 0..1000000000."""
    max_push_norm: float | None = None
    """Largest 2-norm of one worker's push, in each block of at most 4 MiB and each table. Shards scale down what is larger before they
    reduce it. They take zeros for NaN and inf, and status says so. This bounds a step of a worker that is compromised, or
    whose loss has exploded. 0.000001..1000000000000. Absent: any."""
    non_finite: Literal["pass", "skip", "refuse"] = "pass"
    """A step with NaN or inf in a gradient. pass: is applied, as in torch, and counted. skip: is not made, in sync on all workers.
    refuse: fails the job and names worker, step and tensor. skip and refuse look before each push."""
    encryption: Literal["auto", "tls", "none"] = "auto"
    """Streams encrypted with TLS 1.3, by certificates of a CA of the run. auto: those between two hosts, or none where the chart's
    value mesh.encrypts is true. tls: all. none: all are in clear text, and authenticated."""
    transport: Literal["auto", "tcp"] = "auto"
    """auto: a worker and a shard in one pod or on one laptop exchange gradients and weights in shared memory, others by TCP. tcp: all
    by TCP."""
    streams: Annotated[int | str, NumberOrWord()] = "auto"
    """Streams between a worker and a shard: 1..8. Absent, auto: by cores and measured speed."""
    gradient_mebibytes: int | None = None
    """MiB of gradients that a shard may hold of all workers together, also those sent before the step. Each worker has an equal share,
    4 MiB at least. Absent: 4096, or 4 for each worker if that is more. 4..65536."""
    compression: Compression = Field(default_factory=lambda: Compression())
    """In how many bits numbers travel between workers and shards."""
    pipeline: PipelineSpec | None = None
    """How a batch goes through the stages of `spec.stages`. Absent: as the script says."""


class PipelineSpec(Model):
    """How a batch goes through stages."""

    microbatches: int
    """Parts into which each batch is cut; 1..1024. One batch is one update."""
    schedule: Literal["flush", "2bw", "pipedream"] = "flush"
    """When stages update. flush: all at the end of a batch; the gradient is that of one process. 2bw, pipedream: without waiting for each
    other. 2bw: on weights of one update ago at every stage. pipedream: on each stage's newest weights. With one micro-batch a batch these
    are of K-1-k updates ago at stage k of K."""
    weights: Literal["stash", "vertical", "recompute", "latest"] = "stash"
    """The weights of a backward. stash: those of its forward, kept until then. vertical: as stash, of the version that the first stage
    took for the batch; only with pipedream. recompute: inputs are kept, and the forward runs again on the newest weights; not with 2bw.
    latest: a stage has one copy, and the backward takes it as it is; only with pipedream."""
    predict: Literal["none", "nesterov"] = "none"
    """nesterov: a forward takes the weights to which the optimizer's momentum leads until its gradient counts. Only with pipedream, and
    weights: stash or recompute."""
    anneal_steps: int | None = None
    """Updates in which the learning rate of a stage with a delay rises from lr / delay to lr; 1..1000000000, only with pipedream.
    Absent: lr from the first update on."""
    correct: Literal["none", "dc-asgd", "gap-aware"] | None = None
    """What a stage makes of gradients of old weights, by how far its weights have moved since. dc-asgd: adds lam g² times that way.
    gap-aware: divides by it. With 2bw and pipedream, and weights: stash or vertical. Absent or none: pushes them as they are."""
    correct_options: dict[str, float] | None = None
    """Hyperparameters of `correct` by name: lam, decay and adaptive of dc-asgd; average and max_lr of gap-aware."""
    highest_momentum: float | None = None
    """What beta1 of torch.optim.NAdam comes near to at late stages; 0..0.9999, only with pipedream. Stage k of K, d updates late, has
    beta1 + d (highestMomentum - beta1) / K. Absent: beta1 of the script at all stages."""


class SyncMode(Model):
    """Of mode sync."""

    backup_workers: int = 0
    """A step takes the first replicas - backupWorkers pushes and drops the rest; 0..3999."""
    reduction: str = "mean"
    """How a step's gradients become one: mean, sum, median, trimmed_mean, or module:function of the worker's image."""
    max_grad_norm: float | None = None
    """Largest 2-norm of the mean gradient of all workers, as DDP with `clip_grad_norm_` clips it. 0.000001..1000000. Absent: any, or what
    the script's `clip_grad_norm_` asks for."""


class BoundedMode(Model):
    """Of mode bounded."""

    staleness: int = 3
    """Steps ahead of the slowest worker; 0..100000."""


class SoftsyncMode(Model):
    """Of mode softsync."""

    splits: int = 1
    """Updates for one push of each worker; 1..4000."""


class ThresholdMode(Model):
    """Of mode threshold."""

    staleness: int = 16
    """Largest staleness of a push; 0..100000."""


class LocalMode(Model):
    """Of mode local."""

    inner_steps: int = 50
    """Steps of a worker between two exchanges; 1..1000000."""
    quorum: int = 0
    """Number of workers that a round needs; 0: all."""
    grace_seconds: float = 0
    """Seconds that a round waits for the other workers when its quorum is there; 0..86400."""
    lr: float = 0.7
    """Learning rate of the outer rule, Nesterov's; above 0 to 10."""
    momentum: float = 0.9
    """Momentum of the outer rule; 0..0.9999."""


Wire = Literal["none", "bf16", "fp16", "int8", "topk", "randomk", "auto"]


class Compression(Model):
    """In how many bits numbers travel. Weights and optimizer state on the shards keep their own."""

    push: Wire = "none"
    """Codec of gradients. bf16, fp16: half the bytes of float32. int8: a quarter. topk, randomk: `ratio` of the elements. int8, topk and
    randomk have error feedback. auto: by the measured speed of each link, none between processes of one address."""
    pull: Wire = "none"
    """Codec of weights: none, bf16, fp16, or auto (bf16 where the link is slow enough)."""
    ratio: float = 0.01
    """Part of a gradient's elements that topk and randomk send at a step; 0.0001..0.5."""


class ShardSet(Model):
    """The shards."""

    replicas: int
    """Number of shards; 1..256."""
    placement: Literal["Spread", "Packed", "Colocated"] | None = None
    """Machines of the shards. Spread: different ones, if there are enough. Packed: few, if they have room. Colocated: shard i on that of
    worker i. Absent: the scheduler chooses. Shards whose volume one node can mount are then on one node."""
    pair_storage_class_name: str | None = None
    """With Colocated: StorageClass of a volume by which shard i and worker i share memory without hostNetwork."""
    template: dict[str, Any] | None = None
    """Pod template laid over the shard pods: labels, node selection, tolerations, volumes, and resources and env of the container
    `shard`. If it says nothing, image, command, security context, priorityClassName, preemptionPolicy and schedulerName are those of
    the workers. So is runtimeClassName, unless a worker asks for a device."""
    progress_deadline_seconds: int = 10
    """Seconds without progress after which a shard counts as lost and is started again from its checkpoint; 2..3600."""


class Workers(Model):
    """The workers."""

    replicas: int
    """Number of workers; 1..4000. Required without `spec.stages`. With stages it is the sum of their replicas, and may be left out."""
    processes: Annotated[int | str, NumberOrWord()] | None = None
    """Processes of each worker: 1..64, or auto, the GPU limit of its container. They sum their gradients, and the worker pushes once.
    Each has torchrun's names in its environment, such as LOCAL_RANK. Absent: 1."""
    local_sum: Literal["auto", "shared", "gloo", "nccl"] = "auto"
    """Where those processes sum. shared: in shared memory. gloo, nccl: each on its device, after that backend has exchanged blocks.
    auto: nccl where each has a GPU of its own and that should be faster, else shared. The sums are the same."""
    template: dict[str, Any]
    """Pod template of the workers. The container `worker`, or the only one, is trained in and needs a `command`. All in it is passed on
    as it is. A stage may have one of its own; the shards take their image from this one."""
    progress_deadline_seconds: int | None = None
    """Seconds without a step, while others wait for it, after which a worker is started again. This counts as a failure. 5..86400. Make it
    longer than the longest step, also the first one and evaluations. Absent: never."""


class Stage(Model):
    """One part of a model that is cut in stages, and its workers."""

    name: str
    """Name of the stage: a DNS label, no other stage's. The pods of its workers have it as label psjob.dev/stage."""
    cut: str | None = None
    """The module with which the stage begins, such as layers.6; 1..256 characters. The first stage has none. All others have one, or none
    has: then the script names the cuts, or leaves them to psjob."""
    replicas: int = 1
    """Number of workers that have this stage; 1..256."""
    template: dict[str, Any] | None = None
    """Pod template of this stage's workers. It replaces `spec.workers.template` as a whole."""


class Checkpoint(Model):
    """What is kept on disk."""

    period_seconds: int = 30
    """Seconds between checkpoints; 1..86400."""
    every_steps: int | None = None
    """Also take a checkpoint at each step that this number divides; 1..1000000000."""
    keep: int = 3
    """Number of checkpoints kept; 2..1000, so that a damaged one has one before it."""
    volume: CheckpointVolume | None = None
    """Where checkpoints lie. Absent: a claim <job>-checkpoints is made."""
    volume_claim_template: dict[str, Any] | None = None
    """What that claim is made of, in the words of a StatefulSet. Absent: 10Gi, ReadWriteOnce, the cluster's default class."""
    persistent_volume_claim_retention_policy: ClaimRetention | None = None
    """What becomes of that claim. Absent: it outlives the job."""
    resume_from: ResumeFrom | None = None
    """Start from the last checkpoint of a run on the same volume: `{job: NAME}` or `{run: UID}`. Absent: start anew."""
    request: int | None = None
    """Another number asks a running job for a checkpoint; `psjob checkpoint` writes the time. Once it is committed, it is
    status.checkpoint.observedRequest."""
    disabled: bool | None = None
    """true: keep nothing; a lost shard then fails the job."""


class ResumeFrom(Model):
    """The run to continue from, in one of two ways."""

    job: str | None = None
    """Another PSTrainingJob of the namespace. Its run is looked up when this job begins, and kept in status.internal.pinned."""
    run: str | None = None
    """A run: `status.run` of a job."""


class ClaimRetention(Model):
    """When the claim that was made goes, in the words of a StatefulSet."""

    when_deleted: Literal["Retain", "Delete"] = "Retain"
    """Retain: it outlives the job. Delete: it is deleted with the job."""


class CheckpointVolume(Model, extra="allow"):
    """Any pod volume source: `{persistentVolumeClaim: {claimName: my-claim}}` or `{nfs: {server: …, path: …}}`."""

    persistent_volume_claim: dict[str, Any] | None = None
    """A claim of the job's namespace, by `claimName`."""
    empty_dir: dict[str, Any] | None = None
    """A folder that is lost with the pod; only with `checkpoint.disabled: true`."""

    def source(self) -> dict[str, Any]:
        """The pod volume source: a volume of a pod without its name."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class RunPolicy(Model):
    """When the job counts as done or failed, and what is cleaned up then."""

    backoff_limit: int = 6
    """Number of failures after which a process is started again; one more fails the job. Drained, preempted and lost pods do not
    count; 0..1000."""
    backoff_limit_per_role: RoleLimits | None = None
    """Limits of one role beside `backoffLimit`, which holds for both together."""
    pod_failure_policy: PodFailurePolicy | None = None
    """What becomes of a lost process, as in batch/v1."""
    active_deadline_seconds: int | None = None
    """Seconds of activity, without those suspended, after which the job fails; 1..2147483647."""
    pending_timeout_seconds: int | None = None
    """Seconds after which the job fails if some of its pods are missing, for any reason: no room, quota, a policy. Absent: the job
    waits. 1..2147483647."""
    ttl_seconds_after_finished: int | None = None
    """Seconds from the job's end until its object is deleted; 0..2147483647. Leave it out under GitOps: the job would be made
    and trained again."""
    clean_pod_policy: Literal["Running", "All", "None"] = "Running"
    """Pods deleted when the job has finished: those still running, all, or none."""
    success_policy: Literal["AllWorkers", "FirstWorker"] = "AllWorkers"
    """The job is complete when all workers, or worker 0, ended with exit code 0."""

    @property
    def failure_rules(self) -> list[FailureRule]:
        """Those of `podFailurePolicy`."""
        return [] if self.pod_failure_policy is None else self.pod_failure_policy.rules


class RoleLimits(Model):
    """As `backoffLimit`, of the processes of one role."""

    shard: int | None = None
    """Failures of all shards together after which one is started again; 0..1000."""
    worker: int | None = None
    """Failures of all workers together after which one is started again; 0..1000."""


class PodFailurePolicy(Model):
    """Rules for lost processes."""

    rules: list[FailureRule]
    """The first that matches decides; 20 at most. If none does, failures of the process itself count and others do not. Exit codes 77
    and 78 of the runtime fail the job, whatever the rules say."""


class FailureRule(Model):
    """One rule. A lost process that meets all that the rule names gets `action`."""

    action: Literal["FailJob", "Count", "Ignore"]
    """FailJob: the job ends as Failed, reason PodFailurePolicy. Count: the process is started again, which counts against the limits.
    Ignore: it is started again ten seconds to two minutes after its last start, and nothing counts."""
    per: Literal["Incident", "Process"] = "Incident"
    """What Count counts as one. Incident: all processes lost together, on one node or in the same way within ten seconds. Process: each
    of them."""
    role: Literal["shard", "worker", "any"] = "any"
    """Processes that the rule is for."""
    on_exit_codes: ExitCodes | None = None
    """Exit codes of a process that ended by itself. Those that the runtime gives have the reasons Retry, Fenced, Hung and DeviceLost."""
    on_pod_conditions: list[PodCondition] | None = None
    """Conditions of its pod, one of which it must have; at most 20. Locally there are none."""
    on_signals: list[int] | None = None
    """Numbers of the signals that ended it, such as 11 for SIGSEGV; 1..64, at most 16. An exit code of 128 + n is signal n."""
    on_reasons: list[str] | None = None
    """Causes as `status.restarts.causes` has them, such as Error, OOMKilled, Evicted, Hung, DeviceLost, NodeLost; at most 16."""


class PodCondition(Model):
    """A condition of a pod, as in podFailurePolicy of batch/v1."""

    type: str
    """Its type, such as DisruptionTarget; none that every pod has."""
    status: Literal["True", "False", "Unknown"] = "True"
    """Its status."""


class ExitCodes(Model):
    """A set of exit codes."""

    operator: Literal["In", "NotIn"]
    """In: the exit code is one of `values`. NotIn: it is none of them."""
    values: list[int]
    """1..255, from 1 to 64 of them."""


def with_replicas(spec: Any) -> Any:
    """A raw spec; one with stages has the sum of their replicas as workers.replicas where it names no number. Takes anything."""
    if not isinstance(spec, Mapping) or not isinstance(spec.get("stages"), list):
        return spec
    workers = spec.get("workers")
    if not isinstance(workers, Mapping) or workers.get("replicas") is not None:
        return spec
    return {**spec, "workers": {**workers, "replicas": sum(map(_replicas, spec["stages"]))}}


def _replicas(stage: Any) -> int:
    """Of what is no number the type is refused by its own path; here it counts as one."""
    given = stage.get("replicas") if isinstance(stage, Mapping) else getattr(stage, "replicas", None)
    return given if isinstance(given, int) and not isinstance(given, bool) else 1
