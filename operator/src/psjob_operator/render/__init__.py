"""Pure builders: pod, Service, config and claim documents."""

from psjob_operator.render.around import claim, config, service
from psjob_operator.render.names import LABEL_JOB
from psjob_operator.render.pod import Pods, pod
from psjob_operator.render.security import NOBODY

__all__ = ["LABEL_JOB", "NOBODY", "Pods", "claim", "config", "pod", "service"]
