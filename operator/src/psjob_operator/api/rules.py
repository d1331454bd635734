"""The one table of limits: ranges, names, rules across fields. The claim and pod templates have files of their own.

Each row is checked by the API server (its CEL goes into the CRD) and by `validate` (its check runs on the manifest), in the same
words. A row without CEL names the obstacle; there the operator says it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from psjob_operator.api.claim_template import CLAIM_RULES, MANY, ONE_MOUNT, one_mount
from psjob_operator.api.field_rule import FieldRule, Json, between, between_or, found, matching, option_words, options_of, sized
from psjob_operator.api.template import AUTO, MOST_PROCESSES, processes_of
from psjob_operator.contract import ASYNC_OUTER_RULE, CORRECTIONS, MODES, UPDATE_RULES

LARGEST = 2_147_483_647
MOST_SHARDS, MOST_WORKERS = 256, 4000
NAME = "^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$"
OBJECT_NAME = "^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
RUN = "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
MANAGER = "^[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
WORD = "[A-Za-z_][0-9A-Za-z_]*"
REDUCTION = rf"^(mean|sum|median|trimmed_mean|{WORD}([.]{WORD})*:{WORD})$"
STAGES, STAGED_WORKERS, CUT = 64, 256, 256
"""The longest list, the most workers of all stages together, and the longest name of a module."""
LABEL = "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
SUM = "self.stages.map(s, s.replicas).sum()"
COUNTED = f"has(self.stages) ? {SUM} : has(self.workers.replicas) ? self.workers.replicas : 0"
"""CEL, below spec: the number of workers."""
_NAMES = (
    FieldRule(
        "",
        lambda job: re.match(NAME.removesuffix("$") + r"\Z", job["metadata"].get("name", ""), re.ASCII) is not None,
        "must be 1 to 40 lower-case letters, digits and '-', begin with a letter and not end with '-'",
        "names of pods and Services are made from it, such as digits-shard-0",
        cel=f"self.metadata.name.matches('{NAME}')",
        about="metadata.name",
    ),
)
_PLACEMENT = (
    FieldRule(
        "spec",
        lambda spec: spec["shards"].get("placement") != "Colocated" or not 1 <= spec["workers"]["replicas"] < spec["shards"]["replicas"],
        "must be at most spec.workers.replicas with spec.shards.placement: Colocated",
        "shard i stands beside worker i; have fewer shards or more workers",
        cel=f"!has(self.shards.placement) || self.shards.placement != 'Colocated' || self.shards.replicas <= ({COUNTED})",
        about="shards.replicas",
    ),
    FieldRule(
        "spec",
        lambda spec: spec["shards"].get("placement") in (None, "Packed") or spec["shards"]["replicas"] < 2 or not one_mount(spec),
        f"must not be Spread or Colocated with two or more spec.shards.replicas and a claim for checkpoints without {MANY}",
        f"one node at a time can mount it; write accessModes: [{MANY}] in spec.checkpoint.volumeClaimTemplate.spec,"
        " take a volume that all nodes mount, or leave placement out",
        cel=f"!has(self.shards.placement) || self.shards.placement == 'Packed' || self.shards.replicas < 2 || !({ONE_MOUNT})",
        about="shards.placement",
    ),
    FieldRule(
        "spec.shards",
        lambda shards: shards.get("pairStorageClassName") is None or shards.get("placement") == "Colocated",
        "must not be given without placement: Colocated",
        "leave it out",
        cel="!has(self.pairStorageClassName) || (has(self.placement) && self.placement == 'Colocated')",
        about="pairStorageClassName",
    ),
)
_SOURCE = "spec.checkpoint.resumeFrom.job"
_HOST_NETWORK = "shards.template.spec.hostNetwork"
GIVEN = "has(self.workers.processes) && (type(self.workers.processes) != int || self.workers.processes > 1)"
"""CEL, below spec: more than one process is asked for, or as many as there are GPUs."""
NAMED_SUMS = ("shared", "gloo", "nccl")
CAUSE = "^[A-Za-z][A-Za-z0-9]{0,62}$"
CONDITION = "^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
EVERY_POD = frozenset({"PodScheduled", "PodReadyToStartContainers", "Initialized", "ContainersReady", "Ready"})
"""Conditions that every pod has, whatever becomes of it."""
FAILURE_RULES, EXIT_CODES, SIGNALS, REASONS, POD_CONDITIONS = 20, 64, 16, 16, 20
"""The longest lists of runPolicy.podFailurePolicy.rules, and in one of its rules."""


def rules() -> tuple[FieldRule, ...]:
    """Every rule of metadata and spec, templates left out (template.py has those)."""
    return (*_NAMES, *_RANGES, *_TEXTS, *_ACROSS, *_DELAY, *CLAIM_RULES, *_PLACEMENT, *_OF_STAGES, *_WITH_STAGES, *_PROCESSES, *_FAILURES)


def _needs_checkpoints(field: str, remedy: str) -> FieldRule:
    return FieldRule(
        "spec.checkpoint",
        lambda kept: not kept.get("disabled") or field not in kept,
        "must not be given with spec.checkpoint.disabled: true",
        remedy,
        cel=f"!(has(self.disabled) && self.disabled && has(self.{field}))",
        about=field,
    )


_RANGES = (
    between("spec.training.delay", 0, 8, "leave it out for none"),
    between("spec.training.seed", 0, LARGEST, "leave it out for seed 0"),
    between("spec.training.sync.backupWorkers", 0, 3999, "leave it out for none"),
    between("spec.training.bounded.staleness", 0, 100_000, "leave it out for 3"),
    between("spec.training.threshold.staleness", 0, 100_000, "leave it out for 16"),
    between("spec.training.softsync.splits", 1, 4000, "leave it out for 1"),
    between("spec.training.local.innerSteps", 1, 1_000_000, "leave it out for 50"),
    between("spec.training.local.quorum", 0, 4000, "leave it out for all"),
    between("spec.training.local.graceSeconds", 0, 86_400, "leave it out for none"),
    between("spec.training.local.lr", 1e-6, 10, "leave it out for 0.7"),
    between("spec.training.local.momentum", 0, 0.9999, "leave it out for 0.9"),
    between("spec.training.warmupSteps", 0, 1_000_000_000, "leave it out for none"),
    between("spec.training.sync.maxGradNorm", 1e-6, 1_000_000, "leave it out"),
    between("spec.training.maxPushNorm", 1e-6, 10**12, "leave it out to take pushes of any size"),
    between_or("spec.training.streams", 1, 8, AUTO, "leave it out for auto"),
    between("spec.training.gradientMebibytes", 4, 65536, "leave it out for 4096, or 4 per worker where that is more"),
    between("spec.training.compression.ratio", 0.0001, 0.5, "leave it out for 0.01; above 0.5 nothing becomes smaller"),
    between("spec.shards.replicas", 1, MOST_SHARDS, "one shard serves most models; more spread memory and traffic"),
    between("spec.shards.progressDeadlineSeconds", 2, 3600, "leave it out for 10"),
    between("spec.workers.replicas", 1, MOST_WORKERS, "to run none for a while set spec.suspend: true"),
    between("spec.workers.progressDeadlineSeconds", 5, 86_400, "leave it out for no limit"),
    between("spec.checkpoint.request", 1, 9_007_199_254_740_991, "unix seconds will do"),
    between("spec.checkpoint.periodSeconds", 1, 86_400, "leave it out for 30"),
    between("spec.checkpoint.everySteps", 1, 1_000_000_000, "leave it out to take checkpoints only by spec.checkpoint.periodSeconds"),
    between("spec.checkpoint.keep", 2, 1000, "two at least, so that a damaged checkpoint has one before it"),
    between("spec.runPolicy.backoffLimit", 0, 1000, "0 fails the job at its first failure"),
    between("spec.runPolicy.backoffLimitPerRole.shard", 0, 1000, "leave it out to use only spec.runPolicy.backoffLimit"),
    between("spec.runPolicy.backoffLimitPerRole.worker", 0, 1000, "leave it out to use only spec.runPolicy.backoffLimit"),
    between("spec.runPolicy.activeDeadlineSeconds", 1, LARGEST, "leave it out for no deadline"),
    between("spec.runPolicy.pendingTimeoutSeconds", 1, LARGEST, "leave it out to wait"),
    between("spec.runPolicy.ttlSecondsAfterFinished", 0, LARGEST, "leave it out to keep the finished job"),
)

_TEXTS = (
    matching(
        "spec.checkpoint.resumeFrom.run",
        RUN,
        "must be a run: 1 to 63 lower-case letters, digits and '-'",
        "copy status.run of the job to continue from",
    ),
    matching(
        "spec.checkpoint.resumeFrom.job",
        NAME,
        "must be the name of a PSTrainingJob in the job's namespace",
        "write its metadata.name",
    ),
    matching(
        "spec.checkpoint.volume.persistentVolumeClaim.claimName",
        OBJECT_NAME,
        "must be the name of a PersistentVolumeClaim in the job's namespace",
        "lower-case letters, digits, '-' and '.', without a namespace before it",
    ),
    matching("spec.managedBy", MANAGER, "must be a domain, '/' and a name", "such as psjob.dev/operator; leave it out for this operator"),
    matching(
        "spec.training.sync.reduction",
        REDUCTION,
        "must be mean, sum, median, trimmed_mean or module:function",
        "such as robust:clipped, a function of a module that the shards can import",
    ),
)


def _only_in(mode: str) -> FieldRule:
    """The block of a mode's own fields."""
    return FieldRule(
        "spec.training",
        lambda training: training.get(mode) is None or training["mode"] == mode,
        f"is allowed only in spec.training.mode: {mode}",
        "leave it out",
        cel=f"!has(self.{mode}) || self.mode == '{mode}'",
        about=mode,
    )


