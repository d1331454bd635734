"""The road of a conversion: text or the command line of a launcher in, a PSTrainingJob that passes validation out, as YAML with notes.

Kubeflow's training operator has TFJob, PyTorchJob and MXJob (kubeflow.org/v1, and v1beta1 and v1beta2 of their time). Kubeflow Trainer has
TrainJob (trainer.kubeflow.org/v1alpha1), which is taken if it names its image: what its runtime adds is not in the file.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from psjob_client.convert import pods
from psjob_client.convert.draft import Converted, Draft, Wishes, items, mapping, note_backend, note_framework, taken, whole_number
from psjob_client.convert.launcher import Launch, line_of_text, taken_apart
from psjob_client.convert.pods import convert_worker_template
from psjob_client.problems import BadInput
from psjob_operator.api.crd import NoAnchors
from psjob_operator.api.field_rule import shown
from psjob_operator.api.load import load_documents
from psjob_operator.api.validate import validate_job
from psjob_operator.contract import KIND
from psjob_operator.printable import printable

KNOWN = (
    "TFJob, PyTorchJob and MXJob (kubeflow.org), TrainJob (trainer.kubeflow.org), a command of torchrun or accelerate launch,"
    " and scripts as files that end in .py"
)
REPLACED = {
    "MPIJob": "psjob has no MPI: start from the script with psjob init",
    "XGBoostJob": "psjob trains only PyTorch models",
    "PaddleJob": "psjob trains only PyTorch models",
    "JAXJob": "psjob trains only PyTorch models",
}
KEPT_POLICY = ("cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit")
BY_THEMSELVES = "workers find the shards by themselves; leave it out"
ELASTIC = {
    "rdzvBackend": BY_THEMSELVES, "rdzvPort": BY_THEMSELVES, "rdzvHost": BY_THEMSELVES, "rdzvId": BY_THEMSELVES, "rdzvConf": BY_THEMSELVES,
    "standalone": BY_THEMSELVES,
    "minReplicas": "the number of workers is fixed: a lost one is replaced and continues; set spec.workers.replicas",
    "maxReplicas": "the number of workers is fixed: a lost one is replaced and continues; set spec.workers.replicas",
    "metrics": "psjob does not scale by metrics; set spec.workers.replicas",
}  # fmt: skip
CONTROLLER = "trainer.kubeflow.org/trainjob-controller"


def from_text(text: str | bytes, wishes: Wishes) -> tuple[list[Converted], list[str]]:
    """Every job that `text` holds (manifests as YAML or JSON, or a torchrun command), and what was left aside.

    Raises:
        BadInput: it holds none, or one that cannot be turned into a PSTrainingJob.
    """
    documents, problems = load_documents(text)
    if problems or not any(isinstance(document.value, Mapping) for document in documents):
        words = line_of_text(text.decode(errors="replace") if isinstance(text, bytes) else text)
        if words is not None:
            return [from_words(words, wishes)], []
        raise BadInput(*(str(problem) for problem in problems)) if problems else BadInput(f"holds no job; psjob convert takes {KNOWN}")
    jobs, aside = [], []
    for raw in [item for document in documents for item in _objects(document.value)]:
        if _is_job(raw):
            jobs.append(_checked(_converted(raw, wishes)))
        else:
            name = (raw.get("metadata") or {}).get("name", "") if isinstance(raw.get("metadata"), Mapping) else ""
            aside.append(f"{raw.get('kind')} {name}: is no training job and is left aside; keep it beside the new manifest")
    if not jobs:
        raise BadInput(f"holds no job ({'; '.join(aside)[:300] or 'nothing'}); psjob convert takes {KNOWN}")
    return jobs, aside


def from_words(words: Sequence[str], wishes: Wishes) -> Converted:
    """The command line of a launcher. Raises BadInput."""
    return _checked(convert_launch(words, wishes))


def yaml_of(jobs: Sequence[Converted]) -> str:
    """The manifests, each below its notes as comments."""
    return "---\n".join(_one(job) for job in jobs)


def _one(job: Converted) -> str:
    lines = [f"# Made by psjob convert from: {job.source}", "#", "# What the manifest does not say, and what to do:"] if job.notes else []
    lines = lines or [f"# Made by psjob convert from: {job.source}"]
    for note in job.notes:
        lines += textwrap.wrap(
            str(note), 118, initial_indent="# - ", subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False
        )
    body = yaml.dump(job.manifest, Dumper=NoAnchors, sort_keys=False, width=140, allow_unicode=True)
    return "\n".join(printable(line) for line in lines) + "\n" + body


def _objects(raw: Any) -> list[Mapping[str, Any]]:
    if not isinstance(raw, Mapping):
        raise BadInput("a document of the file is no object; a manifest begins with apiVersion and kind")
    inner = raw.get("items")
    return [item for item in inner if isinstance(item, Mapping)] if raw.get("kind") == "List" and isinstance(inner, list) else [raw]


def _is_job(raw: Mapping[str, Any]) -> bool:
    group = str(raw.get("apiVersion")).partition("/")[0]
    if raw.get("kind") == KIND:
        raise BadInput(f"the file holds a {KIND} already; try psjob validate")
    if group == "kubeflow.org" and raw.get("kind") in REPLACED:
        raise BadInput(f"kind: {raw['kind']}: cannot be converted: {REPLACED[str(raw['kind'])]}")
    return str(raw.get("kind")) in GROUPS.get(group, frozenset())


def _converted(raw: Mapping[str, Any], wishes: Wishes) -> Converted:
    own = _unshared(raw)
    return convert_trainjob(own, wishes) if raw["kind"] == "TrainJob" else convert_kubeflow(own, wishes)


def _unshared(raw: Any) -> Any:
    """A copy in which nothing stands twice: what an alias shares is changed in one place only."""
    if isinstance(raw, Mapping):
        if wrong := [key for key in raw if not isinstance(key, str)]:
            raise BadInput(f"the key {shown(wrong[0])} is not text; write it in quotes")
        return {key: _unshared(value) for key, value in raw.items()}
    return [_unshared(value) for value in raw] if isinstance(raw, list) else raw


def _checked(job: Converted) -> Converted:
    """What is written passes `psjob validate`."""
    _, problems = validate_job(job.manifest)
    if problems:
        raise BadInput(*(f"{job.source}: what it would become is refused: {problem}" for problem in problems))
    return job


def convert_launch(words: Sequence[str], wishes: Wishes) -> Converted:
    """The command `words` as a PSTrainingJob: one worker for each of its processes.

    Raises:
        BadInput: it is no command of a launcher, or names no script.
    """
    launch = taken_apart(words)
    draft = Draft(shlex.join(words), wishes)
    draft.call(_word(launch.script))
    draft.notes.clear()  # the name is ours to choose: nothing of the source is lost
    nodes, each = _nodes(draft, launch.nodes), _each(draft, launch)
    draft.replicas = nodes * each
    image = wishes.image or f"registry.example.com/{draft.name}:1"
    if wishes.image is None:
        draft.note("image", None, f"{image} stands for yours, which holds torch and the script; give --image")
    env = [{"name": name, "value": value} for name, value in launch.env]
    container = {"name": "worker", "image": image, "command": list(launch.command), **({"env": env} if env else {})}
    draft.template = convert_worker_template(draft, {"spec": {"containers": [container]}}, "command", "worker")
    if launch.restarts is not None:
        draft.policy["backoffLimit"] = min(launch.restarts, 1000)
    for option, value, remedy in launch.dropped:
        draft.note(option, value or None, remedy)
    note_backend(draft, "command", launch.command)
    draft.note_shards()
    draft.note("resources", None, "the manifest asks for none: add requests and limits, such as nvidia.com/gpu: 1, before you submit it")
    note_framework(draft, "PyTorch")
    return draft.finish()


def _word(script: str) -> str:
    """A word for the job: the last part of the script's or the module's name."""
    last = script.rpartition("/")[2]
    return last.removesuffix(".py").rpartition(".")[2] or "job"


def _nodes(draft: Draft, written: str | None) -> int:
    if written is None:
        return 1
    low, _, high = written.partition(":")
    if not all(part.isascii() and part.isdigit() and int(part) >= 1 for part in (low, high or low)):
        raise BadInput(f"torchrun: --nnodes {written}: must be a number of at least 1, or two as 1:4")
    if high and high != low:
        draft.note(
            "--nnodes", written, f"the number of workers is fixed, and {high} nodes are taken; a lost worker is replaced and continues"
        )
    return int(high or low)


def _each(draft: Draft, launch: Launch) -> int:
    written = launch.processes
    if written is None:
        return 1
    words = () if launch.by_accelerate else ("auto", "gpu", "cpu")
    if written in words:
        draft.note("--nproc-per-node", written, "depends on the machine; one worker a node is taken: set spec.workers.replicas")
        return 1
    if not (written.isascii() and written.isdigit() and int(written) >= 1):
        if launch.by_accelerate:
            raise BadInput(f"accelerate launch: --num_processes {written}: must be a number of at least 1")
        raise BadInput(f"torchrun: --nproc-per-node {written}: must be a number of at least 1, or auto, gpu or cpu")
    return int(written)


@dataclass(frozen=True)
class JobKind:
    """How a kind says who trains and who serves."""

    replicas: str
    container: str
    workers: tuple[str, ...]
    """Replicas that train, the first being worker 0."""
    servers: str | None
    others: Mapping[str, str]
    """Replicas that psjob has no place for, with what to do."""
    framework: str


KINDS = {
    "PyTorchJob": JobKind("pytorchReplicaSpecs", "pytorch", ("Master", "Worker"), None, {}, "PyTorch"),
    "TFJob": JobKind(
        "tfReplicaSpecs", "tensorflow", ("Chief", "Master", "Worker"), "PS",
        {"Evaluator": "psjob has no evaluator: evaluate where ps.is_first() is true, or in a job of its own"},
        "TensorFlow",
    ),
    "MXJob": JobKind(
        "mxReplicaSpecs", "mxnet", ("Worker",), "Server",
        {"Scheduler": "shard 0 holds the coordinator; no pod of its own is needed"},
        "MXNet",
    ),
}  # fmt: skip
GROUPS = {"kubeflow.org": frozenset(KINDS), "trainer.kubeflow.org": frozenset({"TrainJob"})}


def convert_kubeflow(raw: Mapping[str, Any], wishes: Wishes) -> Converted:
    """A TFJob, PyTorchJob or MXJob as a PSTrainingJob.

    Raises:
        BadInput: it has no worker, or a part of it cannot be read.
    """
    kind = KINDS[str(raw["kind"])]
    metadata, spec = mapping(raw, "metadata", "metadata"), mapping(raw, "spec", "spec")
    draft = Draft(f"{raw['kind']} {metadata.get('name') or metadata.get('generateName') or ''} ({raw['apiVersion']})", wishes)
    draft.take_metadata(metadata)
    if raw["kind"] == "MXJob" and spec.get("jobMode") not in (None, "MXTrain"):
        raise BadInput(f"spec.jobMode: {shown(spec['jobMode'])}: tunes kernels and trains nothing; psjob has no place for it")
    spec.pop("jobMode", None)
    replicas = _replicas(spec, kind)
    _workers(draft, spec, replicas, kind)
    _servers(draft, replicas, kind)
    for name, remedy in kind.others.items():
        if replicas.pop(name, None) is not None:
            draft.note(f"spec.{kind.replicas}.{name}", None, remedy)
    for name in replicas:
        draft.note(f"spec.{kind.replicas}.{name}", None, "is a replica type that psjob does not know; it is left out")
    _policy(draft, spec)
    _success(draft, spec, str(raw["kind"]))
    note_framework(draft, kind.framework)
    for key in sorted(spec):
        draft.note(f"spec.{key}", spec[key], "is left out: psjob has no such field")
    return draft.finish()


def _replicas(spec: dict[str, Any], kind: JobKind) -> dict[str, dict[str, Any]]:
    """By name as the operator writes it, whatever the case in the source; those of no replica are dropped."""
    given = taken(spec, kind.replicas, f"spec.{kind.replicas}")
    known = {name.lower(): name for name in (*kind.workers, kind.servers or "", *kind.others)}
    found = {}
    for name in given:
        at = f"spec.{kind.replicas}.{name}"
        part = mapping(given, name, at)
        if whole_number(part, "replicas", f"{at}.replicas", 1) > 0:
            found[known.get(str(name).lower(), str(name))] = part
    if not any(name in found for name in kind.workers):
        raise BadInput(f"spec.{kind.replicas}: must hold {' or '.join(kind.workers)} with at least one replica; nothing trains here")
    return found


def _workers(draft: Draft, spec: dict[str, Any], replicas: dict[str, dict[str, Any]], kind: JobKind) -> None:
    """All that train become workers of one template: that of the last named, mostly Worker."""
    there = [name for name in kind.workers if name in replicas]
    parts = {name: replicas.pop(name) for name in there}
    chosen = there[-1]
    at = f"spec.{kind.replicas}.{chosen}"
    draft.template = pods.convert_worker_template(
        draft, mapping(parts[chosen], "template", f"{at}.template"), f"{at}.template", kind.container
    )
    count = sum(whole_number(part, "replicas", f"spec.{kind.replicas}.{name}.replicas", 1) for name, part in parts.items())
    for name in there[:-1]:
        if mapping(parts[name], "template", f"spec.{kind.replicas}.{name}.template") != mapping(
            parts[chosen], "template", f"{at}.template"
        ):
            draft.note(
                f"spec.{kind.replicas}.{name}.template",
                None,
                f"differs from that of {chosen}, which all workers have now; ask ps.is_first() where worker 0 does more",
            )
            theirs = mapping(parts[name], "template", f"spec.{kind.replicas}.{name}.template")
            ours = mapping(parts[chosen], "template", f"{at}.template")
            pods.note_differences(draft, theirs, ours, f"spec.{kind.replicas}.{name}.template", kind.container)
        if kind.framework == "TensorFlow":
            draft.note(f"spec.{kind.replicas}.{name}", None, "became worker 0, which trains as all workers do")
    for name, part in parts.items():
        _restarts(draft, part, f"spec.{kind.replicas}.{name}")
    _processes(draft, spec, count, at)


def _processes(draft: Draft, spec: dict[str, Any], pods_wanted: int, at: str) -> None:
    """A worker of psjob is one process: torchrun's processes become workers."""
    elastic = taken(spec, "elasticPolicy", "spec.elasticPolicy")
    wanted = spec.pop("nprocPerNode", None)
    wanted = wanted if wanted is not None else elastic.pop("nProcPerNode", None)
    elastic.pop("nProcPerNode", None)
    place = f"{at}.template.spec.containers[]"
    launch = pods.launched(draft, draft.template, place)
    if launch is not None and launch.processes is not None:
        wanted = launch.processes
    each = count_of(draft, wanted, pods.gpus(draft.template) if launch is not None else 1, "spec.nprocPerNode")
    draft.take_processes("spec.nprocPerNode", pods_wanted, each, wanted)
    if each > 1:
        pods.divide(draft, draft.template, each, place)
    restarts = elastic.pop("maxRestarts", None)
    restarts = launch.restarts if launch is not None and launch.restarts is not None else restarts
    if restarts is not None:
        draft.policy["backoffLimit"] = min(whole_number({"n": restarts}, "n", "spec.elasticPolicy.maxRestarts", 0), 1000)
    for name, value in elastic.items():
        draft.note(f"spec.elasticPolicy.{name}", value, ELASTIC.get(name, "is left out: psjob has no such field"))


