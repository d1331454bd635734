"""Laying a pod template over another as server-side apply does, by the keys that the Pod API itself gives its lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from psjob_operator.api import template
from psjob_operator.api.template import Schema

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


def _below(part: Schema, at: str = "") -> Iterator[tuple[str, Schema]]:
    """Each field, by its path such as spec.containers[].env."""
    for name, field in part.get("properties", {}).items():
        path = f"{at}.{name}".removeprefix(".")
        yield path, field
        is_list = "items" in field
        yield from _below(field["items"] if is_list else field, f"{path}[]" if is_list else path)


_FIELDS: Final = dict(_below(template.definition("PodTemplateSpec")))
KEYED: Final = {
    path: tuple(field["x-kubernetes-list-map-keys"]) for path, field in _FIELDS.items() if field.get("x-kubernetes-list-type") == "map"
}
"""Lists whose items differ by these keys."""
DEFAULTS: Final = {
    path: {key: str(item["default"]) for key in keys if "default" in (item := _FIELDS[path]["items"]["properties"][key])}
    for path, keys in KEYED.items()
}
"""Of a list with keys: what the API server fills in if an item leaves a key out."""
SETS: Final = frozenset(path for path, field in _FIELDS.items() if field.get("x-kubernetes-list-type") == "set")
"""Lists that hold each item once."""
ATOMIC: Final = frozenset(path for path, field in _FIELDS.items() if field.get("x-kubernetes-map-type") == "atomic")
"""Objects that are replaced whole."""
