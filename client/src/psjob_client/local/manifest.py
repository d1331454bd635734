"""Reads JOB.yaml for this machine: one document, `--set` values laid over it, validated by the same rules as the API server."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from psjob_client.local.errors import BadInput
from psjob_client.local.request import STANDARD_INPUT
from psjob_operator.api.load import LARGEST_TEXT, load_document, load_job
from psjob_operator.api.spec import PSTrainingJob

STEP = r"(?:\\.|[^.\[\]\\])+|\[\d+\]"
ROOTS = ("spec", "metadata", "apiVersion", "kind")
"""One step of a path: a name, in which `\\.` is a dot (as in Helm), or `[number]`."""
DUMPER = yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper
NEAR = ("*.yaml", "*/*.yaml", "*.yml", "*/*.yml")
"""Files whose names are compared with one that is not there."""


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
