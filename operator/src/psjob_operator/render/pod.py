"""The pod of one worker or shard.

A worker's is the user's template, untouched but for what psjob adds to each pod; shard.py makes a shard's. The init container copies the
library into an image that knows nothing of it (`inject`), and derives the process's keys. The keys come from the Secret of the run, which
no other container mounts. In an image that has psjob installed its own Python derives.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Mapping
from dataclasses import dataclass

from psjob_operator import contract, keys
from psjob_operator.api.status import Pinned
from psjob_operator.api.template import FOLDER, TRAINED, container_of
from psjob_operator.contract import GROUP
from psjob_operator.plan import objects
from psjob_operator.plan.actions import CreateProcess
from psjob_operator.plan.objects import CHECKPOINTS, ConfigSource
from psjob_operator.plan.observed_state import Role
from psjob_operator.render.objects import (
    ANNOTATION_CONTAINER,
    ANNOTATION_DEFAULT,
    ANNOTATION_WAITED,
    CONFIG_FILE,
    LABEL_ATTEMPT,
    LABEL_INDEX,
    LABEL_NUMBER,
    LABEL_PAIR,
    LABEL_ROLE,
    LABEL_STAGE,
    LABEL_START,
    LABEL_TERM,
    LABEL_VOLUME_GROUP,
    Document,
    beside,
    labels,
    metadata,
)
from psjob_operator.render.shard import (
    AFFINITY,
    NOBODY,
    container_security,
    folder,
    interpreter,
    merge_templates,
    shard_template,
    variables,
)

CONFIG_FOLDER = "/psjob-config"
CONFIG_VOLUME = "psjob-config"
PAIR_VOLUME, PAIR_FOLDER = "psjob-pair", "/psjob-pair"
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


def pod(job: ConfigSource, process: CreateProcess, shard_user: int | None = NOBODY) -> Document:
    """The pod of `process`; made once by POST, never changed. `shard_user`: who shards are where the job names nobody; None: whom the
    namespace gives."""
    return Pods(job, shard_user).pod(process)


class Pods:
    """The pods of a job: what those of a role and stage have in common is built once, in documents that are not to be changed."""

    def __init__(self, job: ConfigSource, shard_user: int | None = NOBODY, asks_nothing: bool = False) -> None:
        """`shard_user`: of `pod`; `asks_nothing`: a LimitRange says what a container has that no template speaks of, and not psjob."""
        self._job = job
        self._asks_nothing = asks_nothing
        self._user = shard_user
        self._common: dict[tuple[Role, str, int | None, Pinned], _Common] = {}

    def pod(self, process: CreateProcess) -> Document:
        """The pod of `process`."""
        place = (process.role, _stage(self._job, process), process.volume_group, process.pinned)
        common = self._common.get(place)
        if common is None:
            common = self._common[place] = _common(self._job, process, self._user, self._asks_nothing)
        containers = list(common.template["spec"]["containers"])
        trained = containers[common.position]
        # Ours come first, so that the user's variables may refer to them as $(PSJOB_INDEX).
        values = pod_environment(self._job, process, trained.get("terminationMessagePath"))
        env = [*({"name": name, "value": value} for name, value in values.items()), *trained["env"]]
        containers[common.position] = {**trained, "env": env}
        first, *others = common.template["spec"]["initContainers"]
        inits = [{**first, "env": [*who(values), *(first.get("env") or [])]}, *others]
        host = objects.hostname(self._job.name, process.role, process.index)
        spec = {**common.template["spec"], "initContainers": inits, "containers": containers, "hostname": host}
        if process.pair is not None:
            _mount_pair(self._job, process, process.pair, spec, containers, common.position)
        if process.beside is not None:
            spec["affinity"] = merge_templates(beside(self._job, process.beside), spec.get("affinity") or {}, AFFINITY)
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": _metadata(self._job, process, common.template, trained["name"]),
            "spec": spec,
        }


def _mount_pair(job: ConfigSource, process: CreateProcess, number: int, spec: Document, containers: list[Document], position: int) -> None:
    """Has the container at `position` mount the volume of its pair. `spec` and `containers` are the pod's own; what they hold is not."""
    claim = objects.pair_claim_name(job.name, job.uid, process.index, number)
    spec["volumes"] = [*spec["volumes"], {"name": PAIR_VOLUME, "persistentVolumeClaim": {"claimName": claim}}]
    mounts = [*containers[position]["volumeMounts"], {"name": PAIR_VOLUME, "mountPath": PAIR_FOLDER}]
    containers[position] = {**containers[position], "volumeMounts": mounts}


@dataclass(frozen=True)
class _Common:
    """What the pods of a role and a stage have in common."""

    template: Document
    position: int
    """Of the container that is trained in, or serves, among the containers."""


