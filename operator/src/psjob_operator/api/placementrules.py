"""Limits of spec.ps.placement, as rules.py has those of all else."""

from __future__ import annotations

from psjob_operator.api.claimtemplate import MANY, ONE_MOUNT, one_mount
from psjob_operator.api.fieldrule import FieldRule
from psjob_operator.api.stagerules import COUNTED

APART = ("spread", "colocated")
"""Placements that put the shards on several nodes."""


def placement_rules() -> tuple[FieldRule, ...]:
    """Every row about it."""
    return _RULES


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
        lambda spec: spec["ps"].get("placement") not in APART or spec["ps"]["shards"] < 2 or not one_mount(spec),
        f"must not be spread or colocated with two or more spec.ps.shards and a claim for checkpoints without {MANY}",
        f"one node at a time can mount it; write accessModes: [{MANY}] in spec.checkpoint.volumeClaimTemplate.spec,"
        " take a volume that all nodes mount, or leave placement out",
        cel=f"!has(self.ps.placement) || self.ps.placement == 'packed' || self.ps.shards < 2 || !({ONE_MOUNT})",
        about="ps.placement",
    ),
)
