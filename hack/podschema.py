"""Writes what `psjob validate` and the operator know of pods: the Pod API's schema as a real API server serves it, without its prose.

`python -m hack.podschema` starts an API server (the newest Kubernetes that psjob is tested on), reads it and writes the file. A test of
tests/integration compares the two, so that another version of Kubernetes cannot come without its fields.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from hack.cluster import lifecycle
from hack.cluster.api import Api
from hack.cluster.options import Options
from hack.cluster.paths import REPO, ClusterError

FILE = REPO / "operator" / "src" / "psjob_operator" / "api" / "podschema.json"
ROOTS = ("PodTemplateSpec", "Volume")
KEPT = (
    "type",
    "format",
    "enum",
    "required",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-map-type",
)
"""What decides whether a value is right, and by what keys lists merge."""

Schema = dict[str, Any]


def text(api: Api) -> str:
    """The file that this API server's schema makes."""
    version = api.get("/version")
    served = api.get("/openapi/v3/api/v1")["components"]["schemas"]
    minor = re.match(r"\d+", version["minor"])
    return written({"kubernetes": f"{version['major']}.{minor and minor[0]}", "definitions": definitions(served)})


def definitions(served: Schema) -> dict[str, Schema]:
    """The definitions that the roots need, by their last name."""
    full = {name.rpartition(".")[2]: name for name in served if name.startswith(("io.k8s.api.core.v1.", "io.k8s.apimachinery."))}
    found: dict[str, Schema] = {}
    todo = list(ROOTS)
    while todo:
        name = todo.pop()
        if name not in found:
            found[name] = _short(served[full[name]], todo)
    return dict(sorted(found.items()))


def written(whole: Schema) -> str:
    """One definition a line, so that a later version's difference can be read."""
    rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(part, sort_keys=True)}" for name, part in whole["definitions"].items())
    return f'{{\n  "kubernetes": {json.dumps(whole["kubernetes"])},\n  "definitions": {{\n{rows}\n  }}\n}}\n'


def _short(part: Schema, todo: list[str]) -> Schema:
    """`part` without prose, and of defaults with texts only, such as TCP, a key. Names that it refers to are added to `todo`."""
    refers = part.get("$ref") or next((one["$ref"] for one in part.get("allOf", ()) if "$ref" in one), "")
    own = {key: part[key] for key in KEPT if key in part}
    if part.get("default") and isinstance(part["default"], str):
        own["default"] = part["default"]
    if refers:
        name = refers.rpartition(".")[2]
        todo.append(name)
        return {**own, "$ref": name}
    if "oneOf" in part:
        own["type"] = [one["type"] for one in part["oneOf"]]
    if "properties" in part:
        own["properties"] = {name: _short(child, todo) for name, child in part["properties"].items()}
    for inner in ("items", "additionalProperties"):
        if isinstance(part.get(inner), dict):
            own[inner] = _short(part[inner], todo)
    return own


def main() -> int:
    """Write the file; the exit status."""
    with tempfile.TemporaryDirectory(prefix="psjob-podschema-") as folder:
        state = Path(folder)
        try:
            made = text(lifecycle.up(Options(state=state)).api())
        except ClusterError as error:
            print(f"podschema: {error}", file=sys.stderr)
            return 1
        finally:
            lifecycle.down(state)
    FILE.write_text(made)
    print(f"written: {FILE.relative_to(REPO)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
