"""A worker's pod before psjob adds to it: the user's template, untouched."""

from __future__ import annotations

import copy

from psjob_operator.api.template import container_of
from psjob_operator.plan.config import ConfigSource
from psjob_operator.render.names import Document


def worker_template(job: ConfigSource, trained: str) -> tuple[Document, Document]:
    """A copy of the template, and the container in it that is trained in, which has that name or is the only one."""
    template = copy.deepcopy(job.spec.workers.template)
    container = container_of(template, trained)
    if container is None:
        raise ValueError(f"spec.workers.template.spec.containers: none is named {trained}, and there is not exactly one; rename one")
    return template, container
