"""What the user asked of `psjob run` (`Request`), the JOB.yaml that it names, and what each worker runs on this machine.

The manifest is one document with `--set` values laid over it, validated by the same rules as the API server. What has no meaning on this
machine is named once.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from psjob_client.problems import BadInput
from psjob_operator import contract
from psjob_operator.api.base import Model
from psjob_operator.api.load import LARGEST_TEXT, load_document, load_job
from psjob_operator.api.spec import PSTrainingJob
from psjob_operator.api.template import TRAINED, container_of

STANDARD_INPUT = "-"
FIRST = "0"
"""Of --logs: the worker that evaluates and prints in most scripts."""
STEP = r"(?:\\.|[^.\[\]\\])+|\[\d+\]"
ROOTS = ("spec", "metadata", "apiVersion", "kind")
"""One step of a path: a name, in which `\\.` is a dot (as in Helm), or `[number]`."""
DUMPER = yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper
NEAR = ("*.yaml", "*/*.yaml", "*.yml", "*/*.yml")
"""Files whose names are compared with one that is not there."""
PYTHONS = frozenset({"python", "python3"})
MEANT = frozenset({"name", "command", "args", "env"})
"""Fields of the trained container that count on this machine."""


@dataclass(frozen=True)
class Request:
    """The command line, typed."""

    manifest: Path
    settings: tuple[str, ...] = ()
    """Each `path=value`."""
    faults: tuple[str, ...] = ()
    summary: Path | None = None
    resume: Path | None = None
    """Folder of a former run."""
    progress: bool = True
    history: Path | None = None
    """Where the job's numbers are written while it runs."""
    run: str | None = None
    """Name of the run; None: one is made."""
    logs: str = FIRST
    """Workers whose lines are shown: `all`, `none`, or their numbers."""
    work_folder: Path | None = None
    """Where workers start; None: in the manifest's folder."""
    text: str | None = None
    """The manifest, if psjob has made it of the script `manifest`."""
    options: tuple[str, ...] = ()
    """Of a script: what the user has typed beside it."""
    arguments: tuple[str, ...] = ()
    """Those of the script."""

    @property
    def from_input(self) -> bool:
        """The manifest comes from standard input, and workers start in the folder that psjob is started in."""
        return str(self.manifest) == STANDARD_INPUT

    def words(self, *more: str) -> list[str]:
        """What a user types for the same job and `more` options, without those that say where to write."""
        laid = [word for setting in self.settings for word in ("--set", setting)]
        arguments = ["--", *self.arguments] if self.arguments else []
        return ["psjob", "run", *self.options, str(self.manifest), *laid, *more, *arguments]


def read_job(path: Path, settings: tuple[str, ...] = (), made: str | None = None) -> PSTrainingJob:
    """The job in `path`, or in the text that was `made` of what is there, with each `path=value` of `settings` laid over it.

    Raises:
        BadInput: one line a problem; of the file, of a setting, or of a value in the manifest.
    """
    text: str | bytes = read_text(path, "a PSTrainingJob manifest", ("job.yaml", "train.py")) if made is None else made
    job, problems = load_job(text)
    if settings and not any(problem.field == "" for problem in problems):
        raw, _ = load_document(text, "PSTrainingJob")
        for setting in settings:
            _lay(raw, setting)
        try:
            text = yaml.dump(raw, Dumper=DUMPER, sort_keys=False)
        except yaml.YAMLError as error:
            raise BadInput(f"{path}: cannot be written again with --set: {error}; use plain text, numbers, lists and objects") from None
        job, problems = load_job(text)
    if job is None:
        raise BadInput(*(f"{path}: {problem}" for problem in problems))
    return job


def as_written(job: PSTrainingJob) -> dict[str, Any]:
    """The manifest with what its author wrote, and no defaults."""
    own = job.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True, exclude={"status"})
    if job.spec.stages:
        own["spec"]["workers"].pop("replicas", None)  # the stages say it
    return {"apiVersion": job.api_version, "kind": job.kind, "metadata": own["metadata"], "spec": own["spec"]}