def count_of(draft: Draft, wanted: Any, gpus: int, at: str) -> int:
    """Processes per pod: a number, or auto, gpu and cpu by what the pod asks for."""
    if wanted is None or wanted in ("auto", "gpu", "cpu"):
        if wanted == "cpu" or (wanted == "gpu" and gpus < 1):
            draft.note(at, wanted, "is not known before the pod runs; one process a pod is taken: set spec.workers.replicas")
            return 1
        return max(1, gpus) if wanted != "cpu" else 1
    text = str(wanted)
    if isinstance(wanted, bool) or not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise BadInput(f"{at}: Invalid value: {shown(wanted)}: must be a number of at least 1, or auto, gpu or cpu; correct the source")
    return int(text)


def _servers(draft: Draft, replicas: dict[str, dict[str, Any]], kind: JobKind) -> None:
    if kind.servers is None or kind.servers not in replicas:
        draft.note_shards()
        return
    at = f"spec.{kind.replicas}.{kind.servers}"
    part = replicas.pop(kind.servers)
    draft.shards = whole_number(part, "replicas", f"{at}.replicas", 1)
    draft.shard_template = pods.convert_shard_template(draft, mapping(part, "template", f"{at}.template"), f"{at}.template", kind.container)
    _restarts(draft, part, at)