def _sync(training: Json) -> dict[str, Json]:
    """The block of mode sync; what holds without one."""
    return training.get("sync") or {"backupWorkers": 0, "reduction": "mean"}


def _each_alike(training: Json) -> bool:
    """Every worker has the sum of all pushes before its next step."""
    return training["mode"] == "sync" and not _sync(training)["backupWorkers"] and not training["delay"]


_ACROSS = (
    *(_only_in(mode) for mode, fields in MODES.items() if fields),
    FieldRule(
        "spec.training.sync",
        lambda sync: sync.get("maxGradNorm") is None or not sync.get("backupWorkers"),
        "must not be given with spec.training.sync.backupWorkers",
        "clip in the script, which clips each worker's own gradient",
        cel="!has(self.maxGradNorm) || self.backupWorkers == 0",
        about="maxGradNorm",
    ),
    FieldRule(
        "spec.training",
        lambda training: training.get("updateAt") != "worker" or _each_alike(training),
        "may be worker only in spec.training.mode: sync without backupWorkers and delay",
        "other updates run on the shards; leave it out",
        cel="!has(self.updateAt) || self.updateAt != 'worker' || "
        "(self.mode == 'sync' && self.?sync.?backupWorkers.orValue(0) + self.?delay.orValue(0) == 0)",
        about="updateAt",
    ),
    FieldRule(
        "spec.training",
        lambda training: training["lrScaling"] != "linear" or (training["mode"] == "sync" and _sync(training)["reduction"] != "sum"),
        "may be linear only in spec.training.mode: sync without reduction: sum",
        "only a mean over more workers tolerates a higher rate; leave it out",
        cel="self.?lrScaling.orValue('none') != 'linear' || (self.mode == 'sync' && self.?sync.?reduction.orValue('mean') != 'sum')",
        about="lrScaling",
    ),
    FieldRule(
        "spec.training",
        lambda training: not training["warmupSteps"] or training["mode"] != "local",
        "must be 0 in spec.training.mode: local",
        "workers step by themselves there; let the script's own scheduler warm up",
        cel="self.?warmupSteps.orValue(0) == 0 || self.mode != 'local'",
        about="warmupSteps",
    ),
    FieldRule(
        "spec.training.local",
        lambda local: not local.get("graceSeconds") or bool(local.get("quorum")),
        "must not be given without spec.training.local.quorum",
        "a round waits for all then; leave spec.training.local.graceSeconds out",
        cel="self.graceSeconds == 0.0 || self.quorum > 0",
        about="graceSeconds",
    ),
    FieldRule(
        "spec.training",
        lambda training: training.get("updateAt") != "shard" or training["mode"] != "local",
        "must not be shard in spec.training.mode: local",
        "the optimizer steps on the workers and an outer rule on the shards; leave it out",
        cel="!has(self.updateAt) || self.updateAt != 'shard' || self.mode != 'local'",
        about="updateAt",
    ),
    FieldRule(
        "spec.training",
        lambda training: training.get("ruleOptions") is None or training.get("updateRule") is not None,
        "must not be given without spec.training.updateRule",
        "the hyperparameters of the script's optimizer are its own; leave spec.training.ruleOptions out or name a rule",
        cel="!has(self.ruleOptions) || has(self.updateRule)",
        about="ruleOptions",
    ),
    FieldRule(
        "spec.training",
        lambda training: (
            training.get("updateRule") is None
            or set(training.get("ruleOptions") or ()) <= set(UPDATE_RULES.get(training["updateRule"], ()))
        ),
        f"must name hyperparameters of its rule: {option_words(UPDATE_RULES)}",
        "all others are the script's optimizer's",
        cel=f"!has(self.updateRule) || !has(self.ruleOptions) || {options_of('self.updateRule', 'self.ruleOptions', UPDATE_RULES)}",
        about="ruleOptions",
    ),
    FieldRule(
        "spec",
        lambda spec: all(size >= 4 * spec["workers"]["replicas"] for _, size in found(spec, "training.gradientMebibytes")),
        "must be at least 4 times spec.workers.replicas, a block for each",
        "raise it, have fewer workers, or leave it out",
        cel=f"!has(self.training.gradientMebibytes) || self.training.gradientMebibytes >= 4 * ({COUNTED})",
        about="training.gradientMebibytes",
    ),
    FieldRule(
        "spec",
        lambda spec: spec["workers"]["replicas"] < 1 or _sync(spec["training"])["backupWorkers"] < spec["workers"]["replicas"],
        "must be below spec.workers.replicas, so that a worker is left to take",
        "lower it, or have more workers",
        cel="self.workers.?replicas.orValue(0) < 1 || self.training.?sync.?backupWorkers.orValue(0) < self.workers.replicas",
        about="training.sync.backupWorkers",
    ),
    FieldRule(
        "spec",
        lambda spec: not any(1 <= spec["workers"]["replicas"] < least for _, least in found(spec, "training.local.quorum")),
        "must be at most spec.workers.replicas",
        "lower it, or have more workers",
        cel="self.workers.?replicas.orValue(0) < 1 || self.training.?local.?quorum.orValue(0) <= self.workers.replicas",
        about="training.local.quorum",
    ),
    FieldRule(
        "spec.training",
        lambda training: (
            training.get("updateRule") is None
            or training["mode"] == "async"
            or (training["mode"] == "local" and training["updateRule"] == ASYNC_OUTER_RULE)
        ),
        "is allowed only in spec.training.mode: async, and delayed-nesterov in local",
        "it is a rule for pushes of mode async; leave spec.training.updateRule out or take mode: async",
        cel=f"!has(self.updateRule) || self.mode == 'async' || self.mode == 'local' && self.updateRule == '{ASYNC_OUTER_RULE}'",
        about="updateRule",
    ),
    FieldRule(
        "spec.training",
        lambda training: training.get("updateRule") is None or not (training.get("local") or {}).get("quorum"),
        "must be 0 with spec.training.updateRule",
        "no round waits for others then; leave spec.training.local.quorum and graceSeconds out",
        cel="!has(self.updateRule) || !has(self.local) || self.local.quorum == 0",
        about="local.quorum",
    ),
    FieldRule(
        "spec.training.compression.pull",
        lambda codec: codec not in ("int8", "topk", "randomk"),
        "must not be int8, topk or randomk",
        "they leave out parts of the weights, and no later pull sends those; take bf16, fp16, auto or none",
        cel="!(self in ['int8', 'topk', 'randomk'])",
    ),
    FieldRule(
        "spec.checkpoint",
        lambda kept: not kept.get("disabled") or "persistentVolumeClaim" not in (kept.get("volume") or {}),
        "must not name a claim with spec.checkpoint.disabled: true",
        "leave spec.checkpoint.volume out, or spec.checkpoint.disabled",
        cel="!(has(self.disabled) && self.disabled && has(self.volume) && has(self.volume.persistentVolumeClaim))",
        about="volume",
    ),
    FieldRule(
        "spec.checkpoint",
        lambda kept: bool(kept.get("disabled")) or "emptyDir" not in (kept.get("volume") or {}),
        "must not be an emptyDir, which is lost with the shard",
        "set spec.checkpoint.disabled: true to train without checkpoints, or name a claim",
        cel="!has(self.volume) || !has(self.volume.emptyDir) || (has(self.disabled) && self.disabled)",
        about="volume",
    ),
    FieldRule(
        "spec.checkpoint.resumeFrom",
        lambda source: ("job" in source) != ("run" in source),
        "must name exactly one of job and run",
        "such as {job: digits}",
        shape={"minProperties": 1, "maxProperties": 1},
    ),
    FieldRule(
        "",
        lambda job: (_SOURCE, job["metadata"]["name"]) not in found(job, _SOURCE),
        "must not be the job itself",
        "it continues from its own checkpoint after spec.suspend; name another job, or a run",
        cel="self.spec.checkpoint.?resumeFrom.?job.orValue('') != self.metadata.name",
        about=_SOURCE,
    ),
    _needs_checkpoints("resumeFrom", "a run is resumed from its checkpoints; leave spec.checkpoint.disabled out"),
    _needs_checkpoints("request", "no checkpoint is taken then; leave one of the two out"),
    _needs_checkpoints("everySteps", "no checkpoint is taken then; leave one of the two out"),
    FieldRule(
        "spec.checkpoint.volume",
        lambda volume: len([name for name, source in volume.items() if source is not None]) == 1,
        "must name exactly one volume source",
        "such as {persistentVolumeClaim: {claimName: my-claim}} or {nfs: {server: nfs.example.com, path: /checkpoints}}",
        shape={"minProperties": 1, "maxProperties": 1},
    ),
    FieldRule(
        "spec",
        lambda spec: spec["shards"]["replicas"] < 2 or not one_mount(spec) or (_HOST_NETWORK, True) not in found(spec, _HOST_NETWORK),
        f"must not be true with two or more spec.shards.replicas and a claim for checkpoints without {MANY}",
        f"those shards share one node, and there one port; write accessModes: [{MANY}] in spec.checkpoint.volumeClaimTemplate.spec,"
        " or leave hostNetwork out",
        cel=f"!(self.shards.replicas > 1 && {ONE_MOUNT} && self.shards.?template.?spec.?hostNetwork.orValue(false))",
        about=_HOST_NETWORK,
    ),
)