def read_text(path: Path, what: str, likely: Sequence[str] = ()) -> bytes:
    """The bytes of `path` (`-`: standard input), one more than are taken at most. `likely`: names of it in a folder that is given instead.

    Raises BadInput: it should be `what`.
    """
    try:
        if str(path) == STANDARD_INPUT:
            return sys.stdin.buffer.read(LARGEST_TEXT + 1)
        if path.is_dir():
            inside = next((path / name for name in likely if (path / name).is_file()), None)
            raise BadInput(f"{path} is a folder; " + (f"did you mean {inside}?" if inside else f"give the path of {what}"))
        with path.open("rb") as file:
            # One byte more than is taken, so that load_job says the limit; a device or a huge file is not read to its end.
            return file.read(LARGEST_TEXT + 1)
    except OSError as error:
        near = difflib.get_close_matches(str(path), [str(each) for form in NEAR for each in Path().glob(form)], n=1)
        remedy = f"did you mean {near[0]}?" if near and isinstance(error, FileNotFoundError) else f"give the path of {what}"
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}; {remedy}") from None


def _lay(raw: Any, setting: str) -> None:
    """Put the value of `path=value` (typed as YAML reads it) where the path says; the objects on the way are made."""
    where, given, value = setting.partition("=")
    steps = re.findall(STEP, where)
    if not given or not re.fullmatch(rf"(?:{STEP})(?:\.(?:{STEP})|\[\d+\])*", where):
        raise BadInput(f"--set {setting}: must be path=value, such as spec.training.mode=async or spec.workers.replicas=2")
    try:
        typed = yaml.safe_load(value)
    except yaml.YAMLError:
        raise BadInput(f"--set {setting}: {value!r} is not a YAML value; quote it, such as --set '{where}=\"…\"'") from None
    if steps[0] not in ROOTS:
        raise BadInput(f"--set {setting}: a path begins with {', '.join(ROOTS)}; perhaps --set spec.{setting}")
    part = raw
    for i, step in enumerate(steps):
        last = i == len(steps) - 1
        name = re.sub(r"\\(.)", r"\1", step)
        if step.startswith("["):
            number = int(step[1:-1])
            if not isinstance(part, list) or number >= len(part):
                count = f"has {len(part)} items" if isinstance(part, list) else "is no list"
                raise BadInput(f"--set {setting}: what stands before {step} {count}; give an item that exists")
            if last:
                part[number] = typed
            part = part[number]
        elif not isinstance(part, dict):
            raise BadInput(f"--set {setting}: {step} lies in a value that is no object; the path leads through objects and [item] numbers")
        elif last:
            part[name] = typed
        else:
            if part.get(name) is None:
                part[name] = {}
            part = part[name]


@dataclass(frozen=True)
class Command:
    """How the workers are started that are made of one pod template."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """What the manifest adds to the environment."""
    folder: Path
    """Working folder: the manifest's."""
    unused: tuple[str, ...]
    """Names of fields that do nothing on this machine, of every template."""


def worker_commands(job: PSTrainingJob, folder: Path, environ: Mapping[str, str] = os.environ) -> tuple[Command, ...]:
    """The command of each of `job`'s workers by rank, started in `folder`; those of one template share theirs.

    Raises:
        BadInput: env that comes from the cluster, a program or script that is not here.
    """
    spec, unused = job.spec, _unused(job)
    made = {id(template): _command(template, at, folder, environ, unused) for at, template in spec.worker_templates().items()}
    return tuple(made[id(spec.worker_template(rank))] for rank in range(spec.workers.replicas))


def _command(template: Mapping[str, Any], at: str, folder: Path, environ: Mapping[str, str], unused: tuple[str, ...]) -> Command:
    """Of the pod template that stands at `at` in the manifest."""
    container, place = container_of(template, TRAINED), f"{at}.spec.containers"
    if container is None:
        raise BadInput(f"{place}: must have a container named {TRAINED}, or only one")
    env = _env(container, place)
    known = {**environ, **env}
    argv = [_expand(word, env) for word in [*container["command"], *(container.get("args") or [])]]
    argv[0] = sys.executable if argv[0] in PYTHONS else argv[0]
    _must_exist(argv, folder, known, place)
    return Command(tuple(argv), env, folder, unused)


