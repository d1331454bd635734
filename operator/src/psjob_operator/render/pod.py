"""The pod of one worker or shard.

A worker's is the user's template, untouched but for what psjob adds to each pod; shard.py makes a shard's.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from psjob_operator import contract
from psjob_operator.api.status import Pinned
from psjob_operator.api.template import TRAINED, container_of
from psjob_operator.contract import GROUP
from psjob_operator.plan import objects
from psjob_operator.plan.actions import CreateProcess
from psjob_operator.plan.objects import CHECKPOINTS, ConfigSource
from psjob_operator.plan.observed_state import Role
from psjob_operator.render.init_container import KEY_FILE, deriver, hand_keys, inject, who
from psjob_operator.render.merge import AFFINITY, merge
from psjob_operator.render.objects import (
    ANNOTATION_CONTAINER,
    ANNOTATION_DEFAULT,
    ANNOTATION_WAITED,
    CONFIG_FILE,
    LABEL_ATTEMPT,
    LABEL_INDEX,
    LABEL_NUMBER,
    LABEL_ROLE,
    LABEL_STAGE,
    LABEL_START,
    LABEL_VIEW,
    LABEL_VOLUME_GROUP,
    Document,
    beside,
    labels,
    metadata,
)
from psjob_operator.render.shard import NOBODY, interpreter, shard_template

CONFIG_FOLDER = "/psjob-config"
CONFIG_VOLUME = "psjob-config"


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
        values = environment(self._job, process, trained.get("terminationMessagePath"))
        env = [*({"name": name, "value": value} for name, value in values.items()), *trained["env"]]
        containers[common.position] = {**trained, "env": env}
        first, *others = common.template["spec"]["initContainers"]
        inits = [{**first, "env": [*who(values), *(first.get("env") or [])]}, *others]
        host = objects.hostname(self._job.name, process.role, process.index)
        spec = {**common.template["spec"], "initContainers": inits, "containers": containers, "hostname": host}
        if process.beside is not None:
            spec["affinity"] = merge(beside(self._job, process.beside), spec.get("affinity") or {}, AFFINITY)
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": _metadata(self._job, process, common.template, trained["name"]),
            "spec": spec,
        }


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


def environment(job: ConfigSource, process: CreateProcess, ending: str | None = None) -> dict[str, str]:
    """What the process is told beyond the config, which is the same for all. `ending`: where the template has its last message read."""
    values = {
        contract.ENV_ROLE: process.role,
        contract.ENV_INDEX: str(process.index),
        contract.ENV_RUN: job.uid,
        contract.ENV_CONFIG: f"{CONFIG_FOLDER}/{CONFIG_FILE}",
        contract.ENV_POD: process.name,
        contract.ENV_KEYS: KEY_FILE,
    }
    if process.pinned.encryption:
        values[contract.ENV_ENCRYPTION] = process.pinned.encryption
    if process.role == "worker":
        if job.spec.processes() > 1:
            values[contract.ENV_PROCESSES] = str(job.spec.processes())
        values[contract.ENV_START] = str(process.number)
    else:
        values[contract.ENV_ATTEMPT] = str(process.number)
        values[contract.ENV_TERM] = str(process.view)
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
        LABEL_VIEW: str(process.view),
    }
    if stage := _stage(job, process):
        own[LABEL_STAGE] = stage
    if process.volume_group:
        own[LABEL_VOLUME_GROUP] = str(process.volume_group)
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
