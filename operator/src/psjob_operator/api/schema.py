"""From a model to a structural OpenAPI schema."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]


def openapi(model: type[BaseModel], *, defaults: bool) -> Schema:
    """The model as Kubernetes wants it: no references, no unions with null, no titles; `defaults` says whether to keep those.

    A block that may be left out whole and has fields with defaults gets the default {}.
    """
    whole = model.model_json_schema(by_alias=True)
    return _plain(whole, whole.get("$defs", {}), defaults)


def sized_format(most: int | None) -> str:
    """Format of a whole number up to `most`."""
    return "int32" if most is not None and most < 2**31 else "int64"


def _plain(part: Schema, named: dict[str, Schema], defaults: bool) -> Schema:
    part = _resolved(part, named)
    made: Schema = {}
    if "description" in part:
        made["description"] = " ".join(part["description"].split())
    if "x-kubernetes-int-or-string" in part:
        return {**made, "x-kubernetes-int-or-string": True}
    made["type"] = part.get("type", "string")
    if "enum" in part or "const" in part:
        made["enum"] = part.get("enum") or [part["const"]]
    made |= {word: part[word] for word in ("minimum", "maximum") if word in part}
    if made["type"] == "number":
        made["format"] = "double"
    elif made["type"] == "integer":
        made["format"] = sized_format(part.get("maximum"))
    if defaults and part.get("default") is not None:
        made["default"] = part["default"]
    if made["type"] == "array":
        made["items"] = _plain(part["items"], named, defaults)
    if made["type"] == "object":
        made |= _object(part, named, defaults)
    return made


def _object(part: Schema, named: dict[str, Schema], defaults: bool) -> Schema:
    made: Schema = {}
    if "properties" in part:
        made["properties"] = {name: _plain(child, named, defaults) for name, child in part["properties"].items()}
        for name, child in part["properties"].items():
            if defaults and name not in part.get("required", []) and "$ref" in child:
                made["properties"][name]["default"] = {}
        if part.get("additionalProperties") is True:
            made["x-kubernetes-preserve-unknown-fields"] = True
    elif isinstance(part.get("additionalProperties"), dict):
        made["additionalProperties"] = _plain(part["additionalProperties"], named, defaults)
    else:
        made["x-kubernetes-preserve-unknown-fields"] = True
    if defaults and part.get("required"):
        made["required"] = part["required"]
    elif part.get("required"):
        made["required"] = [name for name in part["required"] if name in part["properties"]]
    return made


def _resolved(part: Schema, named: dict[str, Schema]) -> Schema:
    own = {key: value for key, value in part.items() if key not in ("$ref", "anyOf", "title")}
    if "$ref" in part:
        return {**named[part["$ref"].rsplit("/", 1)[1]], **own}
    if "anyOf" in part:
        (only,) = (choice for choice in part["anyOf"] if choice.get("type") != "null")
        return {**_resolved(only, named), **own}
    return part
