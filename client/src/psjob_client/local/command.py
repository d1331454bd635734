"""What a worker of a pod template runs on this machine: its command, args and env. What has no meaning here is named once."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psjob_client.local.errors import BadInput
from psjob_operator import contract
from psjob_operator.api.base import Model
from psjob_operator.api.spec import PSTrainingJob
from psjob_operator.api.template import TRAINED, container_of

PYTHONS = frozenset({"python", "python3"})
MEANT = frozenset({"name", "command", "args", "env"})
"""Fields of the trained container that count on this machine."""


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
    names += ["ps.template"] if job.spec.ps.template else []
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
