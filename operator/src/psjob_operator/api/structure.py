"""Types inside a pod template, where the CRD's schema knows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from psjob_operator.api.problem import Problem

Schema = dict[str, Any]
_MANIFEST = "such as [{name: worker, image: me/train:1, command: [python, train.py]}]"

WHOLE_GPUS = "such as 1; a node's device plugin shares a GPU, by time slicing or MIG, and gives each part a whole number"

BOOLEANS = ("true", "false", "yes", "no", "on", "off")
"""Words that YAML takes for truth values if they have no quotes."""


def mistakes(part: Schema, value: Any, path: str) -> list[Problem]:
    """Every place in `value` that breaks `part`'s types, lengths, required fields and unique keys."""
    return list(_mistakes(part, value, path))


def _mistakes(part: Schema, value: Any, path: str) -> Iterator[Problem]:
    kind = "integer or string" if part.get("x-kubernetes-int-or-string") else part.get("type")
    if value is None or kind is None:
        return
    if kind == "object" and isinstance(value, Mapping):
        yield from _object(part, value, path)
    elif kind == "array" and isinstance(value, list):
        yield from _array(part, value, path)
    elif kind == "string" and isinstance(value, str):
        if len(value) > part.get("maxLength", len(value)):
            yield Problem(path, value, f"Too long: may not be more than {part['maxLength']} bytes", "shorten it")
    elif not (kind == "boolean" and isinstance(value, bool)) and not (kind == "integer or string" and _is_whole_or_word(value)):
        yield Problem(path, value, f"must be of type {kind}", _remedy(str(kind), value, path))


def _is_whole_or_word(value: Any) -> bool:
    whole = value.is_integer() if isinstance(value, float) else isinstance(value, int) and not isinstance(value, bool)
    return whole or isinstance(value, str)


def _remedy(kind: str, value: Any, path: str) -> str:
    if kind == "integer or string":
        return WHOLE_GPUS
    if kind == "boolean" and str(value).lower() in BOOLEANS:
        return "write it without quotes"
    if kind == "string" and isinstance(value, bool | int | float):
        return f'write it in quotes: "{str(value).lower() if isinstance(value, bool) else value}"'
    if kind == "array" and isinstance(value, str) and path.rpartition(".")[2] in ("command", "args"):
        return f"write it as a list, each word an item: [{', '.join(value.split())}]"
    return ""


def _object(part: Schema, value: Mapping[str, Any], path: str) -> Iterator[Problem]:
    for name in part.get("required", []):
        if value.get(name) is None:
            yield Problem(f"{path}.{name}", None, "Required value", part["properties"][name].get("description", ""))
    if len(value) > part.get("maxProperties", len(value)):
        yield Problem(path, None, f"Too many: {len(value)}: must have at most {part['maxProperties']} items")
    inner = part.get("additionalProperties")
    for name, child in value.items():
        known = part.get("properties", {}).get(name, inner)
        if known:
            yield from _mistakes(known, child, f"{path}.{name}" if inner is None else f"{path}[{name}]")


def _array(part: Schema, value: list[Any], path: str) -> Iterator[Problem]:
    if len(value) > part.get("maxItems", len(value)):
        yield Problem(path, None, f"Too many: {len(value)}: must have at most {part['maxItems']} items")
    if len(value) < part.get("minItems", 0):
        yield Problem(
            path,
            None,
            f"must have at least {part['minItems']} item",
            _MANIFEST,
        )
    for i, item in enumerate(value):
        if item is None:
            yield Problem(f"{path}[{i}]", None, f"must be of type {part['items'].get('type', 'object')}, not null", "remove the empty item")
        yield from _mistakes(part["items"], item, f"{path}[{i}]")
    for key in part.get("x-kubernetes-list-map-keys", []):
        seen: set[Any] = set()
        for i, item in enumerate(value):
            name = item.get(key) if isinstance(item, Mapping) else None
            if isinstance(name, str) and name in seen:
                yield Problem(f"{path}[{i}]", None, f'Duplicate value: {{"{key}":"{name}"}}', "names are unique in this list")
            elif isinstance(name, str):
                seen.add(name)
