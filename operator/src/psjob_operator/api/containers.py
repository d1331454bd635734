"""Which container of a pod template is the one that trains, or serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TRAINED = "worker"
"""The container that is trained in, where a worker template has several."""
SERVING = "shard"
"""The container that serves, where a shard template has several."""


def container_of(template: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The container called `name`, or the only one; None where there is neither. The template's own dict, not a copy."""
    containers = (template.get("spec") or {}).get("containers") or []
    return chosen(containers, name)


def chosen(containers: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """The same of a list of them."""
    if len(containers) == 1:
        return containers[0]
    return next((container for container in containers if container.get("name") == name), None)


def asks_devices(pod: Mapping[str, Any]) -> bool:
    """A container of this pod's spec asks for a device, such as a GPU: a resource with a domain in its name."""
    containers = [it for it in pod.get("containers") or () if isinstance(it, Mapping)]
    amounts = [part for it in containers for part in (it.get("resources") or {}).values() if isinstance(part, Mapping)]
    return bool(pod.get("resourceClaims")) or any("/" in str(name) for part in amounts for name in part)