def _delayed(limit: str, remedy: str, check: Callable[[Json], bool], cel: str) -> FieldRule:
    """A limit of the delay, which spec.training without one keeps; else `check` and `cel` are asked."""
    kept = f"self.?delay.orValue(0) == 0 || {cel}"
    return FieldRule("spec.training", lambda training: not training["delay"] or check(training), limit, remedy, cel=kept, about="delay")


_DELAY = (
    _delayed(
        "must be 0 but in spec.training.mode: sync without backupWorkers, bounded and async", "take one of these, or leave delay out",
        lambda training: training["mode"] in ("sync", "bounded", "async") and not _sync(training)["backupWorkers"],
        "(self.mode in ['sync', 'bounded', 'async'] && self.?sync.?backupWorkers.orValue(0) == 0)",
    ),
    _delayed(
        "must be 0 or 1 in spec.training.mode: sync", "write 1, or take mode bounded or async",
        lambda training: training["delay"] == 1 or training["mode"] != "sync", "self.delay == 1 || self.mode != 'sync'",
    ),
    _delayed(
        "must be below spec.training.bounded.staleness (3 where it is left out)", "it counts toward that; lower delay, or raise staleness",
        lambda training: training["mode"] != "bounded" or training["delay"] < (training.get("bounded") or {"staleness": 3})["staleness"],
        "self.mode != 'bounded' || self.delay < self.?bounded.?staleness.orValue(3)",
    ),
    FieldRule(
        "spec", lambda spec: not _asked(spec) or not spec["training"]["delay"],
        "must be 0 with spec.workers.processes", "the processes of a worker wait for its push together; leave one of the two out",
        cel=f"!({GIVEN}) || self.?training.?delay.orValue(0) == 0", about="training.delay",
    ),
)  # fmt: skip


