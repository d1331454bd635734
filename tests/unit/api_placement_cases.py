"""Manifests that say where shards are placed, to refuse and to take."""

from __future__ import annotations

from tests.unit.api_manifest import MANY_NODES, MY_CLAIM, REMOVED, Case, refused

_MOUNT = (
    "must not be Spread or Colocated with two or more spec.shards.replicas and a claim for checkpoints without ReadWriteMany;"
    " one node at a time can mount it; "
)
_STAGES = [{"name": "a", "replicas": 2}, {"name": "b", "replicas": 1}]
_MANY = {"spec.checkpoint": MANY_NODES}

PLACEMENTS_REFUSED = [
    *(refused(f"{word}-on-one-node", "spec.shards.placement", word, _MOUNT) for word in ("Spread", "Colocated")),
    Case(
        "colocated-on-one-node-by-name",
        {
            "spec.shards.placement": "Colocated",
            "spec.checkpoint": {"volumeClaimTemplate": {"spec": {"accessModes": ["ReadWriteOnce"]}}, "disabled": False},
        },
        "spec.shards.placement",
        _MOUNT,
    ),
    Case(
        "more-shards-than-workers",
        {"spec.shards": {"replicas": 5, "placement": "Colocated"}, **_MANY},
        "spec.shards.replicas",
        "must be at most spec.workers.replicas with spec.shards.placement: Colocated; shard i stands beside worker i",
    ),
    Case(
        "more-shards-than-workers-of-stages",
        {"spec.shards": {"replicas": 4, "placement": "Colocated"}, **_MANY, "spec.stages": _STAGES, "spec.workers.replicas": REMOVED},
        "spec.shards.replicas",
        "must be at most spec.workers.replicas with spec.shards.placement: Colocated; ",
    ),
]
PLACEMENTS_PASSED = [
    *(Case(f"placement-{word}", {"spec.shards.placement": word, **_MANY}) for word in ("Spread", "Packed", "Colocated")),
    Case("packed-on-one-node", {"spec.shards.placement": "Packed"}),
    Case("spread-of-one", {"spec.shards": {"replicas": 1, "placement": "Spread"}}),
    Case("colocated-of-one", {"spec.shards": {"replicas": 1, "placement": "Colocated"}}),
    Case("colocated-without-checkpoints", {"spec.shards.placement": "Colocated", "spec.checkpoint": {"disabled": True}}),
    Case(
        "colocated-claim",
        {"spec.shards.placement": "Colocated", "spec.checkpoint": MY_CLAIM},
    ),
    Case("as-many-shards-as-workers", {"spec.shards": {"replicas": 4, "placement": "Colocated"}, **_MANY}),
    Case(
        "as-many-shards-as-workers-of-stages",
        {"spec.shards": {"replicas": 3, "placement": "Colocated"}, **_MANY, "spec.stages": _STAGES, "spec.workers.replicas": REMOVED},
    ),
]
