"""What a pod may say, by the schema that an API server serves: podschema.json, which `python -m hack.podschema` reads from one."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

Schema = dict[str, Any]
QUANTITY = "quantity"
"""Format of a value such as 512Mi, which OpenAPI has no word for."""


@cache
def kubernetes() -> str:
    """The version of Kubernetes whose pods these are, such as 1.37."""
    return str(_file()["kubernetes"])


@cache
def definition(name: str) -> Schema:
    """A definition such as PodTemplateSpec, with everything that it refers to in place. Parts are shared: change nothing in it."""
    made: Schema = _resolved(_file()["definitions"][name])
    return made


@cache
def volume_source() -> Schema:
    """A volume of a pod without its name."""
    whole = definition("Volume")
    sources = {name: part for name, part in whole["properties"].items() if name != "name"}
    return {**whole, "required": [], "properties": sources}


@cache
def _file() -> Schema:
    read: Schema = json.loads(resources.files("psjob_operator.api").joinpath("podschema.json").read_text())
    return read


def _resolved(part: Schema) -> Schema:
    own = {key: value for key, value in part.items() if key != "$ref"}
    if "$ref" in part:
        # Pods are finite: no definition of theirs holds itself.
        return {**definition(part["$ref"]), **own} | ({"format": QUANTITY} if part["$ref"] == "Quantity" else {})
    if "properties" in part:
        own["properties"] = {name: _resolved(child) for name, child in part["properties"].items()}
    for inner in ("items", "additionalProperties"):
        if inner in part:
            own[inner] = _resolved(part[inner])
    return own
