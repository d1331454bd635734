"""How the values of a pod template merge, by their paths in it, as server-side apply has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from psjob_operator.api import template
from psjob_operator.api.template import Schema


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
