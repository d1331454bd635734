"""What a shard knows of a worker's rule by its own config: the name, and hyperparameters that are the manifest's."""

from __future__ import annotations

from psjob.process.config import Config
from psjob.rules.base import Hyperparameters
from psjob.rules.optimizers import OUTER, of_manifest


def rule_problem(config: Config, rank: int, rule: str) -> str | None:
    """Where the manifest says which rule a worker's hello must name, and it names another, a sentence."""
    wanted = _wanted(config)
    if wanted is not None and rule != wanted:
        return f"worker {rank}'s updates are of rule {rule[:40]}, and the manifest says {wanted}; run one version of psjob in all pods"
    if config.update_at == "server" and rule == "reduce":
        return f"worker {rank} steps by itself, and the manifest says training.updateAt: server; run one version of psjob in all pods"
    return None


def own_hyperparameters(config: Config, rule: str) -> Hyperparameters:
    """Those that a push of this rule has from the manifest, whatever its worker says."""
    if rule != _wanted(config):
        return {}
    outer = {"lr": config.local.lr, "momentum": config.local.momentum} if config.mode == "local" else {}
    try:
        return outer if config.update_rule is None else {**outer, **of_manifest(rule, config.workers, config.rule_options)}
    except ValueError:
        return outer  # every worker refuses to begin with these


def _wanted(config: Config) -> str | None:
    """The rule that the manifest says; None where it is the script's optimizer's."""
    return config.update_rule or (OUTER if config.mode == "local" else None)
