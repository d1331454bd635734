"""The CustomResourceDefinition, made of the models and the rules. The pages of docs/manifest are made of it, so that both say the same.

kube-custom-resource does not fit: it drops all defaults or keeps all, and takes a class's docstring before the field's own text. It
orders short names by chance, and has no place for a default or rules of the whole object. This file is shorter than its corrections.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import yaml
from pydantic import BaseModel

from psjob_operator.api.claim_template import claim_schema
from psjob_operator.api.field_rule import FieldRule
from psjob_operator.api.immutability import immutability_rules
from psjob_operator.api.rules import CUT, EXIT_CODES, FAILURE_RULES, POD_CONDITIONS, REASONS, SIGNALS, STAGES, rules
from psjob_operator.api.spec import JobSpec
from psjob_operator.api.status import JobStatus
from psjob_operator.api.template import template_rules, template_schema
from psjob_operator.contract import GROUP, KIND, PLURAL, VERSION

STATUS_DEFAULT: dict[str, Any] = {
    "phase": "Pending",
    "conditions": [
        {
            "type": type_,
            "status": status,
            "reason": "WaitingForOperator",
            "message": "no psjob operator has seen this job yet",
            "lastTransitionTime": "1970-01-01T00:00:00Z",
        }
        for type_, status in (("Ready", "Unknown"), ("Reconciling", "True"))
    ],
}
"""Status of a job that no operator has touched: `run` is absent. Tools that wait on conditions see it as in progress at once."""

_KEYED = {"x-kubernetes-list-type": "map"}
_ATOMIC = {"x-kubernetes-list-type": "atomic"}
_SHAPES: dict[str, Schema] = {
    "spec.training.ruleOptions": {"maxProperties": 16},
    "spec.training.pipeline.correctOptions": {"maxProperties": 16},
    "spec.stages": {"maxItems": STAGES, **_ATOMIC},
    "spec.stages[].name": {"maxLength": 63},
    "spec.stages[].cut": {"maxLength": CUT},
    "spec.runPolicy.podFailurePolicy.rules": {"maxItems": FAILURE_RULES, **_ATOMIC},
    "spec.runPolicy.podFailurePolicy.rules[].onExitCodes.values": {"maxItems": EXIT_CODES, **_ATOMIC},
    "spec.runPolicy.podFailurePolicy.rules[].onPodConditions": {"maxItems": POD_CONDITIONS, **_ATOMIC},
    "spec.runPolicy.podFailurePolicy.rules[].onPodConditions[].type": {"maxLength": 317},
    "spec.runPolicy.podFailurePolicy.rules[].onSignals": {"maxItems": SIGNALS, **_ATOMIC},
    "spec.runPolicy.podFailurePolicy.rules[].onReasons": {"maxItems": REASONS, **_ATOMIC},
    "spec.runPolicy.podFailurePolicy.rules[].onReasons[]": {"maxLength": 63},
    "spec.checkpoint.volume.emptyDir": {"x-kubernetes-preserve-unknown-fields": True},
    "status.conditions": {**_KEYED, "x-kubernetes-list-map-keys": ["type"], "maxItems": 32},
    "status.conditions[].type": {"maxLength": 64},
    "status.conditions[].reason": {"maxLength": 64},
    "status.conditions[].lastTransitionTime": {"format": "date-time"},
    "status.shards": {**_KEYED, "x-kubernetes-list-map-keys": ["index", "replica"], "maxItems": 256},
    "status.shards[]": {"required": ["index", "replica", "attempt"]},
    "status.roles": {**_KEYED, "x-kubernetes-list-map-keys": ["name"], "maxItems": 8},
    "status.stages": {"maxItems": STAGES, **_ATOMIC},
    "status.stages[].name": {"maxLength": 63},
    "status.workers.problems": {"maxItems": 8, **_ATOMIC},
    "status.internal.pendingStarts": {"maxLength": 24_000},
    "status.workers.succeededIndexes": {"maxLength": 24_000},
    "status.workers.failedIndexes": {"maxLength": 24_000},
    "status.checkpoint.time": {"format": "date-time"},
    "status.checkpoint.path": {"maxLength": 1024},
    "status.progress.time": {"format": "date-time"},
    "status.interruption.since": {"format": "date-time"},
    "status.lastRecovery.time": {"format": "date-time"},
    "status.restarts.causes": {"maxProperties": 64},
    "status.restarts.byProcess": {"maxItems": 8, **_ATOMIC},
    "status.restarts.byProcess[].time": {"format": "date-time"},
    "status.restarts.lastCounted": {"format": "date-time"},
    "status.restarts.lastReset": {"format": "date-time"},
    "status.restarts.lastIncident.time": {"format": "date-time"},
    "status.restarts.lastIncident.nodes": {"maxItems": 8, **_ATOMIC},
    "status.restarts.lastIncident.nodes[]": {"maxLength": 253},
    "status.startTime": {"format": "date-time"},
    "status.completionTime": {"format": "date-time"},
}
"""What Kubernetes wants to know about a field and Python types do not say."""
_LONGEST = {"spec": 253, "status": 1024}

_COLUMNS = (
    ("Phase", "string", ".status.phase", "Where the job stands.", 0),
    ("Shards", "string", ".status.shardsReady", "Shards that serve, of those declared.", 0),
    ("Workers", "string", ".status.workersReady", "Workers that run or have succeeded, of those declared.", 0),
    ("Step", "integer", ".status.progress.step", "Lowest complete step of all workers, as last told.", 0),
    ("Checkpoint", "date", ".status.checkpoint.time", "Age of the last committed checkpoint.", 0),
    ("Restarts", "integer", ".status.restarts.total", "Starts of shards and workers beyond the first.", 0),
    ("Age", "date", ".metadata.creationTimestamp", "Age of the job.", 0),
    ("Message", "string", '.status.conditions[?(@.type=="Ready")].message', "Why the job is ready, or is not.", 0),
    ("Stages", "string", ".status.stagesReady", "Stages whose workers all run or have succeeded, of those declared.", 1),
    ("Mode", "string", ".spec.training.mode", "When a push counts.", 1),
    ("Loss", "number", ".status.progress.loss", "Last loss that the script reported.", 1),
    ("Term", "integer", ".status.internal.term", "Number of the present set of shard starts.", 1),
    ("Counted", "integer", ".status.restarts.counted", "Failures that count against the limit.", 1),
)
ONE_LINE = 1000
"""Characters up to which a part of the CRD stands in one line of YAML."""


Schema = dict[str, Any]


def crd() -> dict[str, Any]:
    """The CRD as a document: structural, described at every depth, the same on every call."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["psj"],
                "categories": ["all", "psjob"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema()},
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [_column(*column) for column in _COLUMNS],
                }
            ],
        },
    }


