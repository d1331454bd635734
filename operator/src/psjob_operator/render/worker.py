"""A worker's pod before psjob adds to it: the user's template, untouched."""

from __future__ import annotations

import copy

from psjob_operator.api.template import TRAINED, container_of
from psjob_operator.plan.config import ConfigSource
from psjob_operator.render.names import Document


def worker_template(job: ConfigSource) -> tuple[Document, Document]:
    """A copy of the template, and the container in it that is trained in."""
    template = copy.deepcopy(job.spec.workers.template)
    container = container_of(template, TRAINED)
    if container is None:
        raise ValueError(f"spec.workers.template.spec.containers: none is named {TRAINED}, and there is not exactly one; rename one")
    return template, container
