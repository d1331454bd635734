"""Lints the CRD by the rules of kube-api-linter, under its names, as far as a schema shows them: `python -m hack.crdlint`.

kube-api-linter itself reads Go types and their markers, and here the CRD is made of pydantic models. Each exception has its reason.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

from psjob_operator.api.crd import crd

Schema = dict[str, Any]
TEMPLATES = r"spec\.(workers|shards|stages\[\])\.template\."
EXCEPTIONS: dict[str, dict[str, str]] = {
    "nofloats": {
        r"spec\.training\..*": "hyperparameters are floats in torch, and no rule compares two of them",
        r"status\..*": "measured values, for people and plots",
    },
    "nobools": {
        r"spec\.suspend": "the word of batch/v1 and of queues",
        r"spec\.checkpoint\.disabled": "two states, of which the API has served both since it began",
        TEMPLATES + r".*": "a field of the Pod API",
    },
    "maxlength": {
        rf"({TEMPLATES}|spec\.checkpoint\.volumeClaimTemplate\.).*": (
            "the Pod API bounds neither values nor words; all of a spec together is bounded by the operator"
        )
    },
    "commentstart": {r".*\[\]": "an item is described by its list", r"metadata": "apimachinery's own"},
}
"""By rule, paths that it passes over, and why."""
INTEGERS = {"int32": 2**31, "int64": 2**63}


def findings(document: Schema) -> list[str]:
    """`rule: path: sentence` for each breach, in the order of the schema."""
    found = []
    for version in document["spec"]["versions"]:
        whole = version["schema"]["openAPIV3Schema"]
        if "status" in whole["properties"] and "status" not in version.get("subresources", {}):
            found.append("statussubresource: status: the version has no status subresource")
        for at, part in _nodes(whole):
            found += [
                f"{rule}: {at or '(root)'}: {words}"
                for rule, words in (*_of_type(at, part), *_of_shape(at, part))
                if not _excepted(rule, at)
            ]
    return found


def _nodes(part: Schema, at: str = "") -> Iterator[tuple[str, Schema]]:
    yield at, part
    for name, child in part.get("properties", {}).items():
        yield from _nodes(child, f"{at}.{name}".lstrip("."))
    for inner in ("items", "additionalProperties"):
        if isinstance(part.get(inner), dict):
            yield from _nodes(part[inner], f"{at}[]")


def _of_type(at: str, part: Schema) -> Iterator[tuple[str, str]]:
    kind = part.get("type")
    if kind == "integer":
        limit = INTEGERS.get(part.get("format", ""))
        if limit is None:
            yield "integers", "an integer has format int32 or int64"
        elif not -limit <= part.get("minimum", -limit - 1) <= part.get("maximum", limit) < limit:
            yield "integers", f"it has a minimum and a maximum within {part['format']}"
    elif kind == "number":
        yield "nofloats", "a float loses digits on its way through other languages"
    elif kind == "boolean":
        yield "nobools", "a word can have a third value later, a boolean cannot"
    elif kind == "string":
        if not {"enum", "format", "maxLength"} & part.keys() and not at.startswith("metadata") and at not in ("apiVersion", "kind"):
            yield "maxlength", "a text has maxLength, enum or format"
    elif kind == "array":
        if "maxItems" not in part:
            yield "maxlength", "a list has maxItems"
        if part.get("x-kubernetes-list-type") not in ("atomic", "set", "map"):
            yield "ssatags", "a list has x-kubernetes-list-type"
        keys = part.get("x-kubernetes-list-map-keys", [])
        if (part.get("x-kubernetes-list-type") == "map") != bool(keys) or not set(keys) <= set(part["items"].get("required", [])):
            yield "ssatags", "a list of type map has keys that each item requires, and no other list has keys"
    elif kind == "object" and "additionalProperties" in part and "maxProperties" not in part:
        yield "maxlength", "a map has maxProperties"


def _of_shape(at: str, part: Schema) -> Iterator[tuple[str, str]]:
    named, name = part.get("properties", {}), at.rpartition(".")[2].removesuffix("[]")
    if part.get("nullable"):
        yield "nonullable", "a field is left out, not null"
    if at and not part.get("description", "").strip():
        yield "commentstart", "it has a description"
    if at and not at.endswith("[]") and "/" not in name and not re.fullmatch(r"[a-z][A-Za-z0-9]*", name):
        yield "jsontags", "a name is in camelCase"
    if "timestamp" in name.lower() and not at.startswith("metadata"):
        yield "notimestamp", "a name ends in Time"
    for field in part.get("required", []):
        if field not in named:
            yield "optionalorrequired", f"{field} is required and not declared"
        elif "default" in named[field]:
            yield "optionalorrequired", f"{field} is required and has a default"
    if at == "status" and part.get("required"):
        yield "statusoptional", "fields of a status are optional"
    if at == "status.conditions":
        wanted = {"type", "status", "reason", "message", "lastTransitionTime", "observedGeneration"}
        if part.get("x-kubernetes-list-map-keys") != ["type"] or set(part["items"].get("properties", {})) != wanted:
            yield "conditions", "they are metav1.Condition, in a map by type"


def _excepted(rule: str, at: str) -> bool:
    return any(re.fullmatch(pattern, at) for pattern in EXCEPTIONS.get(rule, {}))


def main() -> int:
    """Print what is found; the exit status."""
    found = findings(crd())
    print("\n".join(found) or "crdlint: 0 findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
