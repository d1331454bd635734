"""Judges a manifest before anything is done with it: the same rows and words as the API server, and those that CEL cannot see."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from psjob_operator.api.crd import node
from psjob_operator.api.crd import schema as make_schema
from psjob_operator.api.fieldrule import found as places
from psjob_operator.api.job import PSTrainingJob
from psjob_operator.api.problem import Problem, field_path, shown
from psjob_operator.api.rules import breaches, rules
from psjob_operator.api.structure import mistakes
from psjob_operator.api.template import template_rules
from psjob_operator.contract import GROUP, KIND, VERSION

LARGEST_SPEC = 100 * 1024
"""Bytes of the spec as JSON: kubectl keeps a second copy in an annotation, and all annotations share 256 KiB."""
DEEPEST = 100
schema = cache(make_schema)
TEMPLATES = ("spec.workers.template", "spec.stages[].template", "spec.ps.template")


def validate_job(raw: Any) -> tuple[PSTrainingJob | None, list[Problem]]:
    """The job, or every problem found (never both; never an exception, whatever `raw` is).

    As with the API server, rules are asked only when every value has its type.
    """
    problems = _not_a_job(raw)
    if problems:
        return None, problems
    # What the API server fills in belongs to no manifest that a person wrote, and may be newer than we know.
    mine = {key: value for key, value in raw.items() if key != "status"}
    try:
        job = PSTrainingJob.model_validate(mine)
    except ValidationError as error:
        problems = [_told(detail) for detail in error.errors(include_url=False)]
        return None, problems + _in_templates(raw)
    problems = _in_templates(raw) or _too_large(raw)
    if not problems:
        table = (*rules(), *template_rules())
        told = {"metadata": {"name": job.metadata.name}, "spec": job.spec.to_manifest()}
        problems = [Problem(path, value, rule.limit, rule.remedy) for path, value, rule in breaches(table, told)]
    return (None, problems) if problems else (job, [])


def _not_a_job(raw: Any) -> list[Problem]:
    if not isinstance(raw, Mapping):
        return [Problem("", raw, "must be an object", f"a manifest begins with apiVersion: {GROUP}/{VERSION} and kind: {KIND}")]
    for key, depth in _keys(raw):
        if not isinstance(key, str):
            return [Problem("", None, f"the key {shown(key)} is not text", "write it in quotes, or indent what belongs to it")]
        if depth > DEEPEST:
            return [Problem("", None, f"the manifest is nested deeper than {DEEPEST} levels", "a pod needs some twenty; look for a slip")]
    found = []
    for field, wanted in (("kind", KIND), ("apiVersion", f"{GROUP}/{VERSION}")):
        if raw.get(field) != wanted:
            found.append(Problem(field, raw.get(field), f'must be "{wanted}"', "psjob runs only this kind of object"))
    return found


def _keys(raw: Any) -> Iterator[tuple[Any, int]]:
    """Every key with its depth, without recursion: what is read may be as deep as it likes."""
    todo = [(raw, 1)]
    while todo:
        part, depth = todo.pop()
        if isinstance(part, Mapping):
            yield from ((key, depth) for key in part)
            todo.extend((value, depth + 1) for value in part.values())
        elif isinstance(part, list):
            if depth > DEEPEST:
                yield "", depth
            todo.extend((value, depth + 1) for value in part)


def _in_templates(raw: Mapping[str, Any]) -> list[Problem]:
    whole = schema()
    found = []
    for at in TEMPLATES:
        for path, value in places(raw, at):
            if isinstance(value, Mapping):
                found += mistakes(node(whole, at), value, path)
    return found


def _too_large(raw: Mapping[str, Any]) -> list[Problem]:
    try:
        size = len(json.dumps(raw["spec"], separators=(",", ":"), allow_nan=False).encode())
    except (ValueError, TypeError) as error:
        return [Problem("spec", None, f"cannot be written as JSON ({error})", "use plain text, numbers, lists and objects")]
    if size <= LARGEST_SPEC:
        return []
    return [
        Problem(
            "spec", None, f"is {size} bytes as JSON, at most {LARGEST_SPEC} are taken", "put scripts and data into the image or a ConfigMap"
        )
    ]


def _told(detail: ErrorDetails) -> Problem:
    """Pydantic's finding in the words of psjob."""
    path = field_path(detail["loc"])
    value = detail["input"]
    kind = detail["type"]
    if kind == "missing":
        return Problem(path, None, "Required value", _purpose(path))
    if kind == "extra_forbidden":
        return Problem(path, None, f'unknown field "{path}"', _meant(path))
    if kind == "literal_error":
        choices = ", ".join(f'"{choice}"' for choice in _at(path).get("enum", []))
        return Problem(path, None, f"Unsupported value: {shown(value)}: supported values: {choices}")
    wanted = _WANTED.get(kind)
    if wanted is None:
        return Problem(path, value, detail["msg"])
    return Problem(path, value, f"must be of type {wanted}", _hint(wanted, value, path))


_WANTED = {
    "int_type": "integer",
    "int_from_float": "integer",
    "int_parsing_size": "integer",
    "float_type": "number",
    "bool_type": "boolean",
    "string_type": "string",
    "dict_type": "object",
    "list_type": "array",
    "model_type": "object",
    "model_attributes_type": "object",
}


def _hint(wanted: str, value: Any, path: str) -> str:
    if wanted in ("integer", "boolean") and isinstance(value, str):
        return "write it without quotes"
    return _purpose(path)


def _at(path: str) -> dict[str, Any]:
    try:
        return node(schema(), re.sub(r"\[\d+\]", "[]", path))
    except (KeyError, TypeError):
        return {}


def _purpose(path: str) -> str:
    return str(_at(path).get("description", ""))


def _meant(path: str) -> str:
    parent, _, name = path.rpartition(".")
    known = list(_at(parent).get("properties", {}))
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    if near:
        return f"did you mean {parent}.{near[0]}?" if parent else f"did you mean {near[0]}?"
    return f"fields here: {', '.join(known)}"
