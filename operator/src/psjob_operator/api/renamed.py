"""Names that fields and values of the manifest had before, and what to write in their place.

An old name is refused with the sentence here, and never read. The API server knows no old names: it drops them from a job that was stored
before, and refuses them in `kubectl apply` as unknown.
"""

from __future__ import annotations

import re
from typing import Any, Final

_CLAIM = "spec.checkpoint.volumeClaimTemplate"
FIELDS: Final = {
    "spec.ps": "write spec.shards: {replicas: 2} for ps: {shards: 2}",
    "spec.shards.shards": "write spec.shards.replicas",
    "spec.shards.shardTimeoutSeconds": "write spec.shards.progressDeadlineSeconds",
    "spec.training.backupWorkers": "write spec.training.sync: {backupWorkers: 1}",
    "spec.training.reduction": "write spec.training.sync: {reduction: median}",
    "spec.training.maxGradNorm": "write spec.training.sync: {maxGradNorm: 1.0}",
    "spec.training.staleness": "write spec.training.bounded: {staleness: 3} or spec.training.threshold: {staleness: 16}",
    "spec.training.splits": "write spec.training.softsync: {splits: 2}",
    "spec.workers.stepTimeoutSeconds": "write spec.workers.progressDeadlineSeconds",
    "spec.runPolicy.failureRules": "write spec.runPolicy.podFailurePolicy: {rules: [...]}, with onSignals and onReasons",
    "spec.runPolicy.podFailurePolicy.rules[].signals": "write spec.runPolicy.podFailurePolicy.rules[].onSignals",
    "spec.runPolicy.podFailurePolicy.rules[].reasons": "write spec.runPolicy.podFailurePolicy.rules[].onReasons",
    "spec.checkpoint.interval": "write spec.checkpoint.periodSeconds: 30 for interval: 30s",
    "spec.checkpoint.size": f"write {_CLAIM}: {{spec: {{resources: {{requests: {{storage: 10Gi}}}}}}}}",
    "spec.checkpoint.accessMode": f"write {_CLAIM}: {{spec: {{accessModes: [ReadWriteMany]}}}}",
    "spec.checkpoint.retain": "write spec.checkpoint.persistentVolumeClaimRetentionPolicy: {whenDeleted: Delete} for retain: false",
    "spec.checkpoint.volume.claim": "write spec.checkpoint.volume: {persistentVolumeClaim: {claimName: my-claim}}",
}
"""Path of a field that has gone -> the sentence that names the new one."""
VALUES: Final[dict[str, dict[str, str]]] = {
    "spec.injection": {"auto": "Auto", "none": "None"},
    "spec.shards.placement": {"spread": "Spread", "packed": "Packed", "colocated": "Colocated"},
    "spec.training.updateAt": {"server": "shard"},
}
"""Path of a field -> its old values, each with the new one."""


def renamed_field(path: str) -> str:
    """What to write in place of the field at `path`; empty if it never was one."""
    return FIELDS.get(re.sub(r"\[\d+\]", "[]", path), "")


def renamed_value(path: str, value: Any) -> str:
    """The present word for a value that `path` took before; empty if it never did."""
    return VALUES.get(re.sub(r"\[\d+\]", "[]", path), {}).get(str(value), "")
