"""What a user asks for: `spec` of a PSTrainingJob.

Ranges and rules across fields are in rules.py, for the API server and `psjob run` alike; here are names, types and defaults.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from psjob_operator.api.base import Model, NumberOrWord
from psjob_operator.api.duration import seconds
from psjob_operator.api.processes import processes_of
from psjob_operator.api.stages import with_replicas


class JobSpec(Model):
    """What to train, on how many processes, and what to keep of it. Only `suspend`, `training.mode` and some of `runPolicy` may change."""

    training: Training = Field(default_factory=lambda: Training())
    """How pushes become updates. The optimizer itself is the script's."""
    ps: ParameterServers
    """The shards: processes that hold the parameters and apply pushes to them."""
    workers: Workers
    """The processes that run the training script."""
    stages: list[Stage] | None = None
    """The parts of a model that is cut in stages, in the order in which they run; 2..64, at most 256 workers together. Ranks are counted
    through them: with 2, 1 and 1 replicas, ranks 0 and 1 have the first one."""
    checkpoint: Checkpoint = Field(default_factory=lambda: Checkpoint())
    """What is kept on disk, how often, and where."""
    run_policy: RunPolicy = Field(default_factory=lambda: RunPolicy())
    """When the job counts as done or failed, and what is cleaned up then."""
    suspend: bool | None = None
    """true: take a last checkpoint and go down to zero pods; false or absent: run. May change at any time; a queue may own it."""
    managed_by: str | None = None
    """Name of the controller that runs this job, such as example.com/scheduler. Absent or psjob.dev/operator: this operator.
    Another value: this operator leaves the job alone."""
    injection: Literal["auto", "none"] = "auto"
    """auto: put the psjob library into the worker's image when the pod starts; none: the image has it installed."""

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


Mode = Literal["sync", "bounded", "softsync", "async", "threshold", "local"]
UpdateRule = Literal[
    "plain", "heavy-ball", "nag", "multi-momentum", "dana-zero", "dana-slim", "dana-dc", "dc-asgd", "gap-aware", "gap-aware-dana",
    "lr-over-lag", "adam-async", "ftrl", "delayed-nesterov",
]  # fmt: skip