def _asked(spec: Json) -> bool:
    return spec["workers"].get("processes") not in (None, 1)


_PROCESSES = (
    between_or("spec.workers.processes", 1, MOST_PROCESSES, AUTO, "leave it out for 1; auto is the GPU limit of the worker's container"),
    FieldRule(
        "spec",
        lambda spec: spec["workers"].get("processes") != AUTO or processes_of(AUTO, spec["workers"]["template"]) <= MOST_PROCESSES,
        f"must not stand for more than {MOST_PROCESSES} processes",
        "the container is limited to more GPUs; write a number that divides them",
        obstacle="a limit may be text, and reading text without a greatest length is above the cost that the API server grants a rule",
        about="workers.processes",
    ),
    FieldRule(
        "spec",
        lambda spec: spec["workers"].get("localSum") not in NAMED_SUMS or spec["workers"].get("processes") is not None,
        "must not be given without spec.workers.processes",
        "a worker of one process sums nothing; leave it out, or write the number of processes",
        cel=f"!(self.workers.localSum in {list(NAMED_SUMS)}) || has(self.workers.processes)",
        about="workers.localSum",
    ),
    FieldRule(
        "spec",
        lambda spec: not (_asked(spec) and spec.get("stages")),
        "must not be given with spec.stages",
        "a worker of a stage has one process; leave it out, or raise spec.stages[].replicas",
        cel=f"!({GIVEN}) || !has(self.stages)",
        about="workers.processes",
    ),
    FieldRule(
        "spec",
        lambda spec: not _asked(spec) or spec["training"]["mode"] != "local",
        "must not be local with spec.workers.processes",
        "the processes of a worker meet at each step; take another mode, or leave processes out",
        cel=f"!({GIVEN}) || self.training.mode != 'local'",
        about="training.mode",
    ),
    FieldRule(
        "spec",
        lambda spec: not _asked(spec) or _sync(spec["training"])["reduction"] in ("mean", "sum"),
        "must be mean or sum with spec.workers.processes",
        "a worker pushes one gradient for all of its processes; leave it out, or leave processes out",
        cel=f"!({GIVEN}) || self.training.?sync.?reduction.orValue('mean') in ['mean', 'sum']",
        about="training.sync.reduction",
    ),
)


