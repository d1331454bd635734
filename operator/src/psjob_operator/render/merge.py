"""Laying a pod template over another as server-side apply does, by the keys that the Pod API itself gives its lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psjob_operator.render.podlists import ATOMIC, DEFAULTS, KEYED, SETS

TOLERATIONS, AFFINITY = "spec.tolerations", "spec.affinity"
ADDED = frozenset(
    f"{AFFINITY}.{kind}.{when}DuringSchedulingIgnoredDuringExecution"
    for kind in ("podAffinity", "podAntiAffinity")
    for when in ("required", "preferred")
)
"""Lists to which items are only added, though for Kubernetes they are one value: leaving out ours would break what they are for."""
Keys = tuple[Any, ...]


def merge(base: Any, over: Any, at: str = "") -> Any:
    """`over` laid over `base`; neither is changed where they are objects. A null takes the field away. `at`: where in a pod template they
    stand, such as spec.containers[]; empty: the whole template."""
    if isinstance(base, dict) and isinstance(over, dict) and at not in ATOMIC:
        merged = {key: value for key, value in base.items() if key not in over or over[key] is not None}
        for key, value in over.items():
            if value is not None:
                merged[key] = merge(base[key], value, f"{at}.{key}" if at else key) if key in base else value
        return merged
    if isinstance(base, list) and isinstance(over, list):
        if at in KEYED:
            return _by_keys(base, over, at)
        if at == TOLERATIONS:
            return [*(ours for ours in base if not any(_covers(theirs, ours) for theirs in over)), *over]
        return [*base, *(item for item in over if item not in base)] if at in SETS or at in ADDED else over
    return over


def tolerations(ours: list[Any], more: list[Any]) -> list[Any]:
    """`ours`, and of `more` what they do not speak of: no taint is tolerated twice, for two different times."""
    return [*ours, *(theirs for theirs in more if not any(_covers(it, theirs) for it in ours))]


def _by_keys(base: list[Any], over: list[Any], at: str) -> list[Any]:
    """Each item of `over` laid over the one of its keys. What has no such keys, or the same twice, stays for the API server to judge."""
    merged, places = list(base), {keys: place for place, item in enumerate(base) if (keys := _keys(item, at)) is not None}
    for item in over:
        place = places.pop(keys, None) if (keys := _keys(item, at)) is not None else None
        if place is None:
            merged.append(item)
        else:
            merged[place] = merge(merged[place], item, f"{at}[]")
    return merged


def _keys(item: Any, at: str) -> Keys | None:
    if not isinstance(item, Mapping):
        return None
    keys = tuple(item.get(key) or DEFAULTS.get(at, {}).get(key) for key in KEYED[at])
    return keys if all(isinstance(key, str | int) for key in keys) else None


def _covers(theirs: Any, ours: Any) -> bool:
    """Whether the first toleration speaks of the same taint as the second: it takes its place, with its own time."""
    if not isinstance(theirs, Mapping) or not isinstance(ours, Mapping) or theirs.get("key") != ours.get("key"):
        return False
    if theirs.get("effect") not in (None, "", ours.get("effect")):
        return False
    return theirs.get("operator") == "Exists" or _asks(theirs) == _asks(ours)


def _asks(toleration: Mapping[str, Any]) -> tuple[Any, Any]:
    return toleration.get("operator") or "Equal", toleration.get("value") or ""
