"""The hyperparameters of a job, from its manifest: by path, with those that its script is given as flags. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LONGEST = 200
"""Characters of a value."""


def settings(manifest: Mapping[str, Any] | None) -> dict[str, str]:
    """`training.mode`: async, `workers.replicas`: 4, `--lr`: 0.1, `env.SEED`: 3; the script and its flags first."""
    spec = (manifest or {}).get("spec")
    if not isinstance(spec, Mapping):
        return {}
    workers = spec.get("workers")
    found: dict[str, str] = {}
    for container in _containers(workers)[:1]:
        found |= _given(container)
    plain = {key: value for key, value in spec.items() if key not in ("workers", "ps")}
    for part in ("ps", "workers"):
        if isinstance(spec.get(part), Mapping):
            plain[part] = {key: value for key, value in spec[part].items() if key != "template"}
    return found | {path: _text(value) for path, value in _flat(plain)}


def flags(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """What stands alone, and each `--name value`, `--name=value` or lone `--name` by its name; one that comes again holds both values."""
    alone: list[str] = []
    named: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            named[name] = ", ".join(filter(None, (named.get(name, ""), value)))
            name = "" if equals else name
        elif name:
            named[name] = ", ".join(filter(None, (named[name], word)))
            name = ""
        else:
            alone.append(word)
    return alone, {key: value or "yes" for key, value in named.items()}


def _given(container: Mapping[str, Any]) -> dict[str, str]:
    words = [str(word) for key in ("command", "args") for word in container.get(key) or () if isinstance(word, str | int | float)]
    alone, named = flags(words)
    found = {"script": _text(" ".join(alone))} if alone else {}
    found |= {name: _text(value) for name, value in named.items()}
    if container.get("image"):
        found["image"] = _text(container["image"])
    for entry in container.get("env") or ():
        if isinstance(entry, Mapping) and "value" in entry:
            found[f"env.{entry.get('name')}"] = _text(entry["value"])
    return found


def _containers(workers: Any) -> list[Mapping[str, Any]]:
    at = workers
    for key in ("template", "spec", "containers"):
        at = at.get(key) if isinstance(at, Mapping) else None
    return [one for one in at if isinstance(one, Mapping)] if isinstance(at, Sequence) and not isinstance(at, str) else []


def _flat(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, one in value.items():
        if isinstance(one, Mapping):
            yield from _flat(one, f"{path}{key}.")
        elif one is not None:
            yield f"{path}{key}", one


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    text = ", ".join(map(_text, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
