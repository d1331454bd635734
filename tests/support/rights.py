"""What an RBAC role grants against what the audit log shows to be used, both ways."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

NEVER_CALLED = frozenset({("psjob.dev", "pstrainingjobs/finalizers", "update")})
"""Asked for by clusters that guard blockOwnerDeletion (OpenShift); the right itself is never called."""


class Right(NamedTuple):
    """One verb on one resource."""

    group: str
    resource: str
    verb: str


def granted(rules: Iterable[Mapping[str, Any]]) -> frozenset[Right]:
    """Every right that these rules of a Role or ClusterRole grant."""
    return frozenset(
        Right(group, resource, verb)
        for rule in rules
        for group in rule.get("apiGroups", [])
        for resource in rule["resources"]
        for verb in rule["verbs"]
    )


def used(events: Iterable[Mapping[str, Any]]) -> frozenset[Right]:
    """Every right that requests of the audit log needed; requests that name no resource (discovery, health) need none."""
    return frozenset(
        Right(about.get("apiGroup", ""), "/".join(filter(None, (about["resource"], about.get("subresource")))), event["verb"])
        for event in events
        if (about := event.get("objectRef") or {}).get("resource")
    )


def unused(rules: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]) -> frozenset[Right]:
    """Rights that are granted and that nothing used."""
    return granted(rules) - used(events) - NEVER_CALLED
