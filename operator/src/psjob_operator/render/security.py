"""Security contexts of shard pods: the worker's user, and never more rights than the restricted level allows."""

from __future__ import annotations

import copy

from psjob_operator.render.names import Document

NOBODY = 65532
POWERS = ("privileged", "capabilities", "allowPrivilegeEscalation", "procMount")
"""What a worker may need for its GPUs or its network, and a shard never does."""


def pod_security(worker: Document, trained: Document) -> Document:
    """The worker pod's context. Where neither it nor the container names a user, nobody: a shard needs no rights."""
    context: Document = copy.deepcopy(worker.get("securityContext") or {})
    own = trained.get("securityContext") or {}
    if not any(word in context or word in own for word in ("runAsUser", "runAsNonRoot")):
        context |= {"runAsNonRoot": True, "runAsUser": NOBODY, "runAsGroup": context.get("runAsGroup", own.get("runAsGroup", NOBODY))}
    context.setdefault("seccompProfile", {"type": "RuntimeDefault"})
    if "fsGroup" not in context:
        # A fresh disk belongs to root; with a group of the pod's own its files can be written.
        said = (own.get("runAsGroup"), context.get("runAsGroup"), own.get("runAsUser"), context.get("runAsUser"))
        context["fsGroup"] = next((group for group in said if group), NOBODY)
        context.setdefault("fsGroupChangePolicy", "OnRootMismatch")
    return context


def container_security(trained: Document) -> Document:
    """The trained container's context without its powers."""
    context: Document = copy.deepcopy(trained.get("securityContext") or {})
    for power in POWERS:
        context.pop(power, None)
    return context | {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
