"""Lets a model on the CPU be exchanged as one on a GPU is: its gradients and weights are staged, and lent to the shards of this host."""

from __future__ import annotations

import torch

from psjob.api import attach
from psjob.api.training_job import TrainingJob
from psjob.worker.exchange import Exchange
from psjob.worker.overlap import Overlap, tree_of
from psjob.worker.staging import Staging


def stage_as_on_a_gpu() -> None:
    """Call it before `attach`."""
    TrainingJob._data_path = _data_path  # type: ignore[method-assign]


def check_staged() -> None:
    """Call it after `attach`."""
    job = attach.current
    assert job is not None and isinstance(job.session.exchange.memory, Staging) and job.session.exchange.lends


def _data_path(job: TrainingJob, overlap: bool) -> None:
    session, device = job.session, torch.device("cpu")
    if overlap:
        overlapped = Overlap(session.rows, job.parameters, tree_of(job.model, job.parameters), device, lands=True)
        session.use(overlapped.exchange, overlapped)
    else:
        session.use(Exchange(session.rows, Staging(session.layout, device, lands=True, stage=session.stage)))