def _restarts(draft: Draft, part: dict[str, Any], at: str) -> None:
    policy = part.get("restartPolicy")
    if policy == "ExitCode":
        draft.note(
            f"{at}.restartPolicy",
            policy,
            "any failure is answered by a restart, whatever its exit code; spec.runPolicy.backoffLimit says how often",
        )
    elif policy == "Never":
        draft.note(
            f"{at}.restartPolicy",
            policy,
            "psjob restarts a failed process from the last checkpoint; for a job that fails at once set spec.runPolicy.backoffLimit: 0",
        )
    for key in sorted(set(part) - {"replicas", "restartPolicy", "template"}):
        draft.note(f"{at}.{key}", part[key], "is left out: psjob has no such field")


def _policy(draft: Draft, spec: dict[str, Any]) -> None:
    """runPolicy; until the v1 of 2021 its fields stood in the spec itself."""
    policy = {**{key: spec.pop(key) for key in KEPT_POLICY if key in spec}, **taken(spec, "runPolicy", "spec.runPolicy")}
    for key in KEPT_POLICY:
        value = policy.pop(key, None)
        if value is not None and value != "":
            draft.policy[key] = value
    suspend = policy.pop("suspend", None)
    if suspend is not None:
        draft.spec["suspend"] = suspend
    manager = policy.pop("managedBy", None)
    if manager not in (None, "kubeflow.org/training-operator"):
        draft.note("spec.runPolicy.managedBy", manager, "that controller does not know PSTrainingJobs; it is left out")
    scheduling = taken(policy, "schedulingPolicy", "spec.runPolicy.schedulingPolicy")
    priority = scheduling.pop("priorityClass", None)
    if priority:
        draft.template["spec"].setdefault("priorityClassName", priority)
    for key, value in scheduling.items():
        draft.note(
            f"spec.runPolicy.schedulingPolicy.{key}",
            value,
            "psjob asks for no gang: pods start one by one, and workers wait for the shards",
        )
    for key in sorted(policy):
        draft.note(f"spec.runPolicy.{key}", policy[key], "is left out: psjob has no such field")


