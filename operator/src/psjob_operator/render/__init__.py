"""Pure builders: pod, Service, config and claim documents, and the Secret of a run's keys."""

from psjob_operator.render.around import claim, config, service
from psjob_operator.render.keyfile import key_secret
from psjob_operator.render.names import LABEL_JOB
from psjob_operator.render.pod import Pods, pod
from psjob_operator.render.security import NOBODY

__all__ = ["LABEL_JOB", "NOBODY", "Pods", "claim", "config", "key_secret", "pod", "service"]
