"""What can be said of a run to go on from before anything is started: its newest manifest is read lightly, the runtime judges the rest."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psjob_client.local.run_folder import RUNS_FOLDER, job_of, modified, newest_of, read_file, runs_in
from psjob_client.problems import BadInput
from psjob_operator.api.spec import JobSpec
from psjob_operator.contract import ASYNC_OUTER_RULE, FINAL_WEIGHTS, GOES_ON

MANIFEST = re.compile(r"manifest-v(\d{6,18})-s(\d{12,18})\.json")
LARGEST = 128 * 1024 * 1024
"""Bytes of a manifest; as large as the runtime reads them."""
MOST_NAMED = 5


@dataclass(frozen=True)
class ResumeSource:
    """A run to go on from, as the user named it."""

    said: str
    """The option or field with its value; every refusal begins with it."""
    path: Path
    instead: str
    """How to start anew."""


def resumed(option: Path | None, spec: JobSpec) -> tuple[Path, int] | None:
    """Absolute path of the run's folder that `--resume` or else `spec` names, and the step of its checkpoint; None where neither does.

    Raises:
        BadInput: the job cannot go on from there, and that can be seen now.
    """
    source = _named(option, spec)
    if source is None:
        return None
    try:
        if not (source.path / "config.json").is_file():
            raise BadInput(f"{source.said}: {source.path} is not the folder of a run of psjob; {_near(source)}")
        found = manifests(source.path)
    except OSError as error:
        raise BadInput(f"{source.said}: {source.path} cannot be read: {error.strerror or error}; {_near(source)}") from None
    if not found:
        raise BadInput(
            f"{source.said}: that run has no checkpoint (no manifest in {source.path}): it ended before its first, or kept none; "
            f"name a run that has one, or {source.instead}"
        )
    newest = next((manifest for path in found if (manifest := _whole(path)) is not None), None)
    if newest is None:
        raise BadInput(
            f"{source.said}: that run has no whole checkpoint: {_list([path.name for path in found])} or a file listed there is damaged; "
            f"put the files of {source.path} back from a copy, name another run, or {source.instead}"
        )
    _must_fit(source, newest, spec)
    return source.path.absolute(), int(newest["step"])


def _named(option: Path | None, spec: JobSpec) -> ResumeSource | None:
    if option is not None:
        return ResumeSource(f"--resume {option}", option, "start anew without --resume")
    asked, anew = spec.checkpoint.resume_from, "start anew with --set spec.checkpoint.resumeFrom=null"
    if asked is None:
        return None
    if asked.run:
        return ResumeSource(f"spec.checkpoint.resumeFrom.run: {asked.run}", Path(RUNS_FOLDER) / asked.run, anew)
    said = f"spec.checkpoint.resumeFrom.job: {asked.job}"
    there = runs_in(Path(RUNS_FOLDER))
    newest = newest_of(there, asked.job or "")
    if newest is None:
        jobs = _list(sorted({job_of(path) for path in there})) or "none"
        raise BadInput(
            f"{said}: no run of that job is in {Path(RUNS_FOLDER).absolute()} (jobs with runs there: {jobs}); "
            f"run it first, start in the folder that it was run in, or {anew}"
        )
    return ResumeSource(said, newest, anew)


def _near(source: ResumeSource) -> str:
    runs = [path for path in Path(RUNS_FOLDER).glob("*") if (path / "config.json").is_file()]
    if not runs:
        return f"there is no run in {Path(RUNS_FOLDER).absolute()}; start in the folder that the run was started in, or {source.instead}"
    return f"name one of the runs here ({_list([path.name for path in sorted(runs, key=modified)])} in {RUNS_FOLDER}), or {source.instead}"


def _list(names: list[str]) -> str:
    return ", ".join(names[-MOST_NAMED:]) + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")


def manifests(folder: Path) -> list[Path]:
    """The newest first."""
    matches = [match for path in folder.iterdir() if (match := MANIFEST.fullmatch(path.name))]
    return [folder / match[0] for match in sorted(matches, key=lambda match: (int(match[1]), int(match[2])), reverse=True)]


def _whole(path: Path) -> Mapping[str, Any] | None:
    """The manifest, if it has its own hash and the files that it lists have their sizes; what lies in them the runtime reads."""
    try:
        body = json.loads(read_file(path, LARGEST))
        said = body.pop("sha256")
        raw = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
        listed = [*body["files"], *body["tables"].values(), *(body[name] for name in ("records", "buffers") if body[name] is not None)]
        missing = any((path.parent / str(file["name"])).stat().st_size != file["bytes"] for file in listed)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return None if missing or said != hashlib.sha256(raw.encode()).hexdigest() else body


def _must_fit(source: ResumeSource, manifest: Mapping[str, Any], spec: JobSpec) -> None:
    if manifest.get("final") is True:
        raise BadInput(
            f"{source.said}: that run is complete (step {manifest.get('step')}); load {source.path / FINAL_WEIGHTS} in the script "
            f"to train on from its weights, or {source.instead}"
        )
    workers, mode = manifest.get("workers"), manifest.get("mode")
    clocks = workers.get("clock") if isinstance(workers, dict) else None
    if isinstance(clocks, list) and len(clocks) != spec.workers.replicas:
        raise BadInput(
            f"{source.said}: that run had {len(clocks)} workers, spec.workers.replicas is {spec.workers.replicas}; "
            f"continue with --set spec.workers.replicas={len(clocks)} (another number of shards is fine), or {source.instead}"
        )
    training = spec.training
    ours: str = "backup" if training.sync is not None and training.sync.backup_workers else training.mode
    if training.mode == "local":
        quorum = training.local is not None and training.local.quorum > 0
        ours = "local-async" if training.update_rule else "local-quorum" if quorum else "local"
    if isinstance(mode, str) and ours not in (modes := GOES_ON.get(mode, (mode,))):
        also = {"backup": " with backupWorkers", "local-quorum": " with a quorum", "local-async": f" with {ASYNC_OUTER_RULE}"}.get(ours, "")
        raise BadInput(
            f"{source.said}: that run was {mode[:64]}, spec.training.mode is {training.mode}{also}; "
            f"continue with --set spec.training.{_field_of(modes[0], ours)}, or {source.instead}"
        )


def _field_of(mode: str, ours: str) -> str:
    """What makes a job that is of kind `ours` one of a manifest's mode."""
    if mode == "local" and ours in ("local-quorum", "local-async"):
        return "local.quorum=0" if ours == "local-quorum" else "updateRule=null"
    kinds = {"backup": "sync.backupWorkers=1", "local-quorum": "local.quorum=1", "local-async": f"updateRule={ASYNC_OUTER_RULE}"}
    return kinds.get(mode, f"mode={mode[:64]}")
