"""What goes with what: the one table of features that psjob does not combine yet.

A row names two features of a script and its manifest, with a test for each. `attach` refuses the first row whose tests both hold. The page
docs/compatibility.md is generated from the rows. A new feature that does not go with another one is a row here, and nothing else.

What a manifest says that no job can have is refused before a pod starts, by the operator's table of limits. What a rule takes from an
optimizer is in `psjob.api.rule_choice`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from psjob.process.config import Config
from psjob.process.errors import Refused


@dataclass(frozen=True)
class Features:
    """What a script asks for. `rows` and `sums`: the first table of weights and of other values that the shards keep, if there is one."""

    pairs: int = 1
    """Attached optimizers, each with its model."""
    named: bool = False
    overlap: bool = False
    later: bool = False
    """Some parameters are trained from a later step on."""
    scripted: bool = False
    """A module is torch.jit's."""
    half_rule: bool = False
    """A half of the rule runs on the worker and changes gradients before they are pushed."""
    rows: str = ""
    sums: str = ""
    library: str = ""
    """A library that makes a process group of all processes of torchrun's names."""

    @property
    def tables(self) -> bool:
        """Do the shards keep any table of the script?"""
        return bool(self.rows or self.sums)


@dataclass(frozen=True)
class Clash:
    """`feature` does not go with `beside`, because `why`; `take` says what does. Each is a format of `features` and `job`.

    The row holds if both tests do. A row without a test of the job holds outside a job too.
    """

    feature: str
    beside: str
    take: str
    why: str = ""
    features: Callable[[Features], bool] = lambda _features: True
    job: Callable[[Config], bool] | None = None

    def holds(self, features: Features, job: Config | None) -> bool:
        """Do both tests hold? `job` is None outside a job."""
        return self.features(features) and (self.job is None or (job is not None and self.job(job)))

    def sentence(self, features: Features, job: Config | None) -> str:
        """The row in one sentence, with the values of this job."""
        why = f": {self.why}" if self.why else ""
        return f"{self.feature} does not go with {self.beside}{why}; {self.take}".format(features=features, job=job)


def refuse_clashes(features: Features, job: Config | None = None) -> None:
    """Raise Refused for the first row that holds. `job` is None outside a job."""
    for clash in CLASHES:
        if clash.holds(features, job):
            raise Refused(clash.sentence(features, job))


MOVING: Final = ("dc-asgd", "dana-dc", "gap-aware", "gap-aware-dana")
"""Update rules that look at how far weights have moved since a worker was sent them."""
OVERLAP: Final = "attach(…, overlap=True)"
HALF_RULE: Final = "training.updateRule {job.update_rule} with its part on the workers"
ROWS: Final = "a table of rows on the shards (ps.Embedding, ps.Table)"

_OVERLAP: Final = (
    Clash(
        OVERLAP, "attach(…, later=…)", "leave overlap out", "it knows only parameters that are trained from the beginning",
        lambda features: features.overlap and features.later,
    ),
    Clash(
        OVERLAP, "modules of torch.jit", "leave overlap out", "it follows modules as they run, and those run without Python",
        lambda features: features.overlap and features.scripted,
    ),
    Clash(
        OVERLAP, "training.updateRule {job.update_rule}", "leave overlap out",
        "it sends gradients as they are, and the rule changes them before", lambda features: features.overlap and features.half_rule,
        lambda _job: True,
    ),
    Clash(
        OVERLAP, "training.mode local", "leave overlap out, or take another mode",
        "it sends the gradients of each step, and workers push once per round",
        lambda features: features.overlap, lambda job: job.mode == "local",
    ),
)  # fmt: skip

_SEVERAL: Final = "{job.processes} processes per worker"
_ONE: Final = ", or leave spec.workers.processes out and raise spec.workers.replicas"


def _several(job: Config) -> bool:
    return job.processes > 1


_PROCESSES: Final = (
    Clash(OVERLAP, _SEVERAL, "leave it out" + _ONE, features=lambda features: features.overlap, job=_several),
    Clash(HALF_RULE, _SEVERAL, "leave updateRule out" + _ONE, features=lambda features: features.half_rule, job=_several),
    Clash(ROWS, _SEVERAL, "take torch's nn.Embedding" + _ONE, features=lambda features: features.tables, job=_several),
    Clash(
        "{features.library}", _SEVERAL, "train with a plain loop" + _ONE, "it makes a process group of all of them",
        lambda features: bool(features.library), _several,
    ),
)  # fmt: skip

_PAIRS: Final = "{features.pairs} attached optimizers"
_ONE_PAIR: Final = "leave it out, or attach one optimizer only"
_SEVERAL_PAIRS: Final = (
    Clash(OVERLAP, _PAIRS, _ONE_PAIR, features=lambda features: features.overlap and features.pairs > 1, job=lambda _job: True),
    Clash(HALF_RULE, _PAIRS, _ONE_PAIR, features=lambda features: features.half_rule and features.pairs > 1, job=lambda _job: True),
    Clash(ROWS, _PAIRS, _ONE_PAIR, features=lambda features: features.tables and features.pairs > 1, job=lambda _job: True),
    Clash("training.mode local", _PAIRS, _ONE_PAIR, features=lambda features: features.pairs > 1, job=lambda job: job.mode == "local"),
)  # fmt: skip

_REDUCTION: Final = "training.sync.reduction {job.reduction}"


def _compares(job: Config) -> bool:
    """The reduction looks at the pushes of all ranks element by element."""
    return job.reduction not in ("mean", "sum")


