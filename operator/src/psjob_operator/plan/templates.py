"""Pod templates of a run that was suspended: where its pods are placed may change meanwhile, as in batch/v1 (KEP-2926), and nothing else.

The API server cannot compare the rest of a template that it does not know whole. It takes any change while a job is suspended, and the
operator holds a run whose pods would be other ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from psjob_operator.api.immutability import DESCRIBING, PLACEMENT
from psjob_operator.api.spec import JobSpec


def essence(spec: JobSpec) -> str:
    """Short name of what the templates make, wherever that is placed."""
    told = [_rest(spec.workers.template), _rest(spec.ps.template or {}), *(_rest(stage.template or {}) for stage in spec.stages or ())]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def _rest(template: Mapping[str, Any]) -> Mapping[str, Any]:
    parts = {"metadata": DESCRIBING, "spec": PLACEMENT}
    found = {}
    for name, value in template.items():
        part = {key: it for key, it in value.items() if key not in parts[name]} if name in parts and isinstance(value, Mapping) else value
        if part not in ({}, None):
            found[name] = part
    return found