_FAILURES = (
    between("spec.runPolicy.podFailurePolicy.rules[].onExitCodes.values[]", 1, 255, "0 is success, and no process ends with more than 255"),
    between("spec.runPolicy.podFailurePolicy.rules[].onSignals[]", 1, 64, "such as 11 for SIGSEGV"),
    matching(
        "spec.runPolicy.podFailurePolicy.rules[].onReasons[]",
        CAUSE,
        "must be one word of 1 to 63 letters and digits",
        "such as OOMKilled, Evicted or Error; status.restarts.causes has those that were seen",
    ),
    matching(
        "spec.runPolicy.podFailurePolicy.rules[].onPodConditions[].type",
        CONDITION,
        "must be a pod condition's type: a word, with a domain before it or without",
        "such as DisruptionTarget or example.com/ConfigIssue",
    ),
    FieldRule(
        "spec.runPolicy.podFailurePolicy.rules[].onPodConditions[].type",
        lambda name: name not in EVERY_POD,
        "must not be a condition that every pod has: " + ", ".join(sorted(EVERY_POD)),
        "name one that says why the pod was lost, such as DisruptionTarget",
        cel="!(self in [" + ", ".join(f"'{name}'" for name in sorted(EVERY_POD)) + "])",
    ),
    sized("spec.runPolicy.podFailurePolicy.rules", 0, FAILURE_RULES, "join those with one action"),
    sized("spec.runPolicy.podFailurePolicy.rules[].onExitCodes.values", 1, EXIT_CODES, "name the others with NotIn, or in a further rule"),
    sized("spec.runPolicy.podFailurePolicy.rules[].onPodConditions", 0, POD_CONDITIONS, "name the others in a further rule"),
    sized("spec.runPolicy.podFailurePolicy.rules[].onSignals", 0, SIGNALS, "name the others in a further rule"),
    sized("spec.runPolicy.podFailurePolicy.rules[].onReasons", 0, REASONS, "name the others in a further rule"),
    FieldRule(
        "spec.runPolicy.podFailurePolicy.rules[]",
        lambda rule: rule.get("per") != "Process" or rule.get("action") == "Count",
        "must have action: Count where per is Process",
        "the other actions count nothing; leave per out",
        cel="!has(self.per) || self.per != 'Process' || self.action == 'Count'",
        about="per",
    ),
    FieldRule(
        "spec.runPolicy.podFailurePolicy.rules[]",
        lambda rule: any(rule.get(name) for name in ("onExitCodes", "onPodConditions", "onSignals", "onReasons")),
        "must have onExitCodes, onPodConditions, onSignals or onReasons",
        "a rule that matches every failure would hide those after it",
        cel="has(self.onExitCodes) || "
        + " || ".join(f"(has(self.{name}) && self.{name}.size() > 0)" for name in ("onPodConditions", "onSignals", "onReasons")),
    ),
)

