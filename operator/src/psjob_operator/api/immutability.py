"""What may not change: the spec after the job was made, and the parts of status that never go back.

Transition rules: the API server holds both sides of a write. Those about status stand at the schema's root, since rules inside status
are passed over when someone writes `status: null`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from psjob_operator import contract
from psjob_operator.api.field_rule import FieldRule
from psjob_operator.api.status import TERMINAL

Schema = dict[str, Any]
MUTABLE = (
    "spec.suspend",
    "spec.shards.pairStorageClassName",
    "spec.checkpoint.request",
    "spec.runPolicy.backoffLimit",
    "spec.runPolicy.backoffLimitPerRole",
    "spec.runPolicy.podFailurePolicy",
    "spec.runPolicy.activeDeadlineSeconds",
    "spec.runPolicy.pendingTimeoutSeconds",
    "spec.runPolicy.ttlSecondsAfterFinished",
    "spec.runPolicy.cleanPodPolicy",
)
"""Fields of the spec that may change while the job lives. The operator reads them anew each time."""
SWITCHABLE = ("spec.training.mode", "spec.training.bounded")
"""Fields that may change while the mode is one of those among which a running job goes over."""
PLACEMENT = ("nodeSelector", "tolerations", "affinity", "schedulingGates")
"""Fields of a pod's spec that say where and when it is scheduled."""
DESCRIBING = ("labels", "annotations")
"""Fields of its metadata that a queue may write."""
PLACED = ("spec.workers.template", "spec.shards.template", "spec.stages")
"""Pod templates, and what holds some: while a job is suspended its pods may be placed anew. plan/pods.py holds the rest against it."""
_AMONG = json.dumps(list(contract.GOES_ON))
_LIMIT = "is fixed"
_REMEDY = "make a new job with resumeFrom"


def immutability_rules(whole: Schema) -> tuple[FieldRule, ...]:
    """Every transition rule of the object that `whole` is the schema of."""
    return (*_spec("spec", whole["properties"]["spec"]), *_PLACING, *_SWITCHING, *_STATUS)


def _spec(at: str, part: Schema) -> Iterator[FieldRule]:
    for name, child in part["properties"].items():
        path = f"{at}.{name}"
        if path in MUTABLE or path in SWITCHABLE or path in PLACED:
            continue
        if "default" not in child and name not in part.get("required", []):
            # Absent on one side, a field's own transition rule is not asked: its parent's is.
            yield _transition(at, f"has(self.{name}) == has(oldSelf.{name}) && (!has(self.{name}) || self.{name} == oldSelf.{name})", name)
        elif child["type"] == "object" and "x-kubernetes-preserve-unknown-fields" not in child:
            yield from _spec(path, child)
        else:
            yield _transition(path, "self == oldSelf")


def _transition(at: str, cel: str, about: str = "", limit: str = _LIMIT, remedy: str = _REMEDY) -> FieldRule:
    return FieldRule(at, lambda _: True, limit, remedy, cel=cel, about=about)


_RESTS = "has(oldSelf.suspend) && oldSelf.suspend"


def _while_suspended(name: str, optional: bool) -> FieldRule:
    """A template changes only if the job was suspended before the write, which may resume it."""
    same = f"self.{name} == oldSelf.{name}"
    if optional:
        same = f"(has(self.{name}) == has(oldSelf.{name}) && (!has(self.{name}) || {same}))"
    remedy = "suspend the job to place its pods anew, or make a new job with resumeFrom"
    return _transition("spec", f"({_RESTS}) || {same}", name, "is fixed while the job is not suspended", remedy)


_PLACING = (
    _while_suspended("workers.template", optional=False),
    _while_suspended("shards.template", optional=True),
    _while_suspended("stages", optional=True),
    _transition(
        "spec",
        "has(self.stages) == has(oldSelf.stages) && (!has(self.stages) || ("
        + " && ".join(
            f"self.stages.map(s, {field}) == oldSelf.stages.map(s, {field})"
            for field in ("s.name", "s.replicas", "has(s.cut) ? s.cut : ''", "has(s.template)")
        )
        + "))",
        "stages",
    ),
)
_SWITCHING = (
    _transition(
        "spec.training.mode",
        f"self == oldSelf || [self, oldSelf].all(m, m in {_AMONG})",
        limit=f"changes among {', '.join(contract.GOES_ON)} only",
        remedy="make a new job",
    ),
)
_TERMINAL = json.dumps(TERMINAL)
_IS_END = f'c.type in {_TERMINAL} && c.status == "True"'
_ENDED = f"has(oldSelf.status.conditions) && oldSelf.status.conditions.exists(c, {_IS_END})"
"""Without optionals: CEL's estimate of a rule's cost takes the most items of a list from the schema."""
_TERM, _START = "status.?internal.?term", "status.?internal.?workerStart"
_STATUS = (
    _transition(
        "",
        f"!(has(oldSelf.status) && {_ENDED}) || has(self.status) && (has(oldSelf.status.run) && has(self.status.run)"
        " && self.status.run != oldSelf.status.run || has(self.status.phase) && self.status.phase == oldSelf.status.phase"
        f" && has(self.status.conditions) && oldSelf.status.conditions.all(c, !({_IS_END})"
        " || self.status.conditions.exists(n, n.type == c.type && n.status == c.status)))",
        about="status.conditions",
        limit="must not leave Complete or Failed",
        remedy="a finished job stays finished; make a new job to train again",
    ),
    _transition(
        "",
        f"self.?{_TERM}.orValue(0) >= oldSelf.?{_TERM}.orValue(0)",
        about="status.internal.term",
        limit="must not go back",
        remedy="a lower term would let stale shards commit; write the term that is there, or a higher one",
    ),
    _transition(
        "",
        "!oldSelf.?status.?run.hasValue() || (has(self.status) && has(self.status.run)"
        f" && (self.status.run == oldSelf.status.run || !({_ENDED}) || self.?{_TERM}.orValue(0) > oldSelf.?{_TERM}.orValue(-1)))",
        about="status.run",
        limit="must not be taken away, nor change after Complete or Failed but with a higher status.internal.term",
        remedy="it names the checkpoints of this run; write the run that is there",
    ),
    _transition(
        "",
        f"self.?{_START}.orValue(0) >= oldSelf.?{_START}.orValue(0)",
        about="status.internal.workerStart",
        limit="must not go back",
        remedy="names of worker pods are made from it; write the number that is there, or a higher one",
    ),
    _transition(
        "",
        "self.?status.?shards.orValue([]).size() >= oldSelf.?status.?shards.orValue([]).size()",
        about="status.shards",
        limit="must not shrink",
        remedy="each entry keeps its shard's attempt; write all of them",
    ),
    _transition(
        "status.shards[]",
        "self.attempt >= oldSelf.attempt",
        about="attempt",
        limit="must not go back",
        remedy="a lower attempt would let two pods act as one shard; write the attempt that is there, or a higher one",
    ),
    _transition(
        "status",
        "!has(self.shards) || self.shards.all(s, s.index < self.shards.size() && s.replica == 0)",
        about="shards",
        limit="must hold each index from 0 once",
        remedy="write all entries, none beyond the last",
    ),
)
