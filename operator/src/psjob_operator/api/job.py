"""The whole object."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from psjob_operator.api.base import Model
from psjob_operator.api.spec import JobSpec
from psjob_operator.api.status import JobStatus


class PSTrainingJob(Model):
    """Trains a PyTorch model with a parameter server."""

    api_version: Literal["psjob.dev/v1alpha1"] = "psjob.dev/v1alpha1"
    kind: Literal["PSTrainingJob"] = "PSTrainingJob"
    metadata: Metadata
    spec: JobSpec
    """What to train."""
    status: JobStatus | None = None
    """What psjob says about it. Written by the operator alone."""


class Metadata(Model):
    """The part of ObjectMeta that psjob reads; the rest is carried along unseen."""

    model_config = ConfigDict(extra="allow", strict=False)

    name: str
    namespace: str | None = None
    uid: str | None = None
    generation: int | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, Any] = Field(default_factory=dict)
