"""The pod of one worker or shard."""

from __future__ import annotations

from psjob_operator import contract
from psjob_operator.api.template import TRAINED
from psjob_operator.plan import naming
from psjob_operator.plan.actions import CreateProcess
from psjob_operator.plan.config import CHECKPOINTS, ConfigSource
from psjob_operator.render.around import CONFIG_FILE
from psjob_operator.render.inject import inject
from psjob_operator.render.names import (
    ANNOTATION_CONTAINER,
    ANNOTATION_DEFAULT,
    ANNOTATION_WAITED,
    LABEL_ATTEMPT,
    LABEL_INDEX,
    LABEL_NUMBER,
    LABEL_PLACEMENT,
    LABEL_ROLE,
    LABEL_START,
    LABEL_VIEW,
    Document,
    labels,
    metadata,
)
from psjob_operator.render.security import NOBODY
from psjob_operator.render.shard import shard_template
from psjob_operator.render.worker import worker_template

CONFIG_FOLDER = "/psjob-config"
CONFIG_VOLUME = "psjob-config"


def pod(job: ConfigSource, process: CreateProcess, shard_user: int | None = NOBODY) -> Document:
    """The pod of `process`; made once by POST, never changed. `shard_user`: who shards are where the job names nobody; None: whom the
    namespace gives."""
    name = process.pinned.container or TRAINED
    shard = process.role == "shard"
    template, container = shard_template(job, process.placement, name, shard_user) if shard else worker_template(job, name)
    spec = template["spec"]
    spec["restartPolicy"] = "Never"
    spec["hostname"] = naming.host(job.name, process.role, process.index)
    spec["subdomain"] = naming.service(job.name)
    spec.setdefault("automountServiceAccountToken", False)
    spec.setdefault("enableServiceLinks", False)
    container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    # Ours come first, so that the user's variables may refer to them as $(PSJOB_INDEX).
    container["env"] = [*environment(job, process, container.get("terminationMessagePath")), *(container.get("env") or [])]
    container["volumeMounts"] = [
        *(container.get("volumeMounts") or []),
        {"name": CONFIG_VOLUME, "mountPath": CONFIG_FOLDER, "readOnly": True},
    ]
    spec["volumes"] = [*(spec.get("volumes") or []), {"name": CONFIG_VOLUME, "configMap": {"name": naming.config(job.name)}}]
    if job.spec.injection == "auto":
        inject(spec, container, process.pinned.runtime_image or "")
    return {"apiVersion": "v1", "kind": "Pod", "metadata": _metadata(job, process, template, container["name"]), "spec": spec}


def environment(job: ConfigSource, process: CreateProcess, ending: str | None = None) -> list[Document]:
    """What the process is told beyond the config, which is the same for all. `ending`: where the template has its last message read."""
    values = {
        contract.ENV_ROLE: process.role,
        contract.ENV_INDEX: str(process.index),
        contract.ENV_RUN: job.uid,
        contract.ENV_CONFIG: f"{CONFIG_FOLDER}/{CONFIG_FILE}",
        contract.ENV_POD: process.name,
    }
    if process.role == "worker":
        values[contract.ENV_START] = str(process.number)
    else:
        values[contract.ENV_ATTEMPT] = str(process.number)
        values[contract.ENV_VIEW] = str(process.view)
        values[contract.ENV_CHECKPOINTS] = CHECKPOINTS
        if process.checkpoint_known:
            values[contract.ENV_MIN_STEP] = "1"
    if ending:
        values[contract.ENV_TERMINATION_LOG] = ending
    return [{"name": name, "value": value} for name, value in values.items()]


def _metadata(job: ConfigSource, process: CreateProcess, template: Document, trained: str) -> Document:
    given = template.get("metadata") or {}
    own = {
        **labels(job, process.role),
        LABEL_ROLE: process.role,
        LABEL_INDEX: str(process.index),
        LABEL_NUMBER: str(process.number),
        LABEL_ATTEMPT if process.role == "shard" else LABEL_START: str(process.number),
        LABEL_VIEW: str(process.view),
    }
    if process.placement:
        own[LABEL_PLACEMENT] = str(process.placement)
    made = metadata(job, process.name, {**(given.get("labels") or {}), **own})
    waited = {ANNOTATION_WAITED: str(process.waited)} if process.waited else {}
    made["annotations"] = {ANNOTATION_DEFAULT: trained, **(given.get("annotations") or {}), ANNOTATION_CONTAINER: trained, **waited}
    return made
