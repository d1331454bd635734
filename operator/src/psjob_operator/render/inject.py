"""Putting the runtime library into a pod whose image knows nothing of it."""

from __future__ import annotations

from psjob_operator.api.template import FOLDER
from psjob_operator.render.keyfile import DERIVE, KEY_FILE, SECRET_FOLDER, resources_of
from psjob_operator.render.names import Document

CONTAINER = "psjob-inject"
VOLUME = "psjob-runtime"
SOURCE = "/psjob-runtime"
"""Where the library lies in the runtime image."""
SHELL = 'export PYTHONPATH=/psjob/lib${PYTHONPATH:+:$PYTHONPATH}; exec "$@"'
"""Only inside the container can the image's own PYTHONPATH be kept: setting it in the pod would erase it."""
COPY = f"""
busybox={SOURCE}/bin/busybox from={SECRET_FOLDER} to={KEY_FILE}
"$busybox" cp -R {SOURCE}/. {FOLDER} || {{ echo "psjob: the library cannot be copied into {FOLDER}" >&2; exit 1; }}
"""
OWN: Document = {"cpu": "100m", "memory": "64Mi"}
"""What it asks for beside a container that asks for nothing."""


def inject(pod: Document, container: Document, runtime_image: str, asks_nothing: bool = False) -> None:
    """Adds the init container that copies the library and derives the keys, and starts `container`'s command with the library on the path;
    args stay as they are. `asks_nothing`: of Pods."""
    pod["initContainers"] = [
        _copier(pod.get("securityContext") or {}, runtime_image, container, {} if asks_nothing else OWN),
        *(pod.get("initContainers") or []),
    ]
    pod["volumes"] = [*(pod.get("volumes") or []), {"name": VOLUME, "emptyDir": {}}]
    container["volumeMounts"] = [*(container.get("volumeMounts") or []), {"name": VOLUME, "mountPath": FOLDER, "readOnly": True}]
    container["command"] = [f"{FOLDER}/bin/sh", "-c", SHELL, "psjob", *container["command"]]


def _copier(pod_security: Document, runtime_image: str, container: Document, own: Document) -> Document:
    security: Document = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    # The pod's own word comes first: a pod that runs as root keeps its user, and would not start with runAsNonRoot here.
    if pod_security.get("runAsUser") != 0:
        security["runAsNonRoot"] = True
    if "seccompProfile" not in pod_security:
        security["seccompProfile"] = {"type": "RuntimeDefault"}
    return {
        "name": CONTAINER,
        "image": runtime_image,
        "imagePullPolicy": "IfNotPresent",
        "command": [f"{SOURCE}/bin/busybox", "sh", "-c", COPY + DERIVE],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": resources_of(container) or {part: dict(own) for part in ("requests", "limits") if own},
        "securityContext": security,
        "volumeMounts": [{"name": VOLUME, "mountPath": FOLDER}],
    }
