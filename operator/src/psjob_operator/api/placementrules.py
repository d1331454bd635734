"""Limits of spec.ps.placement, as rules.py has those of all else."""

from __future__ import annotations

from psjob_operator.api.fieldrule import FieldRule, Json
from psjob_operator.api.stagerules import COUNTED

APART = ("spread", "colocated")
"""Placements that put the shards on several nodes."""


def placement_rules() -> tuple[FieldRule, ...]:
    """Every row about it."""
    return _RULES


def _one_mount(spec: Json) -> bool:
    """The claim that is made for the job can be mounted on one node at a time."""
    kept = spec.get("checkpoint") or {}
    return not kept.get("disabled") and kept.get("volume") is None and kept.get("accessMode", "ReadWriteOnce") == "ReadWriteOnce"


_RULES = (
    FieldRule(
        "spec",
        lambda spec: (
            spec["ps"].get("placement") != "colocated"
            or spec["workers"]["replicas"] < 1
            or spec["ps"]["shards"] <= spec["workers"]["replicas"]
        ),
        "must be at most spec.workers.replicas with spec.ps.placement: colocated",
        "shard i stands beside worker i; have fewer shards or more workers",
        cel=f"!has(self.ps.placement) || self.ps.placement != 'colocated' || self.ps.shards <= ({COUNTED})",
        about="ps.shards",
    ),
    FieldRule(
        "spec",
        lambda spec: spec["ps"].get("placement") not in APART or spec["ps"]["shards"] < 2 or not _one_mount(spec),
        "must not be spread or colocated with two or more spec.ps.shards and a claim of spec.checkpoint.accessMode: ReadWriteOnce",
        "one node at a time can mount it; take accessMode: ReadWriteMany, a volume that all nodes mount, or leave placement out",
        cel=(
            "!has(self.ps.placement) || self.ps.placement == 'packed' || self.ps.shards < 2 || has(self.checkpoint.volume)"
            " || (has(self.checkpoint.disabled) && self.checkpoint.disabled) || self.checkpoint.accessMode != 'ReadWriteOnce'"
        ),
        about="ps.placement",
    ),
)
