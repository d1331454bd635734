"""Pure builders: pod, Service, config, claim and NetworkPolicy documents, and the Secret of a run's keys."""

from psjob_operator.render.objects import LABEL_JOB, Peer, claim, config, peer_of, policy, resolves, rules, service
from psjob_operator.render.pod import Pods, key_secret, pod
from psjob_operator.render.shard import NOBODY

__all__ = [
    "LABEL_JOB", "NOBODY", "Peer", "Pods", "claim", "config", "key_secret", "peer_of", "pod", "policy", "resolves", "rules", "service",
]  # fmt: skip
