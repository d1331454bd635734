"""Words of the manifest that have gone, and what to write in their place: refused with the new one's name, never read."""

from __future__ import annotations

import re

_TEMPLATE = "spec.checkpoint.volumeClaimTemplate"
RENAMED = {
    "spec.checkpoint.size": f"write {_TEMPLATE}: {{spec: {{resources: {{requests: {{storage: 10Gi}}}}}}}}",
    "spec.checkpoint.accessMode": f"write {_TEMPLATE}: {{spec: {{accessModes: [ReadWriteMany]}}}}",
    "spec.checkpoint.retain": "write spec.checkpoint.persistentVolumeClaimRetentionPolicy: {whenDeleted: Delete} for retain: false",
    "spec.checkpoint.volume.claim": "write spec.checkpoint.volume: {persistentVolumeClaim: {claimName: my-claim}}",
}
"""Path -> the sentence that names the new word."""


def renamed(path: str) -> str:
    """What to write in place of the field at `path`; empty if it never was one."""
    return RENAMED.get(re.sub(r"\[\d+\]", "[]", path), "")
