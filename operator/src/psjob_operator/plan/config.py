"""The config file of a job (contract.CONFIG_FORMAT): what every process of it is told, the same for all of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from psjob_operator.api.spec import JobSpec, Local, Stage
from psjob_operator.contract import CONFIG_FORMAT, DATA_PORT, GRADIENT_MEBIBYTES, LEAST_SHARE_MEBIBYTES, STATUS_PORT
from psjob_operator.plan import naming

CHECKPOINTS = "/psjob-checkpoints"
"""Where shards of a cluster see the checkpoint volume."""
CONNECT_SECONDS = 600.0


class ConfigSource(Protocol):
    """What the config and the rendered objects need to know of a job; a Snapshot is one."""

    @property
    def name(self) -> str:
        """metadata.name."""

    @property
    def namespace(self) -> str:
        """metadata.namespace."""

    @property
    def uid(self) -> str:
        """metadata.uid, which is the run."""

    @property
    def spec(self) -> JobSpec:
        """The spec."""


def job_config(
    job: ConfigSource,
    shards: Sequence[tuple[str, int, int]],
    checkpoints: str = CHECKPOINTS,
    config_format: int = CONFIG_FORMAT,
    encryption: str = "auto",
    resumed_from: str | None = None,
) -> dict[str, Any]:
    """The config of `job`; `shards` are (host, port, status port) in index order, `checkpoints` the folder as shards see it.
    `encryption` and `resumed_from`: of status.pinned.

    Raises KeyError for a format that this version does not write (contract.CONFIG_FORMATS).
    """
    return {"format": config_format, **WRITERS[config_format](job, shards, checkpoints, resumed_from), "encryption": encryption}


def _format_1(job: ConfigSource, shards: Sequence[tuple[str, int, int]], checkpoints: str, resumed_from: str | None) -> dict[str, Any]:
    """What runs of this format read. Another value where a job says nothing, or a key that goes, is another format."""
    spec = job.spec
    checkpoint = spec.checkpoint
    return {
        "job": job.name,
        "run": job.uid,
        "specHash": spec_hash(spec),
        "mode": spec.training.mode,
        "backupWorkers": spec.training.backup_workers,
        "staleness": spec.training.staleness,
        "splits": spec.training.splits,
        "local": (spec.training.local or Local()).to_manifest() if spec.training.mode == "local" else None,
        "seed": spec.training.seed,
        "updateAt": spec.training.update_at,
        "updateRule": spec.training.update_rule,
        "ruleOptions": spec.training.rule_options or {},
        "reduction": spec.training.reduction,
        "lrScaling": spec.training.lr_scaling,
        "warmupSteps": spec.training.warmup_steps,
        "maxGradNorm": spec.training.max_grad_norm,
        "maxPushNorm": spec.training.max_push_norm,
        "nonFinite": spec.training.non_finite,
        "transport": spec.training.transport,
        "streams": spec.training.streams,
        "gradientBytes": gradient_mebibytes(spec) << 20,
        "compression": spec.training.compression.to_manifest(),
        "workers": spec.workers.replicas,
        "shards": [{"host": host, "port": port, "statusPort": status} for host, port, status in shards],
        "checkpoint": {
            "intervalSeconds": checkpoint.interval_seconds,
            "everySteps": checkpoint.every_steps,
            "keep": checkpoint.keep,
            "request": checkpoint.request,
            "disabled": bool(checkpoint.disabled),
            "resumeFrom": {"path": f"{checkpoints.rstrip('/')}/{resumed_from}"} if resumed_from else None,
        },
        "successPolicy": spec.run_policy.success_policy,
        "shardTimeoutSeconds": float(spec.ps.shard_timeout_seconds),
        "stepTimeoutSeconds": None if spec.workers.step_timeout_seconds is None else float(spec.workers.step_timeout_seconds),
        "connectSeconds": CONNECT_SECONDS,
        **_several(spec),
        **_summed(spec),
        **_staged(spec),
    }


def _several(spec: JobSpec) -> dict[str, Any]:
    """As `_staged`, of a job whose workers have one process."""
    return {"processes": spec.processes()} if spec.processes() > 1 else {}


def _summed(spec: JobSpec) -> dict[str, Any]:
    """The same. It decides no bit, so a run may go on with another one."""
    return {"localSum": spec.workers.local_sum} if spec.processes() > 1 and spec.workers.local_sum != "auto" else {}


def _staged(spec: JobSpec) -> dict[str, Any]:
    """Keys that a job without stages does not have: the text of its config stays as runs know it that began before there were any."""
    if not spec.stages:
        return {}
    pipeline = spec.training.pipeline
    return {"stages": [_stage(stage) for stage in spec.stages], "pipeline": None if pipeline is None else pipeline.to_manifest()}


def _stage(stage: Stage) -> dict[str, Any]:
    return {"name": stage.name, "replicas": stage.replicas, "cut": stage.cut}


WRITERS: Mapping[int, Callable[[ConfigSource, Sequence[tuple[str, int, int]], str, str | None], dict[str, Any]]] = {1: _format_1}
"""By format: the config without its number."""


def gradient_mebibytes(spec: JobSpec) -> int:
    """MiB of gradients that a shard may hold of all workers together."""
    given = spec.training.gradient_mebibytes
    return max(GRADIENT_MEBIBYTES, LEAST_SHARE_MEBIBYTES * spec.workers.replicas) if given is None else given


def cluster_config(
    job: ConfigSource, config_format: int = CONFIG_FORMAT, encryption: str = "auto", resumed_from: str | None = None
) -> dict[str, Any]:
    """The config of `job` on a cluster, where shards are found by name."""
    shards = [(naming.address(job.name, index), DATA_PORT, STATUS_PORT) for index in range(job.spec.ps.shards)]
    return job_config(job, shards, config_format=config_format, encryption=encryption, resumed_from=resumed_from)


def config_text(config: dict[str, Any]) -> str:
    """The file's text; the same for equal configs."""
    return json.dumps(config, indent=1, sort_keys=True) + "\n"


def digest(config: dict[str, Any]) -> str:
    """Short name of the config's content, fit for a label."""
    return text_digest(config_text(config))


def text_digest(text: str) -> str:
    """The same of the file's text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def spec_hash(spec: JobSpec) -> str:
    """sha256 of what decides which updates are made: training, the number of workers and the stages. Shards may differ between runs."""
    training = {name: value for name, value in spec.training.to_manifest().items() if name != "encryption"}
    relevant: dict[str, Any] = {"training": training, "workers": spec.workers.replicas}
    relevant |= _several(spec)
    if spec.stages:
        relevant["stages"] = [_stage(stage) for stage in spec.stages]
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()
