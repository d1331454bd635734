"""Types inside a pod template: where the CRD's schema knows them, and everywhere by the Pod API's own schema."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from psjob_operator.api import podschema
from psjob_operator.api.problem import Problem, shown
from psjob_operator.api.renamed import renamed

Schema = dict[str, Any]
_MANIFEST = "such as [{name: worker, image: me/train:1, command: [python, train.py]}]"
MOST_TOLD = 500
"""To say what was meant takes time for each."""
REQUIRED, UNKNOWN, UNSUPPORTED, TWICE = "Required value", "unknown field", "Unsupported value", "Duplicate value"

WHOLE_GPUS = "such as 1; a node's device plugin shares a GPU, by time slicing or MIG, and gives each part a whole number"
QUANTITY = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(([KMGTPE]i|[numkMGTPE])|[eE][+-]?[0-9]+)?", re.ASCII)
"""As in apimachinery's resource.ParseQuantity."""
FEW = 10
"""Fields of an object that are all named where none is like the one that is unknown."""
WHOLE = {"int32": 2**31, "int64": 2**63}

BOOLEANS = ("true", "false", "yes", "no", "on", "off")
"""Words that YAML takes for truth values if they have no quotes."""


def mistakes(part: Schema, value: Any, path: str) -> list[Problem]:
    """The places in `value` that break `part`'s types, lengths, words, fields, required fields and unique keys: the first MOST_TOLD."""
    found = list(islice(_mistakes(part, value, path), MOST_TOLD + 1))
    if len(found) > MOST_TOLD:
        found[MOST_TOLD] = Problem(path, None, "has more problems", f"correct the first {MOST_TOLD} and ask again")
    return found


def pod_mistakes(definition: Schema, value: Any, path: str, *, overlay: bool = False) -> list[Problem]:
    """The same by the Pod API's schema, which the API server asks only when a pod is made. `overlay`: what is required may stand in what
    `value` is laid over."""
    found = [replace(problem, admitted=True) for problem in mistakes(definition, value, path)]
    # What differs by the same keys may stand twice in a pod; the CRD's own lists refuse it.
    found = [problem for problem in found if not problem.limit.startswith(TWICE)]
    return [problem for problem in found if not (overlay and problem.limit == REQUIRED)]


def unsupported(path: str, value: Any, known: Sequence[str]) -> Problem:
    """The API server's words for a value that is none of `known`."""
    near = difflib.get_close_matches(str(value), known, n=1)
    choices = ", ".join(f'"{choice}"' for choice in known)
    return Problem(path, None, f"{UNSUPPORTED}: {shown(value)}: supported values: {choices}", f"did you mean {near[0]}?" if near else "")


def _mistakes(part: Schema, value: Any, path: str) -> Iterator[Problem]:
    kinds = _kinds(part)
    if value is None or not kinds:
        return
    if kinds == ("object",) and isinstance(value, Mapping):
        yield from _object(part, value, path)
    elif kinds == ("array",) and isinstance(value, list):
        yield from _array(part, value, path)
    elif not any(_is_of(kind, value) for kind in kinds):
        kind = " or ".join(kinds)
        yield Problem(path, value, f"must be of type {kind}", _remedy(kind, value, path))
    else:
        yield from _scalar(part, value, path)


def _kinds(part: Schema) -> tuple[str, ...]:
    if part.get("x-kubernetes-int-or-string"):
        return ("integer", "string")
    kinds = part.get("type", ())
    return (kinds,) if isinstance(kinds, str) else tuple(kinds)


def _is_of(kind: str, value: Any) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return (kind == "number" and isinstance(value, int | float)) or (kind == "string" and isinstance(value, str))


def _scalar(part: Schema, value: Any, path: str) -> Iterator[Problem]:
    if isinstance(value, str) and len(value) > part.get("maxLength", len(value)):
        yield Problem(path, value, f"Too long: may not be more than {part['maxLength']} bytes", "shorten it")
    if value and "enum" in part and value not in part["enum"]:
        yield unsupported(path, value, part["enum"])
    if part.get("format") == podschema.QUANTITY and not QUANTITY.fullmatch(str(value)):
        yield Problem(path, value, "must be a quantity", "a number with or without a unit, such as 500m, 2, 512Mi or 4Gi")
    bound = WHOLE.get(part.get("format", ""))
    if bound is not None and isinstance(value, int | float) and not -bound <= value < bound:
        yield Problem(path, value, f"must be {-bound}..{bound - 1}", f"it is an {part['format']}")


def _remedy(kind: str, value: Any, path: str) -> str:
    if kind == "integer or string":
        return WHOLE_GPUS if path.endswith("/gpu") else ""
    if kind == "boolean" and str(value).lower() in BOOLEANS:
        return "write it without quotes"
    if kind == "string" and isinstance(value, bool | int | float):
        return f'write it in quotes: "{str(value).lower() if isinstance(value, bool) else value}"'
    if kind == "array" and isinstance(value, Mapping):
        return "begin each item with a dash"
    if kind == "object" and isinstance(value, str | int | float):
        return "indent its fields below it"
    if kind in ("integer", "number") and isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]+", value, re.ASCII):
        return "write it without quotes"
    if kind == "array" and isinstance(value, str) and path.rpartition(".")[2] in ("command", "args"):
        return f"write it as a list, each word an item: [{', '.join(value.split())}]"
    return ""


def _object(part: Schema, value: Mapping[str, Any], path: str) -> Iterator[Problem]:
    for name in part.get("required", []):
        if value.get(name) is None:
            yield Problem(f"{path}.{name}", None, REQUIRED, part["properties"][name].get("description", ""))
    if len(value) > part.get("maxProperties", len(value)):
        yield Problem(path, None, f"Too many: {len(value)}: must have at most {part['maxProperties']} items")
    inner, named = part.get("additionalProperties"), part.get("properties", {})
    closed = bool(named) and inner is None and not part.get("x-kubernetes-preserve-unknown-fields")
    for name, child in value.items():
        known = named.get(name, inner)
        if known is None and closed:
            yield Problem(f"{path}.{name}", None, f'{UNKNOWN} "{path}.{name}"', _meant(path, name, list(named)))
        if known:
            yield from _mistakes(known, child, f"{path}.{name}" if inner is None else f"{path}[{name}]")


def _meant(path: str, name: str, known: Sequence[str]) -> str:
    if now := renamed(f"{path}.{name}"):
        return now
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    if near or len(known) <= FEW:
        return f"did you mean {path}.{near[0]}?" if near else f"fields here: {', '.join(known)}"
    return f"pods of Kubernetes {podschema.kubernetes()} have no such field"


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
    yield from _twice(part, value, path)


def _twice(part: Schema, value: list[Any], path: str) -> Iterator[Problem]:
    keys = part.get("x-kubernetes-list-map-keys", ())
    seen: set[tuple[Any, ...]] = set()
    for i, item in enumerate(value):
        named = tuple(item.get(key) for key in keys) if isinstance(item, Mapping) else ()
        if named and all(isinstance(name, str) for name in named):
            if named in seen:
                words = json.dumps(dict(zip(keys, named, strict=True)), separators=(",", ":"))
                yield Problem(f"{path}[{i}]", None, f"{TWICE}: {words}", "items of this list differ by that; keep one of them")
            seen.add(named)
