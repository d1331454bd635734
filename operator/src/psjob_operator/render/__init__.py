"""Pure builders: pod, Service, config, claim and NetworkPolicy documents, and the Secret of a run's keys."""

from psjob_operator.render.objects import LABEL_JOB, Peer, claim, config, pair_claim, peer_of, policy, policy_rules, resolves, service
from psjob_operator.render.pod import Pods, key_secret, pod
from psjob_operator.render.shard import NOBODY

__all__ = [
    "LABEL_JOB", "NOBODY", "Peer", "Pods", "claim", "config", "key_secret", "pair_claim", "peer_of", "pod", "policy", "policy_rules",
    "resolves", "service",
]  # fmt: skip