class Training(Model):
    """How pushes become updates."""

    mode: Mode = "sync"
    """sync: each step sums one push of every worker; bounded: nobody runs more than `staleness` steps ahead; softsync: each update takes
    replicas / `splits` pushes; async: each push counts when it comes; threshold: and is dropped if it lags more than `staleness`;
    local: workers step by themselves and meet now and then."""
    backup_workers: int = 0
    """sync: a step takes the first replicas - backupWorkers pushes and drops the rest; 0..3999."""
    staleness: int | None = None
    """bounded (absent: 3), threshold (absent: 16); 0..100000."""
    splits: int | None = None
    """softsync (absent: 1); 1..4000."""
    local: Local | None = None
    """How workers meet in mode local."""
    seed: int = 0
    """Seed of the order of the data and of the workers' random numbers; 0..2147483647."""
    update_at: Literal["server", "worker"] | None = None
    """Where the optimizer runs. Absent: on the shards where psjob has a rule for it, else on the workers (sync only)."""
    update_rule: UpdateRule | None = None
    """What a push does to the parameters in mode async. Absent: what the script's optimizer does; dana-slim is for many workers.
    delayed-nesterov in mode local: a round counts when it comes, and waits for nobody."""
    rule_options: dict[str, float] | None = None
    """Hyperparameters of `updateRule` that the script's optimizer does not have, by name."""
    reduction: str = "mean"
    """How a step's gradients become one in mode sync: mean, sum, median, trimmed_mean, or module:function of the worker's image."""
    lr_scaling: Literal["none", "linear"] = "none"
    """linear: updates use the script's learning rate times replicas - backupWorkers, times the processes of a worker."""
    warmup_steps: int = 0
    """Steps of a worker in which the learning rate rises to the whole from that of one process of one worker; 0..1000000000."""
    max_grad_norm: float | None = None
    """The largest 2-norm that the mean gradient of all workers may have, over all parameters, as DDP with `clip_grad_norm_` clips it. For
    mode sync; 0.000001..1000000. Absent: any, or what the script's `clip_grad_norm_` asks for."""
    max_push_norm: float | None = None
    """The largest 2-norm that one worker's push may have, in each block of at most 4 MiB and each table. The shards scale down what is
    larger, before it is reduced, and take zeros for NaN and inf; the job's status tells. It bounds what a worker that was taken over, or
    whose loss has exploded, can do in one step. 0.000001..1000000000000. Absent: any."""
    non_finite: Literal["pass", "skip", "refuse"] = "pass"
    """What becomes of a step with NaN or inf in a gradient. pass: it is applied, as in torch, and counted; skip: nobody makes it, in
    sync on all workers; refuse: the job fails with the worker, the step and the tensor. skip and refuse look before each push."""
    encryption: Literal["auto", "tls", "none"] = "auto"
    """Which streams are encrypted with TLS 1.3, by certificates of a CA of the run. auto: those between two hosts, or none where the
    operator was told that a mesh encrypts; tls: all; none: they are in clear text, and authenticated."""
    transport: Literal["auto", "tcp"] = "auto"
    """auto: a worker and a shard in one pod or on one laptop give each other gradients and weights in shared memory, all others
    over TCP; tcp: all over TCP."""
    streams: int = 1
    """TCP streams between each worker and each shard, both ways at once; more of them use more cores on both sides. 1..8."""
    gradient_mebibytes: int | None = None
    """MiB of gradients that a shard may hold of all workers together, those included that overlap sends before the step. Each worker
    has an equal share, at least the 4 MiB of one block. Absent: 4096, or 4 a worker where that is more. 4..65536."""
    compression: Compression = Field(default_factory=lambda: Compression())
    """In how many bits numbers travel between workers and shards."""
    pipeline: Pipeline | None = None
    """How a batch goes through the stages of `spec.stages`. Absent: as the script says."""


class Pipeline(Model):
    """How a batch goes through stages."""

    microbatches: int
    """Parts that each batch is cut in; 1..1024. One batch is one update."""
    schedule: Literal["flush", "2bw", "pipedream"] = "flush"
    """When stages make their updates. flush: all at the end of a batch; the gradient is that of one process. 2bw: without waiting for
    each other, on weights of one update ago at every stage. pipedream: the same on each stage's newest weights, of K-1-k updates ago at
    stage k of K with one micro-batch a batch."""
    weights: Literal["stash", "vertical", "recompute", "latest"] = "stash"
    """The weights of a backward. stash: those of its forward, kept until then. vertical: the same, and each stage takes the version that
    the first stage took for the batch; with pipedream alone. recompute: inputs are kept, and the forward runs again on the newest weights;
    not with 2bw. latest: a stage has one memory, and the backward takes what is in it; with pipedream alone."""
    predict: Literal["none", "nesterov"] = "none"
    """nesterov: a forward takes the weights to which the optimizer's momentum leads until its gradient counts; with pipedream alone, and
    with weights: stash or recompute."""
    anneal_steps: int | None = None
    """Updates in which the learning rate of a late stage comes from lr / delay to lr; 1..1000000000, with pipedream alone. Absent: lr from
    the first update on."""


class Local(Model):
    """Mode local: each worker's own optimizer makes `innerSteps` steps, then Nesterov's rule takes the mean way that all went."""

    inner_steps: int = 50
    """1..1000000."""
    quorum: int = 0
    """Workers that a round needs; 0: all."""
    grace_seconds: float = 0
    """How long a round waits for the others when its quorum is there; 0..86400."""
    lr: float = 0.7
    """Of the outer rule; above 0 to 10."""
    momentum: float = 0.9
    """Of the outer rule; 0..0.9999."""


Wire = Literal["none", "bf16", "fp16", "int8", "topk", "randomk", "auto"]


