"""Pure builders: pod, Service, config, claim and NetworkPolicy documents, and the Secret of a run's keys."""

from psjob_operator.render.around import claim, config, resolves, service
from psjob_operator.render.keyfile import key_secret
from psjob_operator.render.names import LABEL_JOB
from psjob_operator.render.network import Peer, peer_of, policy, rules
from psjob_operator.render.pod import Pods, pod
from psjob_operator.render.security import NOBODY

__all__ = [
    "LABEL_JOB", "NOBODY", "Peer", "Pods", "claim", "config", "key_secret", "peer_of", "pod", "policy", "resolves", "rules", "service",
]  # fmt: skip
