"""What a conversion makes: the manifest, and a note for each field that it could not carry over. Pure.

Notes on a script's framework say what it needs before psjob can train with it: no manifest says that. `Script` is the manifest that
`psjob run train.py` stands for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import Template
from typing import Any

import yaml

from psjob_client.problems import BadInput
from psjob_operator.api.field_rule import shown
from psjob_operator.contract import GROUP, KIND, VERSION

LONGEST_NAME = 40
DROPPED_METADATA = frozenset(
    {"annotations", "creationTimestamp", "deletionTimestamp", "finalizers", "generateName", "generation", "labels", "managedFields"}
    | {"name", "namespace", "ownerReferences", "resourceVersion", "selfLink", "uid"}
)
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
BACKEND = re.compile(r"--(?:dist[-_])?backend(?:=(?P<value>.*))?", re.DOTALL)
BACKENDS = frozenset({"nccl", "gloo", "mpi", "ucc", "hccl", "xccl"})


@dataclass(frozen=True)
class Note:
    """One thing of the source that the manifest does not say, and what to do about it."""

    field: str
    """Path in the source, such as spec.elasticPolicy; or what else it is about, such as script."""
    value: str
    """What stands there."""
    remedy: str

    def __str__(self) -> str:
        """`spec.elasticPolicy.maxReplicas: 3: the number of workers is fixed; …`."""
        return ": ".join(part for part in (self.field, self.value, self.remedy) if part)


@dataclass(frozen=True)
class Converted:
    """A source as a PSTrainingJob."""

    source: str
    """Such as `PyTorchJob mnist (kubeflow.org/v1)`."""
    manifest: dict[str, Any]
    notes: tuple[Note, ...]


@dataclass(frozen=True)
class Wishes:
    """What the user says beside the source; None: what the source says."""

    name: str | None = None
    image: str | None = None
    shards: int | None = None
    command: tuple[str, ...] | None = None
    """Of the worker, where the source leaves it to the image."""


@dataclass
class Draft:
    """A manifest in the making."""

    source: str
    wishes: Wishes
    name: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    shards: int = 1
    replicas: int = 1
    template: dict[str, Any] = field(default_factory=dict)
    shard_template: dict[str, Any] | None = None
    spec: dict[str, Any] = field(default_factory=dict)
    """What stands beside `shards` and `workers`."""
    policy: dict[str, Any] = field(default_factory=dict)
    """runPolicy."""
    notes: list[Note] = field(default_factory=list)

    def note(self, at: str, value: Any, remedy: str) -> None:
        """Note something that is not carried over; `value` is the source's own text, None where it has none."""
        self.notes.append(Note(at, "" if value is None else value if isinstance(value, str) else shown(value), remedy))

    def note_shards(self) -> None:
        """Tell that shards are new to who comes from all-reduce."""
        shards = self.shards if self.wishes.shards is None else self.wishes.shards
        remedy = "is new: shards hold the parameters; one serves most models, more spread memory and traffic"
        self.note("spec.shards.replicas", str(shards), remedy)

    def take_processes(self, at: str, pods: int, each: int, written: object) -> None:
        """`pods` pods of `each` processes become workers."""
        self.replicas = pods * each
        if each > 1:
            self.note(
                at, str(written), f"became workers: {pods} x {each} processes are {self.replicas} workers, each with its share of resources"
            )

    def call(self, wanted: str) -> None:
        """Give the job a name that pods and Services can be made from."""
        if self.wishes.name is not None:
            self.name = self.wishes.name
            return
        self.name = job_name(wanted)
        if self.name != wanted:
            self.note(
                "metadata.name", wanted, f"became {self.name}: at most {LONGEST_NAME} lower-case letters, digits and '-'; or give --name"
            )

    def take_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Name, namespace, labels and annotations of the source; what the API server wrote is its own."""
        self.call(str(metadata.get("name") or metadata.get("generateName") or "job"))
        if isinstance(metadata.get("namespace"), str):
            self.metadata["namespace"] = metadata["namespace"]
        for kind in ("labels", "annotations"):
            given = {key: value for key, value in mapping(metadata, kind, f"metadata.{kind}").items() if key != LAST_APPLIED}
            if given:
                self.metadata[kind] = given
            if "kueue.x-k8s.io/queue-name" in given:
                self.note(
                    f"metadata.{kind}",
                    f"kueue.x-k8s.io/queue-name: {given['kueue.x-k8s.io/queue-name']}",
                    "is kept, but Kueue does not know PSTrainingJobs: the job starts at once, unless spec.suspend is true",
                )
        for key in sorted(set(metadata) - DROPPED_METADATA):
            self.note(f"metadata.{key}", metadata[key], "is left out")

    def finish(self) -> Converted:
        """The manifest as it is now."""
        shards: dict[str, Any] = {"replicas": self.shards if self.wishes.shards is None else self.wishes.shards}
        if self.shard_template:
            shards["template"] = self.shard_template
        policy = {"runPolicy": self.policy} if self.policy else {}
        spec = {"shards": shards, "workers": {"replicas": self.replicas, "template": self.template}, **policy, **self.spec}
        manifest = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": {"name": self.name, **self.metadata}, "spec": spec}
        return Converted(self.source, manifest, tuple(dict.fromkeys(self.notes)))


def job_name(wanted: str) -> str:
    """The nearest name that pods and Services can be made from."""
    word = re.sub(r"[^a-z0-9]+", "-", wanted.lower()).strip("-")
    word = word if re.match("[a-z]", word) else f"job-{word}"
    return word[:LONGEST_NAME].strip("-")


def mapping(value: Mapping[str, Any], key: str, at: str) -> dict[str, Any]:
    """The object `value[key]`, empty where there is none. Raises BadInput, naming `at`."""
    found = value.get(key)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise BadInput(f"{at}: Invalid value: {shown(found)}: must be an object; correct the source")
    return dict(found)


def taken(value: dict[str, Any], key: str, at: str) -> dict[str, Any]:
    """The same, taken out of `value`, so that what is left there is what nobody has read."""
    found = mapping(value, key, at)
    value.pop(key, None)
    return found


def items(value: Mapping[str, Any], key: str, at: str) -> list[Any]:
    """The list `value[key]`, empty where there is none. Raises BadInput, naming `at`."""
    found = value.get(key)
    if found is None:
        return []
    if not isinstance(found, list):
        raise BadInput(f"{at}: Invalid value: {shown(found)}: must be a list; correct the source")
    return list(found)


def whole_number(value: Mapping[str, Any], key: str, at: str, absent: int, least: int = 0) -> int:
    """The whole number `value[key]` of at least `least`, `absent` where there is none. Raises BadInput, naming `at`."""
    found = value.get(key)
    if found is None:
        return absent
    if not isinstance(found, int) or isinstance(found, bool) or found < least:
        raise BadInput(f"{at}: Invalid value: {shown(found)}: must be a whole number of at least {least}; correct the source")
    return found


def note_framework(draft: Draft, framework: str) -> None:
    """Tell of the script."""
    if framework != "PyTorch":
        draft.note(
            "script", framework, "psjob trains only PyTorch models: port model and loop to PyTorch, and take an image that has torch"
        )
    if framework == "PyTorch":
        draft.note("script", None, "psjob convert train.py shows the edits as a diff, and --write makes them")
    draft.note(
        "script",
        None,
        "import psjob as ps; after model and optimizer are made: model, opt = ps.attach(model, opt); loop over ps.shard(loader)",
    )
    if framework == "PyTorch":
        draft.note(
            "script", None, "take out init_process_group and DistributedDataParallel; RANK and WORLD_SIZE become ps.rank() and ps.world()"
        )
        draft.note("script", None, "checkpoints are the job's: psjob saves model, optimizer and place in the data by itself")


def note_backend(draft: Draft, at: str, words: Sequence[str]) -> None:
    """Tell of `--backend nccl` in a script's arguments: it chose how a process group talks, and there is none."""
    for i, word in enumerate(words):
        found = BACKEND.fullmatch(word)
        value = (found["value"] if found["value"] is not None else next(iter(words[i + 1 : i + 2]), "")) if found else ""
        if value in BACKENDS:
            draft.note(
                at,
                f"{word.partition('=')[0]} {value}",
                "is kept, but chooses nothing: psjob starts no process group; take it out of script and manifest",
            )


@dataclass(frozen=True)
class Script:
    """A script, or a module, and how it is to be trained."""

    path: str
    """As seen from the folder in which workers start."""
    arguments: Sequence[str] = ()
    module: bool = False
    """`path` is the name of a module, for `python -m`."""
    workers: int = 2
    shards: int = 1
    mode: str = "sync"

    def manifest(self, template: str) -> str:
        """As YAML with the comments of `template`; the image is one to be replaced."""
        name = job_name(self.path.rpartition(".")[2] if self.module else self.path.rpartition("/")[2].removesuffix(".py"))
        words = ["python", *(["-m"] if self.module else []), self.path, *self.arguments]
        values = {"name": name, "image": image_of(name), "command": command_of(words), "mode": self.mode}
        return Template(template).substitute(values, workers=self.workers, shards=self.shards)


def image_of(name: str) -> str:
    """An image that a user replaces by his own."""
    return f"registry.example.com/{name}:1"


def command_of(words: Sequence[str]) -> str:
    """A command as a list in YAML. Kubernetes takes `$(NAME)` for a variable, and `$$` for a dollar sign."""
    text: str = yaml.safe_dump([word.replace("$", "$$") for word in words], default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.strip()
