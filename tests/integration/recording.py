"""What the API server tells of jobs while they live: watched, made comparable, and kept as files.

A file of `lives/` holds one life: its first line is the job as first seen, each further line the merge patch (RFC 7386) to the next.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hack.cluster.api import Api, ApiError
from tests.integration.operator_harness import JOBS, until

FOLDER = Path(__file__).parent / "lives"
NAMESPACE, TIME, UID = "team-a", "2026-01-01T00:00:00Z", "00000000-0000-4000-8000-000000000000"
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
TIMES = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
_GONE = object()


class Watcher:
    """Keeps every object that a watch of the jobs of one namespace tells, by the job's name, in order."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.seen: dict[str, list[dict[str, Any]]] = {}
        self._api = api
        self._path = f"{JOBS}/namespaces/{namespace}/pstrainingjobs"
        self._version = api.get(self._path)["metadata"]["resourceVersion"]
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        # The API server ends when the run of tests does; nobody reads what comes after.
        with contextlib.suppress(ApiError, OSError, ValueError):
            while True:
                for kind, raw in self._api.watch(self._path, self._version):
                    self._version = raw["metadata"]["resourceVersion"]
                    if kind != "DELETED":
                        self.seen.setdefault(raw["metadata"]["name"], []).append(raw)

    def life(self, name: str, version: str) -> list[dict[str, Any]]:
        """All that was told of the job up to that resourceVersion, which is waited for."""
        until(
            f"the watch to tell of {name} at {version}",
            lambda: any(raw["metadata"]["resourceVersion"] == version for raw in self.seen.get(name, [])),
        )
        return list(self.seen[name])


def normal(raw: Mapping[str, Any], nodes: Mapping[str, str]) -> dict[str, Any]:
    """The object without what differs between two recordings: identities, times, names of namespace and nodes, owners of fields."""
    made = copy.deepcopy(dict(raw))
    for field in ("managedFields", "resourceVersion"):
        made["metadata"].pop(field, None)
    text = json.dumps(made)
    for name, plain in {raw["metadata"]["uid"]: UID, raw["metadata"]["namespace"]: NAMESPACE, **nodes}.items():
        text = text.replace(name, plain)
    text = TIMES.sub(TIME, text)
    return dict(json.loads(text))


def distinct(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without those that are as the one before."""
    return [one for index, one in enumerate(objects) if index == 0 or one != objects[index - 1]]


def write(life: str, objects: list[dict[str, Any]]) -> None:
    """Keep a life as a file of `lives/`."""
    lines = [objects[0], *(patch(before, after) for before, after in itertools.pairwise(objects))]
    (FOLDER / f"{life}.jsonl").write_text("".join(json.dumps(line, sort_keys=True) + "\n" for line in lines))


def read(life: str) -> list[dict[str, Any]]:
    """The objects of a recorded life, in order."""
    first, *patches = (json.loads(line) for line in (FOLDER / f"{life}.jsonl").read_text().splitlines())
    objects = [first]
    for one in patches:
        objects.append(patched(objects[-1], one))
    return objects


def patch(before: Any, after: Any) -> Any:
    """The merge patch that makes `after` of `before`."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return after
    made: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        if before.get(key, _GONE) != value:
            made[key] = patch(before.get(key), value)
    return made


def patched(before: Any, change: Any) -> Any:
    """`before` after the merge patch."""
    if not isinstance(change, dict):
        return change
    made = dict(before) if isinstance(before, dict) else {}
    for key, value in change.items():
        if value is None:
            made.pop(key, None)
        else:
            made[key] = patched(made.get(key), value)
    return made


def face(raw: Mapping[str, Any]) -> tuple[Any, ...]:
    """What the engines look at: the phase, whether the spec has been read, whether it is being deleted, and the conditions."""
    status = raw.get("status") or {}
    told = sorted((one["type"], one["status"], one["reason"]) for one in status.get("conditions") or [])
    read_spec = status.get("observedGeneration") == raw["metadata"].get("generation")
    return (status.get("phase"), read_spec, "deletionTimestamp" in raw["metadata"], *told)
