"""The claim that is made for checkpoints: what `spec.checkpoint.volumeClaimTemplate` may say, and what holds where it says nothing.

The words are StatefulSet's. `psjob validate` and the operator check all of it by the schema of Kubernetes, as they check pod templates.
"""

from __future__ import annotations

from typing import Any

from psjob_operator.api.base import QUANTITY
from psjob_operator.api.field_rule import FieldRule, Json, sized
from psjob_operator.api.spec import Checkpoint

Schema = dict[str, Any]
AT = "spec.checkpoint.volumeClaimTemplate"
MANY, ONE, ONE_POD = "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"
"""Access modes with which shards can write. One node at a time can mount ReadWriteOnce, and one pod at a time ReadWriteOncePod."""
DEFAULT_MODES = (ONE,)
DEFAULT_STORAGE = "10Gi"


def _asks_for(mode: str) -> str:
    """CEL, asked of the spec: the template has this access mode. Optional types have a cost here that the API server does not grant."""
    places = ("volumeClaimTemplate", "volumeClaimTemplate.spec", "volumeClaimTemplate.spec.accessModes")
    return " && ".join([*(f"has(self.checkpoint.{place})" for place in places), f"'{mode}' in self.checkpoint.{places[-1]}"])


ONE_MOUNT = f"!has(self.checkpoint.volume) && !(has(self.checkpoint.disabled) && self.checkpoint.disabled) && !({_asks_for(MANY)})"
"""`one_mount` in CEL."""
_SPEC = f"{AT}.spec"
STORAGE = f"{_SPEC}.resources.requests[storage]"
"""If the Pod API's schema places the size, of which a rule here says more."""


def claim_metadata(template: Json) -> tuple[dict[str, str], dict[str, str]]:
    """(labels, annotations) that the template gives to the claim; `template` may be None."""
    given = (template or {}).get("metadata") or {}
    return dict(given.get("labels") or {}), dict(given.get("annotations") or {})


def claim_spec(template: Json) -> dict[str, Any]:
    """Spec of the claim, with what holds where the template says nothing; `template` may be None."""
    said = _said((template or {}).get("spec"))
    resources = _said(said.pop("resources", None))
    requests = {"storage": DEFAULT_STORAGE, **_said(resources.get("requests"))}
    return {**said, "accessModes": list(said.get("accessModes") or DEFAULT_MODES), "resources": {**resources, "requests": requests}}


def many_nodes(template: Json) -> bool:
    """Several nodes at once can mount the claim that is made."""
    return MANY in claim_spec(template)["accessModes"]


def one_mount(spec: Json) -> bool:
    """A claim is made for the job of this spec as JSON, and one node at a time can mount it."""
    kept = spec.get("checkpoint") or {}
    return not kept.get("disabled") and kept.get("volume") is None and not many_nodes(kept.get("volumeClaimTemplate"))


def retained(checkpoint: Checkpoint) -> bool:
    """The claim that is made outlives the job."""
    policy = checkpoint.persistent_volume_claim_retention_policy
    return policy is None or policy.when_deleted == "Retain"


def claim_schema() -> Schema:
    """The structural schema of the template: what rules are about. The rest of a claim's spec is kept as it is."""
    words = {"type": "object", "maxProperties": 64, "additionalProperties": {"type": "string"}}
    size = {"description": f"Its size. Absent: {DEFAULT_STORAGE}.", "x-kubernetes-int-or-string": True}
    modes = f"Absent: [{ONE}], all shards on one node. {MANY} spreads them. {ONE_POD}: for one shard."
    spec = {
        "accessModes": {
            "description": modes,
            "type": "array",
            "maxItems": 4,
            "items": {"type": "string", "enum": [ONE, MANY, ONE_POD]},
            "x-kubernetes-list-type": "atomic",
        },
        "resources": _open("What it asks for.", {"requests": _open("At least that.", {"storage": size})}),
        "storageClassName": {"description": "Its class.", "type": "string", "maxLength": 253},
        "volumeMode": {"description": "Filesystem, or absent.", "type": "string", "enum": ["Filesystem"]},
    }
    metadata = {name: {"description": f"{name.capitalize()}; psjob.dev/ is reserved.", **words} for name in ("labels", "annotations")}
    properties = {
        "metadata": {"description": "Labels and annotations, and nothing else.", "type": "object", "properties": metadata},
        "spec": _open("Spec of the claim.", spec),
    }
    return {"type": "object", "properties": properties}


def _open(description: str, properties: Schema) -> Schema:
    return {"description": description, "type": "object", "x-kubernetes-preserve-unknown-fields": True, "properties": properties}


def _said(part: Json) -> dict[str, Any]:
    """What is given there; a null is as if it were absent."""
    return {name: value for name, value in (part or {}).items() if value is not None}


def _positive(size: Json) -> bool:
    found = QUANTITY.fullmatch(str(size))
    return found is not None and found["sign"] != "-" and found["number"].strip("0.") != ""


def _made(spec: Json) -> dict[str, Any]:
    return claim_spec((spec.get("checkpoint") or {}).get("volumeClaimTemplate"))


def _apart(field: str) -> FieldRule:
    """`field` is about the claim that is made, and none is made where the job names its volume or keeps nothing."""
    return FieldRule(
        "spec.checkpoint",
        lambda kept: kept.get(field) is None or (kept.get("volume") is None and not kept.get("disabled")),
        "must not be given with spec.checkpoint.volume, nor with spec.checkpoint.disabled: true",
        "no claim is made then; leave one of the two out",
        cel=f"!has(self.{field}) || (!has(self.volume) && !(has(self.disabled) && self.disabled))",
        about=field,
    )


CLAIM_RULES = (
    _apart("volumeClaimTemplate"),
    _apart("persistentVolumeClaimRetentionPolicy"),
    *(
        FieldRule(
            f"{AT}.metadata.{words}",
            lambda keyed: not any(key.startswith("psjob.dev/") for key in keyed),
            "must not have keys that begin with psjob.dev/",
            "those are psjob's own; take another prefix",
            cel="self.all(key, !key.startsWith('psjob.dev/'))",
        )
        for words in ("labels", "annotations")
    ),
    sized(f"{_SPEC}.accessModes", 1, 4, f"leave it out for {ONE}"),
    FieldRule(
        f"{_SPEC}.accessModes",
        lambda modes: ONE_POD not in modes or len(modes) == 1,
        f"must not have {ONE_POD} beside others",
        "Kubernetes takes it by itself only; leave one of them out",
        cel=f"!('{ONE_POD}' in self) || self.size() == 1",
    ),
    FieldRule(
        "spec",
        lambda spec: spec["shards"]["replicas"] < 2 or ONE_POD not in _made(spec)["accessModes"],
        f"must not have {ONE_POD} with two or more spec.shards.replicas",
        f"one pod at a time can mount it; take {ONE}, which puts all shards on one node, or {MANY}",
        cel=f"self.shards.replicas < 2 || !({_asks_for(ONE_POD)})",
        about="checkpoint.volumeClaimTemplate.spec.accessModes",
    ),
    FieldRule(
        f"{_SPEC}.resources.requests.storage",
        _positive,
        "must be a quantity above 0",
        "such as 500Mi, 10Gi or 1Ti",
        cel="isQuantity(string(self)) && quantity(string(self)).isGreaterThan(quantity('0'))",
    ),
)
