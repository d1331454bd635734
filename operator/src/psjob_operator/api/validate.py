"""Judges a manifest before anything is done with it: the same rows and words as the API server, and those that CEL cannot see.

First the types: those of spec by the models, those inside a pod template by the CRD's schema and by the schema of Kubernetes. Only a
manifest of the right types is asked for rules.

A name that a field or value had before is refused with the one to write in its place, and never read. The API server knows no old names: it
drops them from a job that was stored before, and refuses them in `kubectl apply` as unknown.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from psjob_operator.api import claim_template, template
from psjob_operator.api.base import QUANTITY
from psjob_operator.api.crd import node
from psjob_operator.api.crd import schema as make_schema
from psjob_operator.api.field_rule import Problem, breaches, field_path, shown
from psjob_operator.api.field_rule import found as places
from psjob_operator.api.rules import rules
from psjob_operator.api.spec import PSTrainingJob
from psjob_operator.api.template import WHOLE_GPUS, template_rules
from psjob_operator.contract import GROUP, KIND, VERSION

LARGEST_SPEC = 100 * 1024
"""Bytes of the spec as JSON: kubectl keeps a second copy in an annotation, and all annotations share 256 KiB."""
MOST_PROBLEMS = 500
"""Told of one manifest."""
DEEPEST = 100
schema = cache(make_schema)
RULES = "x-kubernetes-validations"
OVERLAY, VOLUME = "spec.shards.template", "spec.checkpoint.volume"
DECLARED = ("emptyDir", "persistentVolumeClaim")
"""Sources that the CRD has a schema of: a null of theirs is dropped."""
TEMPLATES = ("spec.workers.template", "spec.stages[].template", OVERLAY)
_COMMANDS = "such as [{name: worker, image: me/train:1, command: [python, train.py]}]"
MOST_TOLD = 500
"""To say what was meant takes time for each."""
REQUIRED, UNKNOWN, UNSUPPORTED, TWICE = "Required value", "unknown field", "Unsupported value", "Duplicate value"
FEW = 10
"""Fields of an object that are all named where none is like the one that is unknown."""
WHOLE = {"int32": 2**31, "int64": 2**63}
BOOLEANS = ("true", "false", "yes", "no", "on", "off")
"""Words that YAML takes for truth values if they have no quotes."""
_CLAIM = "spec.checkpoint.volumeClaimTemplate"
RENAMED_FIELDS: Final = {
    "spec.ps": "write spec.shards: {replicas: 2} for ps: {shards: 2}",
    "spec.shards.shards": "write spec.shards.replicas",
    "spec.shards.shardTimeoutSeconds": "write spec.shards.progressDeadlineSeconds",
    "spec.training.backupWorkers": "write spec.training.sync: {backupWorkers: 1}",
    "spec.training.reduction": "write spec.training.sync: {reduction: median}",
    "spec.training.maxGradNorm": "write spec.training.sync: {maxGradNorm: 1.0}",
    "spec.training.staleness": "write spec.training.bounded: {staleness: 3} or spec.training.threshold: {staleness: 16}",
    "spec.training.creditMebibytes": "write spec.training.gradientMebibytes, for all workers of a shard together",
    "spec.training.splits": "write spec.training.softsync: {splits: 2}",
    "spec.workers.stepTimeoutSeconds": "write spec.workers.progressDeadlineSeconds",
    "spec.runPolicy.failureRules": "write spec.runPolicy.podFailurePolicy: {rules: [...]}, with onSignals and onReasons",
    "spec.runPolicy.podFailurePolicy.rules[].signals": "write spec.runPolicy.podFailurePolicy.rules[].onSignals",
    "spec.runPolicy.podFailurePolicy.rules[].reasons": "write spec.runPolicy.podFailurePolicy.rules[].onReasons",
    "spec.checkpoint.interval": "write spec.checkpoint.periodSeconds: 30 for interval: 30s",
    "spec.checkpoint.size": f"write {_CLAIM}: {{spec: {{resources: {{requests: {{storage: 10Gi}}}}}}}}",
    "spec.checkpoint.accessMode": f"write {_CLAIM}: {{spec: {{accessModes: [ReadWriteMany]}}}}",
    "spec.checkpoint.retain": "write spec.checkpoint.persistentVolumeClaimRetentionPolicy: {whenDeleted: Delete} for retain: false",
    "spec.checkpoint.volume.claim": "write spec.checkpoint.volume: {persistentVolumeClaim: {claimName: my-claim}}",
}
"""Path of a field that has gone -> the sentence that names the new one."""
RENAMED_VALUES: Final[dict[str, dict[str, str]]] = {
    "spec.injection": {"auto": "Auto", "none": "None"},
    "spec.shards.placement": {"spread": "Spread", "packed": "Packed", "colocated": "Colocated"},
    "spec.training.updateAt": {"server": "shard"},
}
"""Path of a field -> its old values, each with the new one."""


def validate_job(raw: Any) -> tuple[PSTrainingJob | None, list[Problem]]:
    """The job, or every problem found (never both; never an exception, whatever `raw` is).

    As with the API server, rules are asked only when every value has its type. Of a spec above LARGEST_SPEC nothing else is said: to look
    takes seconds for a mebibyte.
    """
    problems = _not_an_object(raw) or _too_large(raw) or _odd_keys(raw) or _of_another_kind(raw)
    if problems:
        return None, problems
    # What the API server fills in belongs to no manifest that a person wrote, and may be newer than we know.
    mine = {key: value for key, value in raw.items() if key != "status"}
    try:
        job = PSTrainingJob.model_validate(mine)
    except ValidationError as error:
        found = error.errors(include_url=False)
        problems = [_told(detail) for detail in found[:MOST_PROBLEMS]]
        if len(found) > MOST_PROBLEMS:  # to look for the word that was meant takes time for each
            rest = len(found) - MOST_PROBLEMS
            problems.append(Problem("spec", None, f"has {rest} more problems", f"correct the first {MOST_PROBLEMS} and ask again"))
        fields = {problem.field for problem in problems}
        return None, problems + [problem for problem in _in_templates(raw) if problem.field not in fields]
    problems = _in_templates(raw) or _not_json(raw)
    if not problems:
        table = (*rules(), *template_rules())
        told = {"metadata": {"name": job.metadata.name}, "spec": job.spec.to_manifest()}
        problems = [
            Problem(path, value, rule.limit, rule.remedy, admitted=not rule.at_admission) for path, value, rule in breaches(table, told)
        ]
    return (None, problems) if problems else (job, [])


def every_problem(raw: Any) -> tuple[PSTrainingJob | None, list[Problem]]:
    """As `validate_job`. If a value has not its type, also what the rules say of the rest, which the API server tells in a second round."""
    job, found = validate_job(raw)
    corrected = _corrected(raw, found)
    if corrected is None:
        return job, found
    known = {problem.field for problem in found}
    # What was taken out may be what a rule of the same object asks for.
    gone = {problem.field.rpartition(".")[0] for problem in found if not problem.limit.startswith((UNKNOWN, UNSUPPORTED, REQUIRED))}
    return job, found + [
        problem for problem in validate_job(corrected)[1]
        if problem.field not in known and problem.limit != REQUIRED and problem.field.rpartition(".")[0] not in gone
    ]  # fmt: skip


def _corrected(raw: Any, found: Sequence[Problem]) -> Any:
    """A copy with a value that may stand there in place of each that may not; None if there is nothing to correct so."""
    made = copy.deepcopy(raw) if found and all(problem.field.startswith(("spec.", "metadata.")) for problem in found) else None
    for problem in found if made is not None else ():
        *way, last = re.findall(r"[^.\[\]]+", problem.field)
        try:
            part: Any = made
            for step in way:
                part = part[int(step)] if isinstance(part, list) else part[step]
            if isinstance(part, list):
                part[int(last)] = _possible(problem.field)
                continue
            value = part.pop(last, None)
            if problem.limit.startswith(UNSUPPORTED):
                known = [str(each) for each in _at(problem.field)["enum"]]
                part[last] = _renamed_value(problem.field, value) or difflib.get_close_matches(str(value), known, n=1)[0]
                continue
            meant = _near(problem.field) if problem.limit.startswith(UNKNOWN) else ""
            if meant:
                part[meant.rpartition(".")[2]] = value
            elif not problem.limit.startswith(UNKNOWN) and (problem.limit == REQUIRED or last in _required(problem.field)):
                part.setdefault(last, _possible(problem.field))
        except (KeyError, IndexError, ValueError, TypeError, AttributeError):
            return None
    return made


def _required(path: str) -> list[str]:
    return list(_at(path.rpartition(".")[0]).get("required", []))


def _possible(path: str) -> Any:
    """A value that the schema takes at this path."""
    part = _at(path)
    if "enum" in part:
        return part["enum"][0]
    return {"integer": part.get("minimum", 1), "number": part.get("minimum", 1.0), "boolean": False, "object": {}, "array": []}.get(
        part.get("type", "string"), "a"
    )


def _not_an_object(raw: Any) -> list[Problem]:
    if isinstance(raw, Mapping):
        return []
    return [Problem("", raw, "must be an object", f"a manifest begins with apiVersion: {GROUP}/{VERSION} and kind: {KIND}")]


def _of_another_kind(raw: Mapping[str, Any]) -> list[Problem]:
    found = []
    for field, wanted in (("kind", KIND), ("apiVersion", f"{GROUP}/{VERSION}")):
        if raw.get(field) != wanted:
            found.append(Problem(field, raw.get(field), f'must be "{wanted}"', "psjob runs only this kind of object"))
    return found


def _odd_keys(raw: Mapping[str, Any]) -> list[Problem]:
    for key, depth in _keys(raw):
        if not isinstance(key, str):
            return [Problem("", None, f"the key {shown(key)} is not text", "write it in quotes, or indent what belongs to it")]
        if depth > DEEPEST:
            return [Problem("", None, f"the manifest is nested deeper than {DEEPEST} levels", "a pod needs some twenty; look for a slip")]
    return []


def _keys(raw: Any) -> Iterator[tuple[Any, int]]:
    """Every key with its depth, without recursion: what is read may be as deep as it likes."""
    todo = [(raw, 1)]
    while todo:
        part, depth = todo.pop()
        if isinstance(part, Mapping):
            yield from ((key, depth) for key in part)
            part = list(part.values())
        elif depth > DEEPEST:
            yield "", depth
        todo.extend([(value, depth + 1) for value in part if value and isinstance(value, dict | list)])


def _in_templates(raw: Mapping[str, Any]) -> list[Problem]:
    whole = schema()
    found: list[Problem] = []
    of_pods: list[Problem] = []
    for at in TEMPLATES:
        for path, value in places(raw, at):
            if isinstance(value, Mapping):
                found += mistakes(node(whole, at), value, path)
                of_pods += pod_mistakes(template.definition("PodTemplateSpec"), value, path, overlay=at == OVERLAY)
    for path, value in places(raw, claim_template.AT):
        if isinstance(value, Mapping):
            found += mistakes(node(whole, claim_template.AT), value, path)
            # What it leaves out, such as its spec, psjob fills in.
            of_pods += pod_mistakes(template.definition("PersistentVolumeClaimTemplate"), value, path, overlay=True)
    for path, value in places(raw, VOLUME):
        if isinstance(value, Mapping):
            of_pods += pod_mistakes(template.volume_source(), value, path)
            # The API server counts a source that is null.
            empty = [name for name, source in value.items() if source is None and name not in DECLARED]
            found += [Problem(f"{path}.{name}", None, "must be a volume source, not null", "leave it out") for name in empty]
    # What both schemas know, and what a rule of psjob's own forbids, is said once, in the words of the CRD.
    said = {problem.field for problem in found}
    said |= {problem.field for problem in of_pods if problem.limit.startswith(UNSUPPORTED) and _at(problem.field).get(RULES)}
    said |= {claim_template.STORAGE}
    return found + [problem for problem in of_pods if problem.field not in said]


def too_large(size: int) -> list[Problem]:
    """What is to be said of a spec of so many bytes as JSON."""
    if size <= LARGEST_SPEC:
        return []
    remedy = "put scripts and data into the image or a ConfigMap; nothing else of it was looked at"
    return [Problem("spec", None, f"is {size} bytes as JSON, at most {LARGEST_SPEC} are taken", remedy)]


def _too_large(raw: Mapping[str, Any]) -> list[Problem]:
    """What has no size as JSON has another problem, which is told later."""
    try:
        return too_large(len(json.dumps(raw.get("spec"), separators=(",", ":")).encode()))
    except (RecursionError, ValueError, TypeError):
        return []


def _not_json(raw: Mapping[str, Any]) -> list[Problem]:
    try:
        json.dumps(raw["spec"], allow_nan=False)
    except (ValueError, TypeError) as error:
        return [Problem("spec", None, f"cannot be written as JSON ({error})", "use plain text, numbers, lists and objects")]
    return []


def _told(detail: ErrorDetails) -> Problem:
    """Pydantic's finding in the words of psjob."""
    path = field_path(detail["loc"])
    value = detail["input"]
    kind = detail["type"]
    if kind == "missing":
        return Problem(path, None, REQUIRED, _purpose(path))
    if kind == "extra_forbidden":
        return Problem(path, None, f'{UNKNOWN} "{path}"', _meant(path))
    if kind == "literal_error":
        return unsupported(path, value, [str(choice) for choice in _at(path).get("enum", [])])
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
    if isinstance(value, str) and _is(wanted, value):
        return "write it without quotes"
    return _purpose(path)


