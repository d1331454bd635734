"""TrainJob of Kubeflow Trainer (trainer.kubeflow.org/v1alpha1), where it names its image; what its runtime adds is not in the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psjob_client.convert import pods
from psjob_client.convert.draft import Converted, Draft, Wishes, items, mapping, note_framework, whole
from psjob_client.convert.kubeflow import count_of
from psjob_client.problems import BadInput

CONTROLLER = "trainer.kubeflow.org/trainjob-controller"


def convert(raw: Mapping[str, Any], wishes: Wishes) -> Converted:
    """A TrainJob as a PSTrainingJob.

    Raises:
        BadInput: its image stands in its runtime alone, or a part of it cannot be read.
    """
    metadata, spec = mapping(raw, "metadata", "metadata"), mapping(raw, "spec", "spec")
    draft = Draft(f"TrainJob {metadata.get('name') or metadata.get('generateName') or ''} ({raw['apiVersion']})", wishes)
    draft.take_metadata(metadata)
    runtime = mapping(spec, "runtimeRef", "spec.runtimeRef")
    spec.pop("runtimeRef", None)
    name = str(runtime.get("name") or "")
    trainer = mapping(spec, "trainer", "spec.trainer")
    spec.pop("trainer", None)
    if wishes.image is None and not trainer.get("image"):
        raise BadInput(f"spec.trainer.image: stands only in the runtime {name}; give --image with an image that has torch and the script")
    draft.note(
        "spec.runtimeRef",
        name,
        "what that runtime adds (volumes, env, init steps) is not in this file: kubectl get clustertrainingruntime " + name,
    )
    _trainer(draft, trainer)
    for kind in ("labels", "annotations"):
        given = mapping(spec, kind, f"spec.{kind}")
        spec.pop(kind, None)
        if given:
            draft.template.setdefault("metadata", {})[kind] = given
    _rest(draft, spec)
    note_framework(draft, "PyTorch")
    return draft.finish()


def _trainer(draft: Draft, trainer: dict[str, Any]) -> None:
    container = {key: trainer.pop(key) for key in ("image", "command", "args", "env") if trainer.get(key) is not None}
    resources = mapping(trainer, "resourcesPerNode", "spec.trainer.resourcesPerNode")
    trainer.pop("resourcesPerNode", None)
    if resources:
        container["resources"] = {kind: dict(given) if isinstance(given, Mapping) else given for kind, given in resources.items()}
    container["name"] = "node"
    draft.template = pods.worker_template(draft, {"spec": {"containers": [container]}}, "spec.trainer", "node")
    nodes = whole(trainer, "numNodes", "spec.trainer.numNodes", 1, 1)
    wanted = trainer.pop("numProcPerNode", None)
    launch = pods.launched(draft, draft.template, "spec.trainer")
    if launch is not None and launch.processes is not None:
        wanted = launch.processes
    each = count_of(draft, wanted, pods.gpus(draft.template), "spec.trainer.numProcPerNode")
    draft.take_processes("spec.trainer.numProcPerNode", nodes, each, wanted)
    trainer.pop("numNodes", None)
    if each > 1:
        pods.divide(draft, draft.template, each, "spec.trainer")
    for key in sorted(trainer):
        draft.note(f"spec.trainer.{key}", trainer[key], "is left out: psjob has no such field")
    draft.note_shards()


def _rest(draft: Draft, spec: dict[str, Any]) -> None:
    deadline = spec.pop("activeDeadlineSeconds", None)
    if deadline:
        draft.policy["activeDeadlineSeconds"] = deadline
    suspend = spec.pop("suspend", None)
    if suspend is not None:
        draft.spec["suspend"] = suspend
    if spec.pop("managedBy", CONTROLLER) not in (None, CONTROLLER):
        draft.note("spec.managedBy", None, "that controller does not know PSTrainingJobs; it is left out")
    initializer = mapping(spec, "initializer", "spec.initializer")
    spec.pop("initializer", None)
    for part in initializer:
        uri = mapping(initializer, part, f"spec.initializer.{part}").get("storageUri", "")
        draft.note(
            f"spec.initializer.{part}", uri, "psjob fetches nothing: mount a volume, or fetch it in an init container or in the script"
        )
    for name in ("runtimePatches", "podTemplateOverrides", "podSpecOverrides"):
        for _ in items(spec, name, f"spec.{name}"):
            draft.note(f"spec.{name}", None, "is laid over the runtime's pods: write what you need of it into spec.workers.template")
        spec.pop(name, None)
    for key in sorted(spec):
        draft.note(f"spec.{key}", spec[key], "is left out: psjob has no such field")