def _success(draft: Draft, spec: dict[str, Any], kind: str) -> None:
    policy = spec.pop("successPolicy", None)
    if kind != "TFJob":
        return
    if policy in (None, ""):
        draft.policy["successPolicy"] = "FirstWorker"
        draft.note(
            "spec.successPolicy", None, "became FirstWorker, as a TFJob is done when its chief or worker 0 is; AllWorkers waits for all"
        )
    else:
        draft.policy["successPolicy"] = policy
    for item in items(spec, "enableDynamicWorker", "spec.enableDynamicWorker") if isinstance(spec.get("enableDynamicWorker"), list) else ():
        draft.note("spec.enableDynamicWorker", item, "the number of workers is fixed")


def convert_trainjob(raw: Mapping[str, Any], wishes: Wishes) -> Converted:
    """A TrainJob as a PSTrainingJob.

    Raises:
        BadInput: its image is only in its runtime, or a part of it cannot be read.
    """
    metadata, spec = mapping(raw, "metadata", "metadata"), mapping(raw, "spec", "spec")
    draft = Draft(f"TrainJob {metadata.get('name') or metadata.get('generateName') or ''} ({raw['apiVersion']})", wishes)
    draft.take_metadata(metadata)
    runtime = taken(spec, "runtimeRef", "spec.runtimeRef")
    name = str(runtime.get("name") or "")
    trainer = taken(spec, "trainer", "spec.trainer")
    if wishes.image is None and not trainer.get("image"):
        raise BadInput(f"spec.trainer.image: stands only in the runtime {name}; give --image with an image that has torch and the script")
    draft.note(
        "spec.runtimeRef",
        name,
        "what that runtime adds (volumes, env, init steps) is not in this file: kubectl get clustertrainingruntime " + name,
    )
    _trainer(draft, trainer)
    for kind in ("labels", "annotations"):
        given = taken(spec, kind, f"spec.{kind}")
        if given:
            draft.template.setdefault("metadata", {})[kind] = given
    _rest(draft, spec)
    note_framework(draft, "PyTorch")
    return draft.finish()


def _trainer(draft: Draft, trainer: dict[str, Any]) -> None:
    container = {key: trainer.pop(key) for key in ("image", "command", "args", "env") if trainer.get(key) is not None}
    resources = taken(trainer, "resourcesPerNode", "spec.trainer.resourcesPerNode")
    if resources:
        container["resources"] = {kind: dict(given) if isinstance(given, Mapping) else given for kind, given in resources.items()}
    container["name"] = "node"
    draft.template = pods.convert_worker_template(draft, {"spec": {"containers": [container]}}, "spec.trainer", "node")
    nodes = whole_number(trainer, "numNodes", "spec.trainer.numNodes", 1, 1)
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
    initializer = taken(spec, "initializer", "spec.initializer")
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
