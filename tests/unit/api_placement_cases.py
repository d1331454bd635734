"""Manifests that say where shards are placed, to refuse and to take."""

from __future__ import annotations

from tests.unit.api_manifest import MANY_NODES, MY_CLAIM, REMOVED, Case

_MOUNT = (
    "must not be spread or colocated with two or more spec.ps.shards and a claim for checkpoints without ReadWriteMany;"
    " one node at a time can mount it; "
)
_STAGES = [{"name": "a", "replicas": 2}, {"name": "b", "replicas": 1}]
_MANY = {"spec.checkpoint": MANY_NODES}

PLACEMENTS_REFUSED = [
    *(Case(f"placement-{word}-on-one-node", {"spec.ps.placement": word}, "spec.ps.placement", _MOUNT) for word in ("spread", "colocated")),
    Case(
        "colocated-on-one-node-by-name",
        {
            "spec.ps.placement": "colocated",
            "spec.checkpoint": {"volumeClaimTemplate": {"spec": {"accessModes": ["ReadWriteOnce"]}}, "disabled": False},
        },
        "spec.ps.placement",
        _MOUNT,
    ),
    Case(
        "more-shards-than-workers",
        {"spec.ps": {"shards": 5, "placement": "colocated"}, **_MANY},
        "spec.ps.shards",
        "must be at most spec.workers.replicas with spec.ps.placement: colocated; shard i stands beside worker i",
    ),
    Case(
        "more-shards-than-workers-of-stages",
        {"spec.ps": {"shards": 4, "placement": "colocated"}, **_MANY, "spec.stages": _STAGES, "spec.workers.replicas": REMOVED},
        "spec.ps.shards",
        "must be at most spec.workers.replicas with spec.ps.placement: colocated; ",
    ),
]
PLACEMENTS_PASSED = [
    *(Case(f"placement-{word}", {"spec.ps.placement": word, **_MANY}) for word in ("spread", "packed", "colocated")),
    Case("packed-on-one-node", {"spec.ps.placement": "packed"}),
    Case("spread-of-one", {"spec.ps": {"shards": 1, "placement": "spread"}}),
    Case("colocated-of-one", {"spec.ps": {"shards": 1, "placement": "colocated"}}),
    Case("colocated-without-checkpoints", {"spec.ps.placement": "colocated", "spec.checkpoint": {"disabled": True}}),
    Case(
        "colocated-claim",
        {"spec.ps.placement": "colocated", "spec.checkpoint": MY_CLAIM},
    ),
    Case("as-many-shards-as-workers", {"spec.ps": {"shards": 4, "placement": "colocated"}, **_MANY}),
    Case(
        "as-many-shards-as-workers-of-stages",
        {"spec.ps": {"shards": 3, "placement": "colocated"}, **_MANY, "spec.stages": _STAGES, "spec.workers.replicas": REMOVED},
    ),
]
