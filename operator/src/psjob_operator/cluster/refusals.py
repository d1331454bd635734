"""What the refusal of a pod says: whether the pod itself can never be, or something of the namespace is in the way and may pass. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STEP = re.compile(r"\[([^\]]*)\]|([^.\[\]]+)")
LIMIT = re.compile(r"must be (?:less than or )?equal to (\S+) limit of")
"""The API server's words for a request above a limit."""
RANGE = re.compile(r"(?:maximum|minimum) (\S+) usage per (?:Container|Pod) is |(\S+) max limit to request ratio per (?:Container|Pod) is ")
"""Its words where a LimitRange says no by itself."""
VALUE = re.compile(r'(?:Invalid|Unsupported|Duplicate) value: "((?:[^"\\]|\\.)*)"')
QUOTA = "must specify "
"""In the words of a quota: the pods of the namespace have to say what they ask for."""
_ABSENT = object()


@dataclass(frozen=True)
class Cause:
    """One field of which the API server says what is wrong with it."""

    field: str
    message: str


def causes(details: Any) -> tuple[Cause, ...]:
    """Those that name a field, of the details of a Status."""
    told = details.get("causes") if isinstance(details, Mapping) else None
    named = (it for it in told if isinstance(it, Mapping) and it.get("field")) if isinstance(told, list) else ()
    return tuple(Cause(str(it["field"]), str(it.get("message") or "")) for it in named)


def of_the_pod(told: Sequence[Cause], body: Mapping[str, Any]) -> bool:
    """Whether one of these faults is in what was sent. What a LimitRange or a webhook put there is gone once they are."""
    return any(_sent(cause, body) for cause in told)


def limited(told: Sequence[Cause], message: str, body: Mapping[str, Any]) -> tuple[str, ...]:
    """Resources for which a LimitRange keeps the pod from being made; none where it is something else."""
    found = [match[1] for cause in told if (match := LIMIT.search(cause.message)) and not _sent(cause, body)]
    return tuple(dict.fromkeys([*found, *(match[1] or match[2] for match in RANGE.finditer(message))]))


def ranges(found: Iterable[Mapping[str, Any]], resources: Sequence[str]) -> tuple[str, ...]:
    """Names of the LimitRanges that speak of one of these resources for containers or pods."""
    return tuple(
        str(it["metadata"]["name"])
        for it in found
        if any(
            limit.get("type") in ("Container", "Pod") and resource in amounts
            for limit in (it.get("spec") or {}).get("limits") or []
            for amounts in limit.values()
            if isinstance(amounts, Mapping)
            for resource in resources
        )
    )


def limit_words(told: Sequence[Cause], message: str, resources: Sequence[str], names: Sequence[str], namespace: str) -> str:
    """The sentence that names the LimitRange, what it minds, and what people can do."""
    which = f"LimitRange {', '.join(names)}" if names else "a LimitRange"
    minded = [cause.message.removeprefix("Invalid value: ") for cause in told if LIMIT.search(cause.message)]
    said = ", ".join(dict.fromkeys(minded)) or message.rpartition(" is forbidden: ")[2]
    return f"{which} of namespace {namespace} limits {' and '.join(resources)}: {said}; change it, or the template's resources"


def _sent(cause: Cause, body: Mapping[str, Any]) -> bool:
    value, above = _at(body, cause.field)
    if match := LIMIT.search(cause.message):
        limits = above.get("limits") if isinstance(above, Mapping) else None
        return isinstance(limits, Mapping) and match[1] in limits
    if cause.message.startswith("Required value"):
        return value in (_ABSENT, None, "", [], {}) and above is not _ABSENT
    named = VALUE.search(cause.message)
    if value is _ABSENT or named is None:
        return value is not _ABSENT
    return named[1] in json.dumps(value, ensure_ascii=False, default=str)


def _at(body: Any, path: str) -> tuple[Any, Any]:
    """(value at the path, what it stands in); _ABSENT for each that is not there."""
    value, above = body, _ABSENT
    for match in STEP.finditer(path):
        key = match[1] if match[1] is not None else match[2]
        above = value
        if isinstance(value, Mapping):
            value = value.get(key, _ABSENT)
        elif isinstance(value, list) and key.isdecimal():
            value = value[int(key)] if int(key) < len(value) else _ABSENT
        else:
            value = _ABSENT
    return value, above