class Compression(Model):
    """In how many bits numbers travel. Weights and optimizer state on the shards keep their own."""

    push: Wire = "none"
    """Of gradients. bf16, fp16: half of float32; int8: a quarter, topk and randomk: `ratio` of them, all three with error feedback;
    auto: by the measured speed of each link, none between processes of one address."""
    pull: Wire = "none"
    """Of weights: none, bf16, fp16, or auto (bf16 where the link is slow enough)."""
    ratio: float = 0.01
    """Share of a gradient's elements that topk and randomk send at a step; 0.0001..0.5."""


class ParameterServers(Model):
    """The shards."""

    shards: int
    """Number of shards; 1..256."""
    placement: Literal["spread", "packed", "colocated"] | None = None
    """Machines of the shards. spread: different ones, where there are as many; packed: few, where they have room; colocated: shard i
    runs on the machine of worker i, and workers.replicas must be at least ps.shards. Absent: one node where they share a volume that
    one node at a time can mount, else wherever the scheduler puts them."""
    template: dict[str, Any] | None = None
    """Pod template laid over the shard pods: labels, node selection, tolerations, volumes, and resources and env of
    the container `shard`. Image, command and security context come from the workers where it says nothing."""
    shard_timeout_seconds: int = 10
    """A shard without progress for so long counts as lost and is started again from its checkpoint; 2..3600."""


class Workers(Model):
    """The workers."""

    replicas: int
    """Number of workers; 1..4000. Required without `spec.stages`; with them it is the sum of their replicas, and may be left out."""
    processes: Annotated[int | str, NumberOrWord()] | None = None
    """Processes of each worker, which sum their gradients among themselves and push once: a number, 1..64, or auto, the GPU limit of the
    worker's container. Each has torchrun's names in its environment, such as LOCAL_RANK. Absent: 1."""
    local_sum: Literal["auto", "shared", "gloo", "nccl"] = "auto"
    """Where those processes sum. shared: in shared memory. gloo, nccl: each on its device, after an exchange of blocks by that backend.
    auto: nccl where each has a GPU of its own and that is expected to be faster, else shared. The sums are the same."""
    template: dict[str, Any]
    """Pod template of the workers. The container `worker`, or the only one, is trained in and needs a `command`.
    Everything in it is passed on as it is. A stage may have one of its own; the shards take their image from this one."""
    step_timeout_seconds: int | None = None
    """A worker that has made no step for so long while others wait for it is started again, counted; 5..86400. Longer than the longest
    step, the first one and evaluations included. Absent: never."""


class Stage(Model):
    """One part of a model that is cut in stages, and its workers."""

    name: str
    """Name of the stage: a DNS label, no other stage's. The pods of its workers have it as label psjob.dev/stage."""
    cut: str | None = None
    """Name of the module with which the stage begins, such as layers.6; 1..256 characters. The first stage has none. All others have one,
    or none has: then the script names the cuts, or leaves them to psjob."""
    replicas: int = 1
    """Number of workers that have this stage; 1..256."""
    template: dict[str, Any] | None = None
    """Pod template of this stage's workers, in place of `spec.workers.template`; nothing of that is laid under it."""


class Checkpoint(Model):
    """What is kept on disk."""

    interval: str = "30s"
    """Time between checkpoints, such as 30s, 5m or 1h30m; 1s..24h."""
    every_steps: int | None = None
    """Also take a checkpoint at each step that this number divides; 1..1000000000."""
    keep: int = 3
    """Number of checkpoints kept; 2..1000, so that a damaged one has one before it."""
    volume: CheckpointVolume | None = None
    """Where checkpoints lie. Absent: a claim <job>-checkpoints is made."""
    access_mode: Literal["ReadWriteOnce", "ReadWriteMany"] = "ReadWriteOnce"
    """ReadWriteOnce puts all shards on one node, which works on every cluster; ReadWriteMany spreads them."""
    size: str = "10Gi"
    """Size of the claim that is made."""
    retain: bool = True
    """true: the claim that was made outlives the job; false: it is deleted with it."""
    resume_from: str | None = None
    """Start from the last checkpoint of this run (`status.run` of another job) on the same volume. Absent: start anew."""
    request: int | None = None
    """Another number here asks a running job for a checkpoint; `psjob checkpoint` writes the time."""
    disabled: bool | None = None
    """true: keep nothing; a lost shard then fails the job."""

    @property
    def interval_seconds(self) -> float:
        """`interval` in seconds. Raises ValueError where it is no duration (validation has refused that)."""
        return seconds(self.interval)


