"""The init container of a pod: it copies the library into an image that knows nothing of it, and derives the process's keys.

The keys come from the Secret of the run, which no other container mounts. In an image that has psjob installed its own Python derives.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

from psjob_operator import contract, keys
from psjob_operator.api.template import FOLDER
from psjob_operator.plan import objects
from psjob_operator.plan.objects import ConfigSource
from psjob_operator.render.objects import Document, labels, metadata
from psjob_operator.render.shard import container_security, folder, interpreter, variables

SECRET_VOLUME, SECRET_FOLDER = "psjob-secret", "/psjob-secret"
KEYS_VOLUME, KEYS_FOLDER = "psjob-keys", "/psjob-keys"
KEY_FILE = f"{KEYS_FOLDER}/keys"
DERIVE_CONTAINER = "psjob-derive"
"""The init container of a pod that gets no library."""
DERIVE = r"""
set -eu -o pipefail
fail() { echo "psjob: $1" >&2; exit 1; }
key() { [ -s "$from/$1" ] || fail "the Secret of the run's keys has no entry $1; suspend and resume the job for a new one"; }
mac() {
  key "$1.inner" && key "$1.outer"
  inner=$({ "$busybox" cat "$from/$1.inner" && printf %s "$2"; } | "$busybox" sha256sum | "$busybox" cut -c1-64)
  { "$busybox" cat "$from/$1.outer" && printf %s "$inner" | "$busybox" xxd -r -p; } | "$busybox" sha256sum | "$busybox" cut -c1-64
}
line() { [ "${#2}" = 64 ] || fail "the key $1 cannot be derived"; printf '%s %s\n' "$1" "$2"; }
lent() { key "$1"; line "$1" "$("$busybox" cat "$from/$1")"; }
derive() {
  case $PSJOB_ROLE in
    worker) line worker "$(mac workers "worker:$PSJOB_INDEX:$PSJOB_START")" ;;
    shard)
      line shard "$(mac shards "shard:$PSJOB_INDEX:$PSJOB_ATTEMPT")"
      lent workers
      [ "$PSJOB_INDEX" != 0 ] || lent shards
      lent questions ;;
    *) fail "PSJOB_ROLE is $PSJOB_ROLE, neither worker nor shard" ;;
  esac
}
hand() {
  [ -s "$from/$1" ] || return 0
  file=${to%/*}/$1
  "$busybox" rm -f "$file.part"
  "$busybox" cp "$from/$1" "$file.part" || fail "$file cannot be written"
  "$busybox" chmod 0444 "$file.part" && "$busybox" mv "$file.part" "$file" || fail "$file cannot be written"
}
hand AUTHORITY
case $PSJOB_ROLE in
  shard) hand "OF_SHARD" ;;
  worker) hand "OF_WORKER" ;;
esac
"$busybox" rm -f "$to.part"
derive > "$to.part" || fail "the keys of this process cannot be derived from $from"
"$busybox" chmod 0444 "$to.part" && "$busybox" mv "$to.part" "$to" || fail "$to cannot be written"
"""
DERIVE = DERIVE.replace("AUTHORITY", contract.AUTHORITY)
DERIVE = DERIVE.replace("OF_SHARD", contract.CERTIFICATE.format(index="$PSJOB_INDEX"))
DERIVE = DERIVE.replace("OF_WORKER", contract.WORKER_CERTIFICATE.format(index="$PSJOB_INDEX"))
"""For busybox's shell, with `busybox`, `from` (the Secret's folder) and `to` set: HMAC from sha256sum and the blocks of contract.KEYS."""
COPY_CONTAINER = "psjob-inject"
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
        "name": COPY_CONTAINER,
        "image": runtime_image,
        "imagePullPolicy": "IfNotPresent",
        "command": [f"{SOURCE}/bin/busybox", "sh", "-c", COPY + DERIVE],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": resources_of(container) or {part: dict(own) for part in ("requests", "limits") if own},
        "securityContext": security,
        "volumeMounts": [{"name": VOLUME, "mountPath": FOLDER}],
    }


def key_secret(job: ConfigSource, number: int, run: Mapping[str, bytes], certificates: Mapping[str, bytes]) -> Document:
    """The Secret of the run's keys and certificates, both by name, see contract.KEYS."""
    data = {name: run[name].hex().encode() for name in keys.NAMES} | dict(certificates)
    for name in ("workers", "shards"):
        data[f"{name}.inner"], data[f"{name}.outer"] = keys.blocks(run[name])
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(job, objects.key_secret_name(job.name, job.uid, number), labels(job, "keys")),
        "type": "Opaque",
        "immutable": True,
        "data": {name: base64.b64encode(value).decode() for name, value in data.items()},
    }


def hand_keys(pod: Document, container: Document, init: Document, secret: str) -> None:
    """Lets `init`, which derives the key file, read the Secret, and `container` read that file."""
    pod["volumes"] = [
        *(pod.get("volumes") or []),
        {"name": SECRET_VOLUME, "secret": {"secretName": secret}},
        {"name": KEYS_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
    ]
    init["volumeMounts"] = [
        *(init.get("volumeMounts") or []),
        {"name": SECRET_VOLUME, "mountPath": SECRET_FOLDER, "readOnly": True},
        {"name": KEYS_VOLUME, "mountPath": KEYS_FOLDER},
    ]
    container["volumeMounts"] = [*container["volumeMounts"], {"name": KEYS_VOLUME, "mountPath": KEYS_FOLDER, "readOnly": True}]


def deriver(pod: Document, trained: Document) -> Document:
    """The init container of an image that has psjob installed: its own Python derives, with what that needs and no more rights."""
    python = interpreter(trained.get("command") or [])
    security = container_security(trained, python)
    if "seccompProfile" not in security and "seccompProfile" not in (pod.get("securityContext") or {}):
        security["seccompProfile"] = {"type": "RuntimeDefault"}
    made: Document = {
        "name": DERIVE_CONTAINER,
        "image": trained.get("image"),
        "command": [*python.words, "-m", "psjob.process.derive", "--from", SECRET_FOLDER, "--to", KEY_FILE],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "env": variables(trained),
        "resources": resources_of(trained),
        "securityContext": security,
    }
    if trained.get("imagePullPolicy"):
        made["imagePullPolicy"] = trained["imagePullPolicy"]
    if folder(trained):
        made["workingDir"] = folder(trained)
    return made


def who(values: dict[str, str]) -> list[Document]:
    """Of the variables of a process, those that say which one it is."""
    told = (contract.ENV_ROLE, contract.ENV_INDEX, contract.ENV_START, contract.ENV_ATTEMPT)
    return [{"name": name, "value": values[name]} for name in told if name in values]


def resources_of(container: Document) -> Document:
    """CPU and memory of a container, for one that runs before it: the pod asks for no more, and a limit range takes both or neither."""
    given = container.get("resources") or {}
    found = {
        part: {name: amount for name, amount in (given.get(part) or {}).items() if name in ("cpu", "memory")}
        for part in ("requests", "limits")
    }
    return {part: amounts for part, amounts in found.items() if amounts}
