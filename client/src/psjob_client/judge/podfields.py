"""Fields of a pod template that no pod has: the CRD keeps them unseen, and the API server refuses each pod that is made of them.

The official client's models know every field of a pod. A newer cluster may know more, so this warns and never refuses.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from psjob_operator.api.job import PSTrainingJob
from psjob_operator.api.problem import Problem

LIST, OBJECT = re.compile(r"[Ll]ist\[(.+)\]"), re.compile(r"[Dd]ict[\[(]str, (.+)[\])]")
OURS = frozenset({"spec.workers.template", "spec.ps.template"})
TEXTS = ("str", "datetime")


def unknown_fields(job: PSTrainingJob) -> list[Problem]:
    """Every name in a pod template that is no field of a pod, with the nearest that is."""
    found: list[Problem] = []
    spec = job.spec
    templates = {"spec.workers.template": spec.workers.template, **spec.worker_templates(), "spec.ps.template": spec.ps.template}
    for at, template in templates.items():
        if template is not None:
            found += _walk("V1PodTemplateSpec", template, at)
    return found


@cache
def _fields(model: str) -> Mapping[str, str] | None:
    """Field -> type of a model by its name; None: it is no model."""
    from kubernetes.client import models  # a second to import, and only where somebody asks

    known = getattr(models, model, None)
    if known is None or not hasattr(known, "attribute_map"):
        return None
    return {written: known.openapi_types[name] for name, written in known.attribute_map.items()}


def _walk(kind: str, value: Any, at: str) -> Iterator[Problem]:
    if value is None:
        return
    if (inner := LIST.fullmatch(kind)) is not None:
        if isinstance(value, list):
            for i, item in enumerate(value):
                yield from _walk(inner[1], item, f"{at}[{i}]")
        else:
            yield Problem(at, value, "must be a list", "begin each item with a dash")
        return
    if OBJECT.fullmatch(kind) is not None:
        return
    fields = _fields(kind)
    if fields is None:
        return
    if not isinstance(value, Mapping):
        yield Problem(at, value, "must be an object", "indent its fields below it")
        return
    for name, child in value.items():
        if name in fields:
            yield from _walk(fields[name], child, f"{at}.{name}")
            continue
        near = difflib.get_close_matches(str(name), fields, n=1, cutoff=0.6)
        remedy = f"did you mean {near[0]}?" if near else "a pod has no such field: take it out"
        yield Problem(f"{at}.{name}", None, f'unknown field "{name}"', remedy)