_WITH_PIPELINE = "!has(self.stages) || !has(self.training.pipeline)"


_KEEPING = {(schedule, weights) for schedule in ("2bw", "pipedream") for weights in ("stash", "vertical")}
"""A stage has the weights of a gradient until it pushes it."""
_OWN_OPTIONS = {word: UPDATE_RULES[word] for word in CORRECTIONS[1:]}
_CORRECTS_NOT = "!has(self.correct) || self.correct == 'none'"


def _corrects(way: dict[str, Json]) -> bool:
    return way.get("correct") in CORRECTIONS[1:]


def _cuts(stages: list[Json]) -> list[bool]:
    return [stage.get("cut") is not None for stage in stages]


_OF_STAGES = (
    sized("spec.stages", 2, STAGES, "a model that is not cut needs no stages: leave spec.stages out"),
    matching(
        "spec.stages[].name",
        LABEL,
        "must be a DNS label: 1 to 63 lower-case letters, digits and '-', with a letter or digit at each end",
        "such as embed or layers-6",
    ),
    FieldRule(
        "spec.stages[].cut",
        lambda cut: 1 <= len(cut) <= CUT,
        f"must have 1..{CUT} characters",
        "name the module with which the stage begins, such as layers.6",
        cel=f"self.size() >= 1 && self.size() <= {CUT}",
    ),
    between("spec.stages[].replicas", 1, STAGED_WORKERS, "leave it out for 1"),
    FieldRule(
        "spec.stages",
        lambda stages: len({stage["name"] for stage in stages}) == len(stages),
        "must have another name for each stage",
        "rename one of those that share a name",
        cel="self.all(one, self.exists_one(other, other.name == one.name))",
    ),
    FieldRule(
        "spec.stages",
        lambda stages: not any(_cuts(stages)[:1]),
        "must have no cut in the first stage",
        "it begins with the model; give the cut to the stage that begins there",
        cel="self.size() == 0 || !has(self[0].cut)",
    ),
    FieldRule(
        "spec.stages",
        lambda stages: not stages or _cuts(stages)[0] or sum(_cuts(stages)) in (0, len(stages) - 1),
        "must have a cut in each stage after the first, or in none",
        "name the module with which each of them begins, or leave all cuts out and name them in the script",
        cel="self.size() == 0 || has(self[0].cut) || self.filter(one, has(one.cut)).size() in [0, self.size() - 1]",
    ),
    FieldRule(
        "spec",
        lambda spec: not spec.get("stages") or sum(stage.get("replicas", 1) for stage in spec["stages"]) <= STAGED_WORKERS,
        f"must have at most {STAGED_WORKERS} replicas in all stages together",
        "lower spec.stages[].replicas",
        cel=f"!has(self.stages) || {SUM} <= {STAGED_WORKERS}",
        about="stages",
    ),
    FieldRule(
        "spec",
        lambda spec: spec["workers"].get("replicas") is not None,
        "Required value",
        "write the number of workers, or name stages",
        cel="has(self.workers.replicas) || has(self.stages)",
        about="workers.replicas",
    ),
    FieldRule(
        "spec",
        lambda spec: not spec.get("stages") or sum(stage.get("replicas", 1) for stage in spec["stages"]) == spec["workers"].get("replicas"),
        "must be the sum of spec.stages[].replicas",
        "leave it out: the stages say how many workers there are",
        cel=f"!has(self.stages) || !has(self.workers.replicas) || self.workers.replicas == {SUM}",
        about="workers.replicas",
    ),
    FieldRule(
        "spec",
        lambda spec: len({bool((template.get("spec") or {}).get("hostNetwork")) for template in _templates(spec)}) <= 1,
        "must all have hostNetwork: true in their template, or none of them",
        "workers of neighbouring stages open streams to each other, and only in one network a NetworkPolicy tells them from strangers",
        cel=(
            "!has(self.stages) || self.stages.filter(s, has(s.template)"
            " ? has(s.template.spec.hostNetwork) && s.template.spec.hostNetwork"
            " : has(self.workers.template.spec.hostNetwork) && self.workers.template.spec.hostNetwork"
            ").size() in [0, self.stages.size()]"
        ),
        about="stages",
    ),
    between("spec.training.pipeline.microbatches", 1, 1024, "as many as there are stages keep most of them busy"),
    FieldRule(
        "spec.training.pipeline",
        lambda way: _go_together(way.get("schedule", "flush"), way.get("weights", "stash"), way.get("predict", "none")),
        "must have schedule: pipedream for predict: nesterov and for weights: vertical and latest, and pipedream or flush for weights: "
        "recompute",
        "change the schedule, or leave the other out",
        cel="self.schedule == 'pipedream' || (self.predict == 'none' && "
        "(self.weights == 'stash' || (self.weights == 'recompute' && self.schedule == 'flush')))",
    ),
    FieldRule(
        "spec.training.pipeline",
        lambda way: way.get("predict", "none") == "none" or way.get("weights", "stash") in ("stash", "recompute"),
        "must have weights: stash or recompute for predict: nesterov",
        "change the weights, or leave predict out",
        cel="self.predict == 'none' || self.weights in ['stash', 'recompute']",
    ),
    between("spec.training.pipeline.annealSteps", 1, 1_000_000_000, "leave it out for the script's learning rate from the first update on"),
    FieldRule(
        "spec.training.pipeline",
        lambda way: way.get("annealSteps") is None or way.get("schedule", "flush") == "pipedream",
        "must have schedule: pipedream for annealSteps",
        "with another schedule no stage is more than one update late; leave annealSteps out",
        cel="!has(self.annealSteps) || self.schedule == 'pipedream'",
    ),
    FieldRule(
        "spec.training.pipeline",
        lambda way: not _corrects(way) or (way.get("schedule", "flush"), way.get("weights", "stash")) in _KEEPING,
        "must have schedule: 2bw or pipedream and weights: stash or vertical for correct",
        "with others no gradient is of an older version that is kept; change them, or leave correct out",
        cel=f"{_CORRECTS_NOT} || (self.schedule != 'flush' && self.weights in ['stash', 'vertical'])",
    ),
    FieldRule(
        "spec.training.pipeline",
        lambda way: not way.get("correctOptions") or _corrects(way),
        "must not have correctOptions without correct",
        "they are numbers of a correction; leave correctOptions out, or name one",
        cel=f"!has(self.correctOptions) || self.correctOptions.size() == 0 || !({_CORRECTS_NOT})",
    ),
    FieldRule(
        "spec.training.pipeline",
        lambda way: not _corrects(way) or set(way.get("correctOptions") or ()) <= set(UPDATE_RULES[way["correct"]]),
        f"must have correctOptions of its correct: {option_words(_OWN_OPTIONS)}",
        "all other numbers are the script's optimizer's",
        cel=f"!has(self.correctOptions) || {_CORRECTS_NOT} || {options_of('self.correct', 'self.correctOptions', _OWN_OPTIONS)}",
    ),
    between("spec.training.pipeline.highestMomentum", 0, 0.9999, "leave it out for the script's beta1 at all stages"),
    FieldRule(
        "spec.training.pipeline",
        lambda way: way.get("highestMomentum") is None or way.get("schedule", "flush") == "pipedream",
        "must have schedule: pipedream for highestMomentum",
        "with another schedule all stages are equally late; leave highestMomentum out, and set beta1 in the script",
        cel="!has(self.highestMomentum) || self.schedule == 'pipedream'",
    ),
    FieldRule(
        "spec",
        lambda spec: _pipeline(spec).get("schedule") != "2bw" or _pipeline(spec)["microbatches"] >= len(spec.get("stages") or ()),
        "must be the number of stages or more with schedule: 2bw",
        "the first stage would not have the weights of one update ago in time",
        cel=f"{_WITH_PIPELINE} || self.training.pipeline.schedule != '2bw' || self.training.pipeline.microbatches >= self.stages.size()",
        about="training.pipeline.microbatches",
    ),
    FieldRule(
        "spec",
        lambda spec: (
            _pipeline(spec).get("schedule", "flush") == "flush"
            or not any(_pipeline(spec)["microbatches"] % stage.get("replicas", 1) for stage in spec.get("stages") or ())
        ),
        "must be a multiple of the replicas of each stage where the schedule is not flush",
        "the workers of a stage share the micro-batches of an update evenly",
        cel=f"{_WITH_PIPELINE} || self.training.pipeline.schedule == 'flush' || "
        "self.stages.all(one, self.training.pipeline.microbatches % one.replicas == 0)",
        about="training.pipeline.microbatches",
    ),
)


