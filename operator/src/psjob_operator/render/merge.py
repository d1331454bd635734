"""Laying a pod template over another, much as `kubectl apply` merges: objects by key, lists of named things by name."""

from __future__ import annotations

from typing import Any

KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
"""Lists whose items differ by a key, as in the Kubernetes API."""
ADDED = ("tolerations", "requiredDuringSchedulingIgnoredDuringExecution", "preferredDuringSchedulingIgnoredDuringExecution")
"""Lists to which items are only added: leaving out ours would break what they are for."""


def merge(base: Any, over: Any, field: str = "") -> Any:
    """`over` laid over `base`; neither is changed where they are objects. A null takes the field away."""
    if isinstance(base, dict) and isinstance(over, dict):
        merged = {key: value for key, value in base.items() if key not in over or over[key] is not None}
        for key, value in over.items():
            if value is not None:
                merged[key] = merge(base[key], value, key) if key in base else value
        return merged
    if isinstance(base, list) and isinstance(over, list):
        if field in KEYS:
            return _by_key(base, over, KEYS[field])
        return [*base, *over] if field in ADDED else over
    return over


def _by_key(base: list[Any], over: list[Any], key: str) -> list[Any]:
    if not all(isinstance(item, dict) and isinstance(item.get(key), str | int) for item in [*base, *over]):
        # Not what Kubernetes takes; the API server says so better than we could.
        return [*base, *over]
    merged = {item[key]: item for item in base}
    for item in over:
        merged[item[key]] = merge(merged[item[key]], item) if item[key] in merged else item
    return list(merged.values())
