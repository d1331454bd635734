"""Limits of spec.stages and training.pipeline, as rules.py has those of all else."""

from __future__ import annotations

from psjob_operator.api.field_rule import FieldRule, Json, between, found, matching, options_of, sized
from psjob_operator.contract import CORRECTIONS, UPDATE_RULES

STAGES, STAGED_WORKERS, CUT = 64, 256, 256
"""The longest list, the most workers of all stages together, and the longest name of a module."""
LABEL = "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
SUM = "self.stages.map(s, s.replicas).sum()"
COUNTED = f"has(self.stages) ? {SUM} : has(self.workers.replicas) ? self.workers.replicas : 0"
"""CEL, below spec: the number of workers."""


_WITH_PIPELINE = "!has(self.stages) || !has(self.training.pipeline)"


_KEEPING = {(schedule, weights) for schedule in ("2bw", "pipedream") for weights in ("stash", "vertical")}
"""A stage has the weights of a gradient until it pushes it."""
_OWN_OPTIONS = {word: UPDATE_RULES[word] for word in CORRECTIONS[1:]}
_CORRECTS_NOT = "!has(self.correct) || self.correct == 'none'"


def _corrects(way: dict[str, Json]) -> bool:
    return way.get("correct") in CORRECTIONS[1:]


def _own_options() -> str:
    return "; ".join(f"{', '.join(UPDATE_RULES[word])} of {word}" for word in CORRECTIONS[1:])


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
        f"must have correctOptions of its correct: {_own_options()}",
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
STAGE_RULES = (*_OF_STAGES, *_WITH_STAGES)
"""Every row about them."""