def _go_together(schedule: str, weights: str, predict: str) -> bool:
    return schedule == "pipedream" or (predict == "none" and (weights == "stash" or (weights, schedule) == ("recompute", "flush")))


def _pipeline(spec: Json) -> dict[str, Json]:
    return spec["training"].get("pipeline") or {}


def _templates(spec: Json) -> list[Json]:
    """Of the workers of each stage."""
    return [stage.get("template") or spec["workers"]["template"] for stage in spec.get("stages") or ()]


def _with_stages(field: str, wanted: Json, remedy: str) -> FieldRule:
    """A field that must have one value where the model is cut in stages, which it has where the job says nothing of it."""
    return FieldRule(
        "spec",
        lambda spec: not spec.get("stages") or all(value == wanted for _, value in found(spec, field)),
        f"must be {wanted} with spec.stages",
        remedy,
        cel=f"!has(self.stages) || self.?{field.replace('.', '.?')}.orValue({wanted!r}) == {wanted!r}",
        about=field,
    )


_WITH_STAGES = (
    _with_stages("training.mode", "sync", "the workers of a model in stages make each step together; leave it out"),
    _with_stages("training.sync.backupWorkers", 0, "each stage needs all of its workers; leave it out"),
    _with_stages("training.sync.reduction", "mean", "each worker pushes its part of a mean; leave it out"),
    _with_stages("training.delay", 0, "the schedule says which weights a stage takes; leave it out"),
    _with_stages("runPolicy.successPolicy", "AllWorkers", "no worker has all of the model; leave it out"),
    FieldRule(
        "spec",
        lambda spec: not spec.get("stages") or spec["training"].get("updateAt") != "worker",
        "must not be worker with spec.stages",
        "no worker has all of the optimizer's state; leave it out",
        cel="!has(self.stages) || !has(self.training.updateAt) || self.training.updateAt != 'worker'",
        about="training.updateAt",
    ),
    FieldRule(
        "spec",
        lambda spec: bool(spec.get("stages")) or spec["training"].get("pipeline") is None,
        "must not be given without spec.stages",
        "a batch is cut only with stages; leave it out, or name the stages",
        cel="has(self.stages) || !has(self.training.pipeline)",
        about="training.pipeline",
    ),
)