def base_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What every process inherits: this environment without an outer job's variables, and what processes side by side need."""
    mine = {key: value for key, value in environ.items() if not key.startswith(contract.ENV_PREFIX)}
    # `python` inside a shell script is psjob's own too, as it is for the command itself.
    mine["PATH"] = os.pathsep.join(filter(None, [str(Path(sys.executable).parent), mine.get("PATH", os.defpath)]))
    mine["PYTHONUNBUFFERED"] = "1"
    # As torchrun does: many processes on one machine, each with a thread a core, stand in each other's way.
    mine.setdefault("OMP_NUM_THREADS", "1")
    return mine


def _env(container: Mapping[str, Any], place: str) -> dict[str, str]:
    at = f"{place}[].env"
    problems = []
    if container.get("envFrom"):
        problems.append(
            f"{at}From: psjob run cannot read ConfigMaps and Secrets of a cluster; write the values under env, "
            "or keep them in a manifest of their own for the cluster"
        )
    env: dict[str, str] = {}
    for entry in container.get("env") or []:
        if entry.get("valueFrom") is not None:
            problems.append(f"{at}: {entry['name']} has valueFrom, which only a cluster can fill in; give it a value to train here")
        else:
            env[entry["name"]] = _expand(entry.get("value") or "", env)
    if problems:
        raise BadInput(*problems)
    return env


def _expand(text: str, env: Mapping[str, str]) -> str:
    """`$(NAME)` of an earlier entry of env, as Kubernetes expands it; `$$` is a `$`; an unknown name stays as it is."""

    def put(found: re.Match[str]) -> str:
        if found[0].startswith("$$"):
            return "$" + found[0][2:]
        return env.get(found[1], found[0])

    return re.sub(r"\$\$(?:\([^)]*\))?|\$\(([^)]*)\)", put, text)


def _must_exist(argv: list[str], folder: Path, environ: Mapping[str, str], place: str) -> None:
    program = argv[0]
    at = f"{place}[].command"
    beside = str(folder / program) if "/" in program else program
    if shutil.which(beside, path=environ.get("PATH")) is None:
        raise BadInput(f"{at}: {program!r} is no program on this machine; install it, or name one that is in PATH or in {folder}")
    script = next((word for word in argv[1:] if not word.startswith("-")), "")
    if program == sys.executable and argv[1:2] == [script] and not (folder / script).exists():
        raise BadInput(f"{at}: there is no {script} in {folder}; psjob run starts workers in the manifest's folder")


def _unused(job: PSTrainingJob) -> tuple[str, ...]:
    pods = [template["spec"] for template in job.spec.worker_templates().values()]
    names = [name for pod in pods for name in _chosen(pod) if name not in MEANT]
    names += [f"{name} of the pod" for pod in pods for name in pod if name != "containers"]
    names += ["the other containers"] * any(len(pod["containers"]) > 1 for pod in pods)
    names += ["shards.template"] if job.spec.shards.template else []
    names += _given(job.spec.checkpoint, "checkpoint.", ("volume", "volumeClaimTemplate", "persistentVolumeClaimRetentionPolicy"))
    names += _given(job.spec.run_policy, "runPolicy.", ("ttlSecondsAfterFinished", "cleanPodPolicy"))
    names += _given(job.spec, "", ("injection", "managedBy"))
    return tuple(dict.fromkeys(names))


def _chosen(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    return container_of({"spec": pod}, TRAINED) or {}


def _given(model: Model, path: str, names: tuple[str, ...]) -> list[str]:
    """Those of `names` that the manifest has, with their path below spec."""
    fields = type(model).model_fields
    given = {fields[name].alias or name for name in model.model_fields_set}
    return [f"{path}{name}" for name in names if name in given]