def crd_yaml() -> str:
    """The CRD as one YAML document, without a header."""
    return yaml.dump(crd(), Dumper=NoAnchors, sort_keys=False, width=1000, allow_unicode=True, default_flow_style=None)


def schema() -> Schema:
    """openAPIV3Schema of the whole object, rules included."""
    spec = openapi(JobSpec, defaults=True)
    workers, stage = spec["properties"]["workers"], spec["properties"]["stages"]["items"]
    for part in (workers, stage):
        part["properties"]["template"].update(deepcopy(template_schema("worker")))
    # The sum of the stages' replicas stands for it; a rule asks for it where there are none.
    workers["required"].remove("replicas")
    spec["properties"]["shards"]["properties"]["template"].update(deepcopy(template_schema("shard")))
    kept = spec["properties"]["checkpoint"]["properties"]
    kept["volumeClaimTemplate"] = {"description": kept["volumeClaimTemplate"]["description"], **claim_schema()}
    kept["volume"]["properties"]["persistentVolumeClaim"]["properties"] = {
        "claimName": {"description": "Name of the claim.", "type": "string", "maxLength": 253}
    }
    status = openapi(JobStatus, defaults=False)
    status["default"] = STATUS_DEFAULT
    whole: Schema = {
        "description": "A training run of a PyTorch model with a parameter server.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"description": "psjob.dev/v1alpha1.", "type": "string"},
            "kind": {"description": "PSTrainingJob.", "type": "string"},
            "metadata": {"type": "object", "properties": {"name": {"description": "Name of the job.", "type": "string"}}},
            "spec": spec,
            "status": status,
        },
    }
    for at, shape in _SHAPES.items():
        node(whole, at).update(shape)
    for part, longest in _LONGEST.items():
        _bound(whole["properties"][part], longest)
    for rule in (*rules(), *template_rules(), *immutability_rules(whole)):
        if rule.bounds:
            place = node(whole, rule.at)
            place["minimum"], place["maximum"] = rule.bounds
            if place["type"] == "integer":
                place["format"] = sized_format(int(rule.bounds[1]))
        if rule.shape:
            node(whole, rule.at).update(rule.shape)
        if rule.cel:
            node(whole, rule.at).setdefault("x-kubernetes-validations", []).append(_validation(rule))
    return whole


def node(whole: Schema, at: str) -> Schema:
    """The part of the schema that `at` names. Raises KeyError if it has none."""
    part = whole
    for step in at.replace("[]", ".[]").split(".") if at else ():
        part = part["items"] if step == "[]" else part["properties"][step]
    return part


def _bound(part: Schema, longest: int) -> None:
    """Gives every string without one a greatest length: CEL's cost is estimated from it."""
    if part.get("type") == "string" and not {"enum", "format", "maxLength"} & part.keys():
        part["maxLength"] = longest
    for child in part.get("properties", {}).values():
        _bound(child, longest)
    if "items" in part and "x-kubernetes-preserve-unknown-fields" not in part["items"] and part["items"].get("type") == "object":
        _bound(part["items"], longest)


def _validation(rule: FieldRule) -> Schema:
    where = {"fieldPath": f".{rule.about}"} if rule.about else {}
    return {"rule": rule.cel, "message": rule.message, **where}


def _column(name: str, type_: str, path: str, description: str, priority: int) -> Schema:
    wide = {"priority": priority} if priority else {}
    return {"name": name, "type": type_, "jsonPath": path, "description": description, **wide}


class NoAnchors(yaml.SafeDumper):
    """No anchors: the two templates share parts, and a reader should not follow references. What fits a line stands in one: of a deep
    schema a third would be indentation."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_data(self, data: Any) -> yaml.Node:
        made = super().represent_data(data)
        if isinstance(made, yaml.CollectionNode):
            made.flow_style = _length(made) <= ONE_LINE
        return made


def _length(part: yaml.Node) -> int:
    """About how many characters it takes in one line."""
    if isinstance(part, yaml.MappingNode):
        return sum(_length(key) + _length(value) + 4 for key, value in part.value)
    if isinstance(part, yaml.SequenceNode):
        return sum(_length(item) + 2 for item in part.value)
    return len(part.value)


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
