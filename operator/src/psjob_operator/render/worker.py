"""A worker's pod before psjob adds to it: the user's template, untouched."""

from __future__ import annotations

import copy

from psjob_operator.api.template import TRAINED, container_of
from psjob_operator.plan.config import ConfigSource
from psjob_operator.render.interpreter import interpreter
from psjob_operator.render.names import Document


def worker_template(job: ConfigSource, rank: int, trained: str) -> tuple[Document, Document]:
    """A copy of the template of a worker, and the container in it that is trained in, which has that name or is the only one. Of a
    stage's own template it is the one that a job which begins now would have."""
    template = copy.deepcopy(job.spec.worker_template(rank))
    container = container_of(template, trained)
    if container is None and job.spec.worker_template(rank) is not job.spec.workers.template:
        container = container_of(template, TRAINED)
    if container is None:
        raise ValueError(f"worker {rank}: no container of its template is named {trained}, and there is not exactly one; rename one")
    if job.spec.processes() > 1:
        command = container.get("command") or []
        container["command"] = [*interpreter(command).words, "-m", "psjob.agent", *command]
    return template, container