def _is(wanted: str, text: str) -> bool:
    """Would the text be of that type if it had no quotes?"""
    if wanted == "boolean":
        return text.lower() in BOOLEANS
    form = {"integer": r"[+-]?\d+", "number": r"[+-]?\d*\.?\d+(e[+-]?\d+)?"}.get(wanted)
    return form is not None and re.fullmatch(form, text) is not None


def _at(path: str) -> dict[str, Any]:
    try:
        return node(schema(), re.sub(r"\[\d+\]", "[]", path))
    except (KeyError, TypeError):
        return {}


def _purpose(path: str) -> str:
    return str(_at(path).get("description", ""))


def _meant(path: str) -> str:
    if now := _renamed_field(path):
        return now
    near = _near(path)
    return f"did you mean {near}?" if near else f"fields here: {', '.join(_at(path.rpartition('.')[0]).get('properties', {}))}"


def _near(path: str) -> str:
    """The path of the field whose name is like the last one of `path`; empty if there is none."""
    parent, _, name = path.rpartition(".")
    near = difflib.get_close_matches(name, list(_at(parent).get("properties", {})), n=1, cutoff=0.7)
    return f"{parent}.{near[0]}".lstrip(".") if near else ""


Schema = dict[str, Any]


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
    near, now = difflib.get_close_matches(str(value), known, n=1), _renamed_value(path, value)
    choices = ", ".join(f'"{choice}"' for choice in known)
    remedy = f"write {now}" if now else f"did you mean {near[0]}?" if near else ""
    return Problem(path, None, f"{UNSUPPORTED}: {shown(value)}: supported values: {choices}", remedy)


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
    if part.get("format") == template.QUANTITY_FORMAT and not QUANTITY.fullmatch(str(value)):
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
            yield Problem(f"{path}.{name}", None, f'{UNKNOWN} "{path}.{name}"', _meant_field(path, name, list(named)))
        if known:
            yield from _mistakes(known, child, f"{path}.{name}" if inner is None else f"{path}[{name}]")


def _meant_field(path: str, name: str, known: Sequence[str]) -> str:
    if now := _renamed_field(f"{path}.{name}"):
        return now
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    if near or len(known) <= FEW:
        return f"did you mean {path}.{near[0]}?" if near else f"fields here: {', '.join(known)}"
    return f"pods of Kubernetes {template.kubernetes()} have no such field"


def _array(part: Schema, value: list[Any], path: str) -> Iterator[Problem]:
    if len(value) > part.get("maxItems", len(value)):
        yield Problem(path, None, f"Too many: {len(value)}: must have at most {part['maxItems']} items")
    if len(value) < part.get("minItems", 0):
        yield Problem(path, None, f"must have at least {part['minItems']} item", _COMMANDS)
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


def _renamed_field(path: str) -> str:
    """What to write in place of the field at `path`; empty if it never was one."""
    return RENAMED_FIELDS.get(re.sub(r"\[\d+\]", "[]", path), "")


def _renamed_value(path: str, value: Any) -> str:
    """The present word for a value that `path` took before; empty if it never did."""
    return RENAMED_VALUES.get(re.sub(r"\[\d+\]", "[]", path), {}).get(str(value), "")
