"""The road of a conversion: text or the command line of a launcher in, a PSTrainingJob that passes validation out, as YAML with notes."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from psjob_client.convert.draft import Converted, Draft, Wishes, note_backend, note_framework
from psjob_client.convert.kubeflow import KINDS, convert_kubeflow, convert_trainjob
from psjob_client.convert.launcher import Launch, line_of_text, taken_apart
from psjob_client.convert.pods import worker_template
from psjob_client.problems import BadInput
from psjob_operator.api.field_rule import shown
from psjob_operator.api.load import load_documents
from psjob_operator.api.validate import validate_job
from psjob_operator.contract import KIND
from psjob_operator.printable import printable

GROUPS = {"kubeflow.org": frozenset(KINDS), "trainer.kubeflow.org": frozenset({"TrainJob"})}
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
    body = yaml.dump(job.manifest, Dumper=_Plain, sort_keys=False, width=140, allow_unicode=True)
    return "\n".join(printable(line) for line in lines) + "\n" + body


class _Plain(yaml.SafeDumper):
    """No anchors: parts that are the same are written out."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


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
    draft.template = worker_template(draft, {"spec": {"containers": [container]}}, "command", "worker")
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
