"""Which rule a job's shards run: that of the script's optimizer, or the one that the manifest names."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from psjob import optimizers
from psjob.config import Config
from psjob.errors import Refused


def rule_of(optimizer: torch.optim.Optimizer, job: Config) -> str:
    """The name of the shards' rule: what the manifest names, else the optimizer's, else `reduce`. Raises Refused where none will do."""
    rule, _ = optimizers.describe(optimizer)
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise Refused("LBFGS evaluates the loss several times in one step, which a job cannot synchronise; use another optimizer")
    if job.update_rule is not None:
        return _named_rule(job.update_rule, rule, optimizer, job.mode)
    if job.update_at == "worker" or (rule is None and job.update_at is None):
        if job.mode != "sync":
            raise Refused(
                f"{name} has no rule on the shards, and training.mode {job.mode} needs one; use SGD, Adam, AdamW or Adagrad, "
                "or training.mode sync"
            )
        return "reduce"
    if rule is None:
        raise Refused(f"training.updateAt is server, but {name} has no rule on the shards; use SGD, Adam, AdamW or Adagrad, or drop it")
    return rule


def _named_rule(wanted: str, rule: str | None, optimizer: torch.optim.Optimizer, mode: str) -> str:
    """The rule that the manifest names. Raises Refused where the script's optimizer or the mode does not go with it."""
    if mode != "async":
        raise Refused(f"training.updateRule {wanted} takes one worker's push at a time; take training.mode async, or leave updateRule out")
    groups = optimizers.numbers(optimizer) if rule == "sgd" else []
    odd = [group for group in groups if group["dampening"] or group["maximize"] or not group["momentum"]]
    if odd or not groups:
        raise Refused(
            f"training.updateRule {wanted} takes lr, momentum and weight_decay from torch.optim.SGD with a momentum, without dampening and "
            f"maximize; the script has {type(optimizer).__name__}{_told(odd[0]) if odd else ''}"
        )
    return wanted


def _told(group: Mapping[str, float | bool]) -> str:
    return " with " + ", ".join(f"{name} {group[name]:g}" for name in ("momentum", "dampening", "maximize"))
