"""What a shell completes: modes, and the paths and words of `--set`. Names of jobs are completed in `where`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from psjob_operator.contract import MODES

OF_PODS = "template"
"""A pod's template has thousands of fields, which `kubectl explain` knows."""


def modes(incomplete: str) -> list[str]:
    """Modes separated by commas: what the last of them can be."""
    before, comma, last = incomplete.rpartition(",")
    taken = before.split(",")
    return [f"{before}{comma}{mode}" for mode in MODES if mode.startswith(last) and mode not in taken]


def settings(incomplete: str) -> list[str]:
    """`spec.training.mode=`, and `spec.training.mode=async` once the path is whole."""
    from psjob_operator.api.crd import schema

    path, given, _ = incomplete.partition("=")
    found = []
    for name, words in _leaves(schema()["properties"]["spec"], "spec"):
        if name == path and words:
            found += [f"{name}={word}" for word in words]
        elif not given:
            found.append(f"{name}=")
    return [text for text in found if text.startswith(incomplete)]


def _leaves(node: Mapping[str, Any], path: str) -> Iterator[tuple[str, list[str]]]:
    """Each field that holds one value, and the words that it takes: none where it takes others."""
    for name, field in node.get("properties", {}).items():
        if name == OF_PODS:
            continue
        if "properties" in field:
            yield from _leaves(field, f"{path}.{name}")
        elif field.get("type") != "array":
            yield f"{path}.{name}", ["true", "false"] if field.get("type") == "boolean" else field.get("enum", [])


Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Set a value of the manifest, typed as YAML. Repeatable.", autocompletion=settings),
]
