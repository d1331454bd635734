"""The kinds of objects that the operator reads and writes, and where the API server keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ResourceKind:
    """One served resource."""

    group: str
    version: str
    plural: str
    kind: str

    @property
    def root(self) -> str:
        """Path of the group and version."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def path(self, namespace: str = "", name: str = "") -> str:
        """Path of one object, or of the collection; an empty namespace means all of them, or a kind without one."""
        place = f"/namespaces/{namespace}" if namespace else ""
        return f"{self.root}{place}/{self.plural}" + (f"/{name}" if name else "")


@dataclass(frozen=True)
class Listing:
    """Objects of a kind at one moment: all of them, or a page."""

    items: Sequence[dict[str, Any]]
    version: int
    """The resourceVersion of that moment."""


JOBS = ResourceKind("psjob.dev", "v1alpha1", "pstrainingjobs", "PSTrainingJob")
PODS = ResourceKind("", "v1", "pods", "Pod")
SERVICES = ResourceKind("", "v1", "services", "Service")
CONFIGS = ResourceKind("", "v1", "configmaps", "ConfigMap")
CLAIMS = ResourceKind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
SECRETS = ResourceKind("", "v1", "secrets", "Secret")
NODES = ResourceKind("", "v1", "nodes", "Node")
LIMITS = ResourceKind("", "v1", "limitranges", "LimitRange")
CORE_EVENTS = ResourceKind("", "v1", "events", "Event")
EVENTS = ResourceKind("events.k8s.io", "v1", "events", "Event")
POLICIES = ResourceKind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
LEASES = ResourceKind("coordination.k8s.io", "v1", "leases", "Lease")

WATCHED: tuple[ResourceKind, ...] = (JOBS, PODS, SERVICES, CONFIGS, CLAIMS, POLICIES)
CHILDREN: tuple[ResourceKind, ...] = (PODS, SERVICES, CONFIGS, CLAIMS, POLICIES)
OPTIONAL = frozenset({POLICIES})
"""Watched only where they are made, and done without where they may not be read."""
