"""`psjob render`: the Kubernetes objects that the operator makes of a job; `psjob crd`: the PSTrainingJob's definition."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from psjob_client.cli.options import Settings
from psjob_client.cli.output import emit
from psjob_client.local.manifest import read_job
from psjob_operator import keys
from psjob_operator import render as objects
from psjob_operator.api.crd import NoAnchors, crd_yaml
from psjob_operator.api.spec import PSTrainingJob
from psjob_operator.contract import AUTHORITY, CERTIFICATE, WORKER_CERTIFICATE
from psjob_operator.plan.actions import Action, CreateProcess, EnsureClaim, EnsureConfig, EnsureKey, EnsureService
from psjob_operator.plan.objects import listening_workers, volume
from psjob_operator.plan.observed_state import ObservedState, ResumeSource
from psjob_operator.plan.plan import plan

NO_UID = "00000000-0000-0000-0000-000000000000"
"""Stands for the uid that the API server gives, and for the run of a job to continue from."""
NO_KEY = bytes(32)
"""Stands for each key of a run."""
RUNTIME_IMAGE = "psjob-runtime:latest"


def render(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="Manifest of one PSTrainingJob.")],
    settings: Settings = None,
    runtime_image: Annotated[
        str, typer.Option(envvar="PSJOB_RUNTIME_IMAGE", help="Image that puts the psjob library into workers' pods.")
    ] = RUNTIME_IMAGE,
) -> None:
    """Print every object that the operator would create, as YAML; the job's uid and its keys are written as zeros."""
    emit(render_yaml(read_job(job, tuple(settings or ())), runtime_image))


def render_yaml(job: PSTrainingJob, runtime_image: str = RUNTIME_IMAGE) -> str:
    """The documents of `documents` as YAML, without anchors."""
    return yaml.dump_all(
        documents(job, runtime_image), Dumper=NoAnchors, sort_keys=False, width=140, allow_unicode=True, explicit_start=True
    )


def documents(job: PSTrainingJob, runtime_image: str = RUNTIME_IMAGE, *, asks_nothing: bool = False) -> list[dict[str, Any]]:
    """Service, ConfigMap, claim, keys and pods of a job's first turn, in the order of their creation. A suspended job shows what it
    will have, a job of another controller what it would have. `asks_nothing`: as where a LimitRange takes the place of psjob's requests."""
    snapshot = ObservedState(
        name=job.metadata.name,
        namespace=job.metadata.namespace or "default",
        uid=NO_UID,
        generation=1,
        resource_version="0",
        created=0.0,
        spec=job.spec.model_copy(update={"suspend": None, "managed_by": None}),
        status=None,
        runtime_image=runtime_image,
        resume_source=ResumeSource(NO_UID, True, volume(job.metadata.name, job.spec)),
    )
    pods = objects.Pods(snapshot, asks_nothing=asks_nothing)
    return [_document(snapshot, action, pods) for action in plan(snapshot, 0.0).actions]


def _document(snapshot: ObservedState, action: Action, pods: objects.Pods) -> dict[str, Any]:
    match action:
        case EnsureService():
            return objects.service(snapshot)
        case EnsureConfig():
            return objects.config(snapshot, action.format, action.encryption, action.resumed_from)
        case EnsureClaim():
            return objects.claim(snapshot)
        case EnsureKey():
            return objects.key_secret(snapshot, action.number, dict.fromkeys(keys.NAMES, NO_KEY), _no_certificates(snapshot, action))
        case CreateProcess():
            return pods.pod(action)
        case _:
            raise AssertionError(f"a new job's first turn never has {type(action).__name__}")


def _no_certificates(snapshot: ObservedState, action: EnsureKey) -> dict[str, bytes]:
    """Empty files, of the names that they will have."""
    if not action.certificates:
        return {}
    shards = [CERTIFICATE.format(index=index) for index in range(snapshot.spec.shards.replicas)]
    workers = [WORKER_CERTIFICATE.format(index=index) for index in range(listening_workers(snapshot.spec))]
    return dict.fromkeys([AUTHORITY, *shards, *workers], b"")


def crd() -> None:
    """Print the CRD of PSTrainingJob, ready for `kubectl apply -f -`."""
    emit(crd_yaml())
