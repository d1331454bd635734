"""The config file of a job, as every ground hands it to its processes. Its content is decided in plan/config.py."""

from __future__ import annotations

from psjob_operator.plan.config import CHECKPOINTS, Job, cluster_config, config_text, digest, job_config

__all__ = ["CHECKPOINTS", "Job", "cluster_config", "config_text", "digest", "job_config"]
