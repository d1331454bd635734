"""One change of the smallest manifest, and how to make it."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

GOOD: dict[str, Any] = {
    "apiVersion": "psjob.dev/v1alpha1",
    "kind": "PSTrainingJob",
    "metadata": {"name": "digits"},
    "spec": {"shards": {"replicas": 2}, "workers": {"replicas": 4,
        "template": {"spec": {"containers": [{"name": "worker", "image": "me/digits:1", "command": ["python", "train.py"]}]}}}},
}  # fmt: skip
"""The smallest manifest."""
REMOVED = object()
MANY_NODES: dict[str, Any] = {"volumeClaimTemplate": {"spec": {"accessModes": ["ReadWriteMany"]}}}
"""A spec.checkpoint whose claim several nodes mount."""
MY_CLAIM: dict[str, Any] = {"volume": {"persistentVolumeClaim": {"claimName": "mine"}}}
"""A spec.checkpoint on a claim of the user's own."""


@dataclass(frozen=True)
class Case:
    """One change of the smallest manifest."""

    name: str
    change: Mapping[str, Any]
    """Path to new value; REMOVED takes the field away."""
    field: str = ""
    sentence: str = ""
    server: bool = True
    """Whether the API server says so too, with the same path and words."""
    server_field: str | None = None
    """Where the API server names another place."""
    server_sentence: str | None = None
    """Where the API server has words of its own: types, enums, unknown fields, lengths."""

    def manifest(self, name: str | None = None) -> dict[str, Any]:
        """The whole manifest; `name` replaces its metadata.name."""
        made = changed(GOOD, self.change)
        if name is not None:
            made["metadata"]["name"] = name
        return made


def refused(
    name: str, at: str, value: Any, sentence: str, below: str = "",
    server: bool = True, server_field: str | None = None, server_sentence: str | None = None,
) -> Case:  # fmt: skip
    """One value that is refused at its own path, or at the path `below` it."""
    field = re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", at) + below
    return Case(name, {at: value}, field, sentence, server, server_field, server_sentence)


def each_refused(name: str, at: str, values: Iterable[Any], sentence: str, **more: Any) -> list[Case]:
    """Each of these values is refused at one path, with one sentence; `more` as `refused` takes it."""
    return [refused(f"{name}-{value!r}", at, value, sentence, **more) for value in values]


def changed(manifest: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with each path set; numbers in a path are places in a list."""
    made: dict[str, Any] = copy.deepcopy(dict(manifest))
    for path, value in change.items():
        *way, last = path.split(".")
        part: Any = made
        for step in way:
            part = part[int(step)] if isinstance(part, list) else part.setdefault(step, {})
        if value is REMOVED:
            part.pop(last)
        elif isinstance(part, list):
            part[int(last)] = value
        else:
            part[last] = value
    return made
