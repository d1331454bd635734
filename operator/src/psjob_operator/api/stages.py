"""How many workers a spec with stages has, read before anything else of it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def with_replicas(spec: Any) -> Any:
    """A raw spec; one with stages has the sum of their replicas as workers.replicas where it names no number. Takes anything."""
    if not isinstance(spec, Mapping) or not isinstance(spec.get("stages"), list):
        return spec
    workers = spec.get("workers")
    if not isinstance(workers, Mapping) or workers.get("replicas") is not None:
        return spec
    return {**spec, "workers": {**workers, "replicas": sum(map(_replicas, spec["stages"]))}}


def _replicas(stage: Any) -> int:
    """Of what is no number the type is refused by its own path; here it counts as one."""
    given = stage.get("replicas") if isinstance(stage, Mapping) else getattr(stage, "replicas", None)
    return given if isinstance(given, int) and not isinstance(given, bool) else 1
