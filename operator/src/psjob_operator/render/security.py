"""Security contexts of shard pods: the worker's user, and never more rights than the restricted level allows."""

from __future__ import annotations

import copy

from psjob_operator.render.names import Document

NOBODY = 65532
POWERS = ("privileged", "capabilities", "allowPrivilegeEscalation", "procMount")
"""What a worker may need for its GPUs or its network, and a shard never does."""


def pod_security(worker: Document, trained: Document, user: int | None = NOBODY, of_the_image: bool = False) -> Document:
    """The worker pod's context. Where neither it nor the container names a user, `user`: a shard needs no rights.

    `user`: None: the one whom the namespace gives (OpenShift); of its numbers none may be chosen here. `of_the_image`: only the image's
    own user can start the worker's Python, so that no other is named.
    """
    context: Document = copy.deepcopy(worker.get("securityContext") or {})
    own = trained.get("securityContext") or {}
    if not of_the_image and not any(word in context or word in own for word in ("runAsUser", "runAsNonRoot")):
        context["runAsNonRoot"] = True
        if user is not None:
            context |= {"runAsUser": user, "runAsGroup": context.get("runAsGroup", own.get("runAsGroup", user))}
    context.setdefault("seccompProfile", {"type": "RuntimeDefault"})
    if "fsGroup" not in context and user is not None:
        # A fresh disk belongs to root; with a group of the pod's own its files can be written.
        said = (own.get("runAsGroup"), context.get("runAsGroup"), own.get("runAsUser"), context.get("runAsUser"))
        context["fsGroup"] = next((group for group in said if group), user or NOBODY)
        context.setdefault("fsGroupChangePolicy", "OnRootMismatch")
    return context


def container_security(trained: Document) -> Document:
    """The trained container's context without its powers."""
    context: Document = copy.deepcopy(trained.get("securityContext") or {})
    for power in POWERS:
        context.pop(power, None)
    return context | {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
