"""Limits of spec.workers.processes, as rules.py has those of all else."""

from __future__ import annotations

from psjob_operator.api.fieldrule import FieldRule, Json
from psjob_operator.api.processes import AUTO, MOST_PROCESSES, processes_of

GIVEN = "has(self.workers.processes) && (type(self.workers.processes) != int || self.workers.processes > 1)"
"""CEL, below spec: more than one process is asked for, or as many as there are GPUs."""
NAMED_SUMS = ("shared", "gloo", "nccl")


def process_rules() -> tuple[FieldRule, ...]:
    """Every row about it."""
    return _RULES


def _asked(spec: Json) -> bool:
    return spec["workers"].get("processes") not in (None, 1)


_RULES = (
    FieldRule(
        "spec.workers.processes",
        lambda given: given == AUTO if isinstance(given, str) else 1 <= given <= MOST_PROCESSES,
        f"must be 1..{MOST_PROCESSES} or {AUTO}",
        "leave it out for 1; auto is the GPU limit of the worker's container",
        cel=f"type(self) == int ? self >= 1 && self <= {MOST_PROCESSES} : self == '{AUTO}'",
    ),
    FieldRule(
        "spec",
        lambda spec: (
            spec["workers"].get("processes") != AUTO or processes_of(AUTO, spec["workers"].get("template") or {}) <= MOST_PROCESSES
        ),
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
        lambda spec: not _asked(spec) or _training(spec, "mode", "sync") != "local",
        "must not be local with spec.workers.processes",
        "the processes of a worker meet at each step; take another mode, or leave processes out",
        cel=f"!({GIVEN}) || self.training.mode != 'local'",
        about="training.mode",
    ),
    FieldRule(
        "spec",
        lambda spec: not _asked(spec) or _training(spec, "reduction", "mean") in ("mean", "sum"),
        "must be mean or sum with spec.workers.processes",
        "a worker pushes one gradient for all of its processes; leave it out, or leave processes out",
        cel=f"!({GIVEN}) || self.training.reduction in ['mean', 'sum']",
        about="training.reduction",
    ),
)


def _training(spec: Json, name: str, absent: str) -> Json:
    return (spec.get("training") or {}).get(name, absent)