def _common(job: ConfigSource, process: CreateProcess, shard_user: int | None, asks_nothing: bool) -> _Common:
    name = process.pinned.container or TRAINED
    if process.role == "shard":
        template, container = shard_template(job, process.volume_group, name, shard_user, asks_nothing)
    else:
        template, container = worker_template(job, process.index, name)
    spec = template["spec"]
    position = next(number for number, it in enumerate(spec["containers"]) if it is container)
    spec["restartPolicy"] = "Never"
    spec["hostname"] = ""
    spec["subdomain"] = objects.service_name(job.name)
    spec.setdefault("automountServiceAccountToken", False)
    spec.setdefault("enableServiceLinks", False)
    container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    container["env"] = container.get("env") or []
    container["volumeMounts"] = [
        *(container.get("volumeMounts") or []),
        {"name": CONFIG_VOLUME, "mountPath": CONFIG_FOLDER, "readOnly": True},
    ]
    spec["volumes"] = [*(spec.get("volumes") or []), {"name": CONFIG_VOLUME, "configMap": {"name": objects.config_name(job.name)}}]
    if job.spec.injection == "Auto":
        inject(spec, container, process.pinned.runtime_image or "", asks_nothing)
    else:
        spec["initContainers"] = [deriver(spec, container), *(spec.get("initContainers") or [])]
    hand_keys(spec, container, spec["initContainers"][0], objects.key_secret_name(job.name, job.uid, process.pinned.key or 0))
    return _Common(template, position)


def pod_environment(job: ConfigSource, process: CreateProcess, ending: str | None = None) -> dict[str, str]:
    """What the process gets beyond the config, which is the same for all. `ending`: where the template has its last message read."""
    values = {
        contract.ENV_ROLE: process.role,
        contract.ENV_INDEX: str(process.index),
        contract.ENV_RUN: job.uid,
        contract.ENV_CONFIG: f"{CONFIG_FOLDER}/{CONFIG_FILE}",
        contract.ENV_POD: process.name,
        contract.ENV_KEYS: KEY_FILE,
    }
    if process.pair is not None:
        values[contract.ENV_PAIR] = PAIR_FOLDER
    if process.pinned.encryption:
        values[contract.ENV_ENCRYPTION] = process.pinned.encryption
    if process.role == "worker":
        if job.spec.processes() > 1:
            values[contract.ENV_PROCESSES] = str(job.spec.processes())
        values[contract.ENV_START] = str(process.number)
    else:
        values[contract.ENV_ATTEMPT] = str(process.number)
        values[contract.ENV_TERM] = str(process.term)
        values[contract.ENV_CHECKPOINTS] = CHECKPOINTS
        if process.checkpoint_known:
            values[contract.ENV_MIN_STEP] = "1"
    if ending:
        values[contract.ENV_TERMINATION_LOG] = ending
    return values


def _stage(job: ConfigSource, process: CreateProcess) -> str:
    """Name of a worker's stage; empty without stages."""
    stage = job.spec.stage_of(process.index) if process.role == "worker" else None
    return "" if stage is None else stage.name


def _metadata(job: ConfigSource, process: CreateProcess, template: Document, trained: str) -> Document:
    given = template.get("metadata") or {}
    shared = labels(job, process.role)
    own = {
        **{key: value for key, value in shared.items() if key.startswith(f"{GROUP}/")},
        LABEL_ROLE: process.role,
        LABEL_INDEX: str(process.index),
        LABEL_NUMBER: str(process.number),
        LABEL_ATTEMPT if process.role == "shard" else LABEL_START: str(process.number),
        LABEL_TERM: str(process.term),
    }
    if stage := _stage(job, process):
        own[LABEL_STAGE] = stage
    if process.volume_group:
        own[LABEL_VOLUME_GROUP] = str(process.volume_group)
    if process.pair is not None:
        own[LABEL_PAIR] = str(process.pair)
    # The names by which people group pods are the template's to give; psjob finds its own by those of its group.
    made = metadata(job, process.name, {**shared, **(given.get("labels") or {}), **own})
    if given.get("finalizers"):
        made["finalizers"] = list(given["finalizers"])
    waited = {ANNOTATION_WAITED: str(process.waited)} if process.waited else {}
    said = {key: value for key, value in (given.get("annotations") or {}).items() if not key.startswith(f"{GROUP}/")}
    made["annotations"] = {ANNOTATION_DEFAULT: trained, **said, ANNOTATION_CONTAINER: trained, **waited}
    return made


def worker_template(job: ConfigSource, rank: int, trained: str) -> tuple[Document, Document]:
    """A copy of the template of a worker, and the container in it that is trained in, which has that name or is the only one. Of a
    stage's own template it is the one that a job which begins now would have."""
    template = copy.deepcopy(job.spec.worker_template(rank))
    container = container_of(template, trained)
    if container is None and job.spec.worker_template(rank) is not job.spec.workers.template:
        container = container_of(template, TRAINED)
    if container is None:
        raise ValueError(f"worker {rank}: no container of its template is named {trained}, and there is not exactly one; rename one")
    if job.spec.processes() > 1:
        command = container.get("command") or []
        container["command"] = [*interpreter(command).words, "-m", "psjob.agent", *command]
    return template, container


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
