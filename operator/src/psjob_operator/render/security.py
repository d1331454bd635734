"""Security contexts of shard pods: the worker's user, and never more rights than the restricted level allows."""

from __future__ import annotations

import copy

from psjob_operator.render.interpreter import Interpreter
from psjob_operator.render.names import Document

NOBODY = 65532
POWERS = ("privileged", "capabilities", "allowPrivilegeEscalation", "procMount")
"""What a worker may need for its GPUs or its network, and a shard never does."""
WORKERS = ("sysctls", "windowsOptions", "seLinuxOptions")
"""What else is not taken from a worker; of seLinuxOptions the level is, by which volumes are shared."""
PROFILES = ("seccompProfile", "appArmorProfile")
BINDING = "NET_BIND_SERVICE"
"""The one capability that the restricted level allows."""


def pod_security(worker: Document, trained: Document, user: int | None = NOBODY, of_the_image: bool = False) -> Document:
    """The worker pod's context. Where neither it nor the container names a user but root, `user`: a shard needs no rights.

    `user`: None: the one whom the namespace gives (OpenShift); of its numbers none may be chosen here. `of_the_image`: only the image's
    own user can start the worker's Python, so that no other is named.
    """
    context = _taken(worker.get("securityContext"), of_the_image)
    own = _taken(trained.get("securityContext"), of_the_image)
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


def container_security(trained: Document, python: Interpreter, of_the_image: bool = False) -> Document:
    """The trained container's context without its powers, and its image read-only where that Python can run so.

    `of_the_image`: as of pod_security.
    """
    taken = _taken(trained.get("securityContext"), of_the_image)
    return _powerless(taken) | ({} if python.writes else {"readOnlyRootFilesystem": True})


def keep_restricted(spec: Document, of_the_image: bool = False) -> None:
    """Whatever template was laid over the shard's pod, by a null too: no container has powers. The user is the template's to choose."""
    context = _without(spec.get("securityContext"), ())
    context.setdefault("seccompProfile", {"type": "RuntimeDefault"})
    if not of_the_image and not any(word in context for word in ("runAsUser", "runAsNonRoot")):
        context["runAsNonRoot"] = True
    spec["securityContext"] = context
    for container in [*(spec.get("initContainers") or []), *spec["containers"]]:
        binds = BINDING in (((container.get("securityContext") or {}).get("capabilities") or {}).get("add") or [])
        container["securityContext"] = _powerless(_without(container.get("securityContext"), POWERS))
        if binds:
            container["securityContext"]["capabilities"]["add"] = [BINDING]


def _taken(context: Document | None, of_the_image: bool) -> Document:
    """What a shard takes of a worker's context: root only where nobody else can start its Python."""
    taken = _without(context, (*POWERS, *WORKERS))
    level = ((context or {}).get("seLinuxOptions") or {}).get("level")
    if level:
        taken["seLinuxOptions"] = {"level": level}
    if not of_the_image:
        if taken.get("runAsUser") == 0:
            del taken["runAsUser"]
        if taken.get("runAsNonRoot") is False:
            del taken["runAsNonRoot"]
    return taken


def _without(context: Document | None, words: tuple[str, ...]) -> Document:
    """A copy without these words, nulls and profiles that confine nothing."""
    kept = {word: value for word, value in (context or {}).items() if word not in words and value is not None}
    return copy.deepcopy({word: value for word, value in kept.items() if word not in PROFILES or value.get("type") != "Unconfined"})


def _powerless(context: Document) -> Document:
    return context | {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
