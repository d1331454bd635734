"""How many processes each worker has, as a manifest says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from psjob_operator.api.containers import TRAINED, container_of

AUTO: Final = "auto"
MOST_PROCESSES: Final = 64
GPUS: Final = ("nvidia.com/gpu", "amd.com/gpu")


def processes_of(given: int | str | None, template: Mapping[str, Any]) -> int:
    """The number that `spec.workers.processes` stands for; auto is the GPU limit of the container that is trained in, 1 without."""
    if given is None:
        return 1
    if isinstance(given, str):
        return gpu_limit(template) or 1
    return given


def gpu_limit(template: Any) -> int:
    """GPUs of one kind that the container is limited to; 0 for none, and for what is no number."""
    container = container_of(template, TRAINED) if isinstance(template, Mapping) else None
    limits = ((container or {}).get("resources") or {}).get("limits") or {}
    return max(_whole(limits.get(name)) for name in GPUS)


def _whole(value: Any) -> int:
    try:
        return max(0, int(value))
    except (TypeError, ValueError):
        return 0