class CheckpointVolume(Model, extra="allow"):
    """A claim by name, or any pod volume source: `{claim: my-claim}` or `{nfs: {server: …, path: …}}`."""

    claim: str | None = None
    """Name of a PersistentVolumeClaim in the job's namespace."""
    empty_dir: dict[str, Any] | None = None
    """A folder that is lost with the pod; only with `checkpoint.disabled: true`."""

    def source(self) -> dict[str, Any]:
        """The pod volume source: a volume of a pod without its name."""
        if self.claim is not None:
            return {"persistentVolumeClaim": {"claimName": self.claim}}
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class RunPolicy(Model):
    """When the job counts as done or failed, and what is cleaned up then."""

    backoff_limit: int = 6
    """Number of failures that are answered by a restart; one more fails the job. Drained, preempted and lost pods do not count; 0..1000."""
    backoff_limit_per_role: RoleLimits | None = None
    """Limits of one role beside `backoffLimit`, which holds for both together."""
    failure_rules: list[FailureRule] | None = None
    """What becomes of a process that was lost, by how it ended: the first rule that matches holds. Without one, failures of its own doing
    count and others do not; 20 at most. An end that says of itself that a restart is of no use (exit codes 77 and 78 of the runtime)
    fails the job whatever the rules say."""
    active_deadline_seconds: int | None = None
    """The job fails when it has been active, not suspended, for so long; 1..2147483647."""
    pending_timeout_seconds: int | None = None
    """The job fails when some of its pods have been missing for so long, whatever keeps them: no room, quota, a policy. Left out,
    it waits; 1..2147483647."""
    ttl_seconds_after_finished: int | None = None
    """The job object is deleted this long after it finished; 0..2147483647. Leave it out under GitOps: the job would be made
    and trained again."""
    clean_pod_policy: Literal["Running", "All", "None"] = "Running"
    """Pods deleted when the job has finished: those still running, all, or none."""
    success_policy: Literal["AllWorkers", "FirstWorker"] = "AllWorkers"
    """The job is complete when all workers, or worker 0, ended with exit code 0."""


class RoleLimits(Model):
    """As `backoffLimit`, of the processes of one role."""

    shard: int | None = None
    """Failures of all shards together that are answered by a restart; 0..1000."""
    worker: int | None = None
    """Failures of all workers together that are answered by a restart; 0..1000."""


class FailureRule(Model):
    """One rule: a process that meets all of `role`, `exitCodes`, `signals` and `reasons`, as far as they are given, gets `action`."""

    action: Literal["Fail", "Restart", "Ignore"]
    """Fail: the job ends as Failed, reason FailureRule; Restart: it is started again, and that counts against the limits;
    Ignore: it is started again and does not count, ten seconds to two minutes after its last start."""
    role: Literal["shard", "worker", "any"] = "any"
    """Of which processes."""
    exit_codes: ExitCodes | None = None
    """Exit codes of a process that ended by itself. Those that the runtime gives have the reasons Retry, Fenced and Hung instead."""
    signals: list[int] | None = None
    """Numbers of the signals that ended it, such as 11 for SIGSEGV; 1..64, at most 16. An exit code of 128 + n is signal n."""
    reasons: list[str] | None = None
    """Causes as `status.restarts.causes` has them, such as Error, OOMKilled, Evicted, Unresponsive, Hung, NodeLost; at most 16."""


class ExitCodes(Model):
    """A set of exit codes."""

    operator: Literal["In", "NotIn"]
    """In: it is one of `values`; NotIn: it is none of them."""
    values: list[int]
    """1..255, from 1 to 64 of them."""