_TABLES: Final = (
    Clash(
        ROWS, "training.mode local", "take another mode, or torch's nn.Embedding",
        "it takes a push of each step, and workers push once per round", lambda features: features.tables,
        lambda job: job.mode == "local",
    ),
    Clash(
        "ps.Table {features.sums}", "training.mode {job.mode}", "take mode sync, bounded or async",
        "the mode may leave a push out, and with it what the table was given", lambda features: bool(features.sums),
        lambda job: job.mode not in ("sync", "bounded", "async"),
    ),
    Clash(
        "ps.Table {features.sums}", "training.sync.backupWorkers {job.backup_workers}", "leave backupWorkers out",
        "a step may leave a push out, and with it what the table was given", lambda features: bool(features.sums),
        lambda job: job.backup_workers > 0,
    ),
    Clash(
        _REDUCTION, "rows of {features.rows} on the shards", "take mean or sum",
        "it compares the pushes of all ranks element by element, and a rank pushes only the rows that its batch names",
        lambda features: bool(features.rows), _compares,
    ),
    Clash(
        "training.sync.maxGradNorm", "rows of {features.rows}{features.sums} on the shards", "leave maxGradNorm out",
        "the norm is that of the other gradients only",
        lambda features: features.tables, lambda job: job.max_grad_norm is not None,
    ),
)  # fmt: skip

_MODES: Final = (
    Clash(
        _REDUCTION, "training.compression.push {job.compression.push}",
        "take compression none, bf16, fp16 or int8, or training.sync.reduction mean or sum",
        "it compares the pushes of all ranks element by element, and most elements may be left out",
        job=lambda job: _compares(job) and job.compression.push in ("topk", "randomk", "auto"),
    ),
)  # fmt: skip

_DELAY: Final = "training.delay {job.delay}"
_DELAYS: Final = (
    Clash(
        OVERLAP, _DELAY, "leave one of the two out", "both hide the same time",
        lambda features: features.overlap, lambda job: job.delay > 0,
    ),
    Clash(_DELAY, _PAIRS, _ONE_PAIR, features=lambda features: features.pairs > 1, job=lambda job: job.delay > 0),
    Clash(
        HALF_RULE, _DELAY, "leave delay out, or take another rule",
        "the state of that part is saved at checkpoints, and a worker hears of one a step later",
        lambda features: features.half_rule, lambda job: job.delay > 0,
    ),
    Clash(
        "training.updateRule {job.update_rule}", _DELAY, "leave delay out, or take another rule",
        "the rule measures from the last weights that a worker was sent, and a delayed gradient is of older ones",
        job=lambda job: job.delay > 0 and job.update_rule in MOVING,
    ),
    Clash(
        "training.compression.push {job.compression.push}", _DELAY, "take compression none, bf16 or fp16",
        "what a push leaves out goes into the next one and into the record, which would wait for each push",
        job=lambda job: job.delay > 0 and job.compression.push not in ("none", "bf16", "fp16"),
    ),
    Clash(
        ROWS, _DELAY, "take delay 1 or 0", "rows of a step are pushed with it",
        lambda features: features.tables, lambda job: job.delay > 1,
    ),
)  # fmt: skip

STAGES: Final = "a job of stages"
PIPEDREAM: Final = "training.pipeline.schedule pipedream"
PIPEDREAM_NORM: Final = "the last stage would wait for the first one's gradient of each step"
PIPEDREAM_TAKE: Final = "take schedule: flush or 2bw, or clip_grad_value_"


def _staged(test: Callable[[Config], bool] = lambda _job: True) -> Callable[[Config], bool]:
    return lambda job: bool(job.stages) and test(job)


_STAGES: Final = (
    Clash("attach(…, name=…)", STAGES, "leave name out", "such a job trains one model", lambda features: features.named, _staged()),
    Clash(OVERLAP, STAGES, "leave overlap out", features=lambda features: features.overlap, job=_staged()),
    Clash("several attached optimizers", STAGES, "attach one optimizer", features=lambda features: features.pairs > 1, job=_staged()),
    Clash(
        "training.nonFinite skip", STAGES, "leave it out", "a stage would skip a step that another one makes",
        job=_staged(lambda job: job.non_finite == "skip"),
    ),
    Clash(
        "training.warmupSteps", STAGES, "leave it out", "all workers work on one batch", job=_staged(lambda job: job.warmup_steps > 0)
    ),
    Clash(
        "training.maxPushNorm", STAGES, "leave it out", "what a push holds depends on the cuts",
        job=_staged(lambda job: job.max_push_norm is not None),
    ),
    Clash(
        "training.lrScaling {job.lr_scaling}", STAGES, "leave it out", "all workers work on one batch",
        job=_staged(lambda job: job.lr_scaling != "none"),
    ),
    Clash(
        "training.sync.maxGradNorm", PIPEDREAM, PIPEDREAM_TAKE, PIPEDREAM_NORM,
        job=_staged(lambda job: job.max_grad_norm is not None and job.schedule == "pipedream"),
    ),
    Clash(
        "training.compression.push {job.compression.push}", "training.pipeline.schedule {job.schedule}", "take schedule: flush",
        job=_staged(lambda job: not job.flushes and job.compression.push != "none"),
    ),
    Clash(
        "workers.progressDeadlineSeconds", STAGES, "leave it out", "a worker that waits for another stage would be taken for hung",
        job=_staged(lambda job: job.step_timeout is not None),
    ),
)  # fmt: skip

CLASHES: Final = (*_OVERLAP, *_PROCESSES, *_SEVERAL_PAIRS, *_TABLES, *_MODES, *_DELAYS, *_STAGES)
"""Every row, in the order in which they are looked at."""
