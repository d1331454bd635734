"""Which rule a job's shards run, the optimizer's or the one that the manifest names, and where its hyperparameters come from.

The learning rate of a job whose updates are the mean of several pushes: linear scaling, and warm-up (Goyal et al. 2017).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from psjob import contract, modes, rules
from psjob.process.config import Config, ProcessContext
from psjob.process.errors import Refused
from psjob.rules import optimizers
from psjob.rules.base import Hyperparameters, check_hyperparameters
from psjob.rules.optimizers import OUTER, listed_names, of_manifest


@dataclass(frozen=True)
class LrScaling:
    """`pushes` is how many make an update, k. With `linear` the rate is k times the script's.

    In the first `warmup` steps it rises, the same amount at each, from a k-th of what it is afterwards: with `linear` from the script's
    own. It follows only from the step, so a worker that starts again has the same.
    """

    pushes: int = 1
    linear: bool = False
    warmup: int = 0

    @classmethod
    def of(cls, job: Config, optimizer: torch.optim.Optimizer) -> LrScaling:
        """What the manifest asks for. Raises Refused if the optimizer has no learning rate to scale."""
        made = cls((job.workers - job.backup_workers) * job.processes, job.lr_scaling == "linear", job.warmup_steps)
        if (made.linear or made.warmup) and not all("lr" in group for group in optimizer.param_groups):
            raise Refused(
                f"training.lrScaling and warmupSteps change lr, and {type(optimizer).__name__} has none in its parameter groups; "
                "leave both out"
            )
        return made

    def factor(self, clock: int) -> float:
        """What the script's learning rate is multiplied with at this step of a worker's."""
        whole = float(self.pushes if self.linear else 1)
        if clock >= self.warmup:
            return whole
        least = whole / self.pushes
        return least + (whole - least) * clock / self.warmup

    def hyperparameters(self, groups: Sequence[Mapping[str, Any]], clock: int) -> list[dict[str, Any]]:
        """Hyperparameters of parameter groups, or of tables, with that learning rate; those that have none stay."""
        factor = self.factor(clock)
        return [{**group, "lr": group["lr"] * factor} if "lr" in group else {**group} for group in groups]

    @contextmanager
    def on(self, optimizer: torch.optim.Optimizer, clock: int) -> Iterator[None]:
        """The optimizer steps with that learning rate inside; outside it has the script's."""
        factor, own = self.factor(clock), [group.get("lr") for group in optimizer.param_groups]
        try:
            for group, lr in zip(optimizer.param_groups, own, strict=True):
                if lr is not None and factor != 1:
                    group["lr"] = lr * factor
            yield
        finally:
            for group, lr in zip(optimizer.param_groups, own, strict=True):
                if lr is not None:
                    group["lr"] = lr


MOST_LISTED: Final = 200_000
"""Tensors of workers in a manifest, where each takes up to 70 bytes of 16 MiB."""


@dataclass(frozen=True)
class RuleChoice:
    """`rule` is the shards'; `like` is the rule of the script's own optimizer, in whose terms `state_dict` speaks (None: it has none).

    `options` are the hyperparameters of the rule that the optimizer does not have; with `like` None all are.
    """

    rule: str
    like: str | None
    options: Hyperparameters = field(default_factory=dict)

    def hyperparameters(self, optimizer: torch.optim.Optimizer) -> list[dict[str, float | bool]]:
        """The rule's hyperparameters as the optimizer is now, a parameter group each. Raises Refused naming one that cannot be."""
        rule = rules.named(self.rule)
        own = {**rule.hyperparameters, **self.options}
        if self.like is None:
            return [dict(own) for _ in optimizer.param_groups]
        try:
            groups = optimizers.current_hyperparameters(optimizer)
            return [check_hyperparameters(rule, {name: group.get(name, value) for name, value in own.items()}) for group in groups]
        except ValueError as error:
            raise Refused(str(error)) from None


@dataclass(frozen=True)
class _Goes:
    """What a rule goes with: torch's optimizer of this rule, with hyperparameters that are not 0 (True) or are (False)."""

    like: str
    hyperparameters: Mapping[str, bool] = field(default_factory=dict)

    def words(self) -> str:
        given = [f"a {name}" for name, there in self.hyperparameters.items() if there]
        left_out = [name for name, there in self.hyperparameters.items() if not there]
        parts = [f"with {listed_names(given)}"] * bool(given) + [f"without {listed_names(left_out)}"] * bool(left_out)
        return f"torch.optim.{'Adam' if self.like == 'adam' else 'SGD'} {', '.join(parts)}".rstrip()


_HEAVY: Final = _Goes("sgd", {"momentum": True, "dampening": False, "maximize": False})
_UNDAMPENED: Final = _Goes("sgd", {"nesterov": False, "dampening": False, "maximize": False})
_GOES: Final[Mapping[str, _Goes]] = {
    "plain": _Goes("sgd", {"momentum": False, "maximize": False}),
    "heavy-ball": _UNDAMPENED,
    "dc-asgd": _UNDAMPENED,
    "lr-over-lag": _UNDAMPENED,
    "ftrl": _Goes("sgd", {"momentum": False, "weight_decay": False, "maximize": False}),
    "adam-async": _Goes("adam"),
}
"""Those that go with something else than an SGD with momentum."""


def chosen_rule(optimizer: torch.optim.Optimizer, job: Config) -> RuleChoice:
    """The shards' rule: what the manifest names, else the optimizer's, else `reduce`. Raises Refused if none will do."""
    rule, _ = optimizers.describe_optimizer(optimizer)
    name = type(optimizer).__name__
    check_kind(optimizer)
    if job.mode == "local":
        return _outer_rule(optimizer, job)
    if job.update_rule is not None:
        return _named(job.update_rule, rule, optimizer, job)
    if _steps_alone(rule, job):
        if job.delay or not modes.of(job).worker_update:
            late = job.mode == "sync" and job.delay > 0
            needs = f"mode {job.mode}" if job.mode != "sync" else f"sync.backupWorkers {job.backup_workers}"
            if late:
                needs = f"delay {job.delay}"
            odd = next((p for group in optimizer.param_groups for p in group["params"] if not optimizers.updatable(p)), None)
            if odd is not None:
                raise Refused(_whole_numbers(odd, f"rules of training.{needs}"))
            raise Refused(
                f"{name} has no rule on the shards, and training.{needs} needs one; use SGD, Adam, AdamW, NAdam or Adagrad, "
                + ("or leave delay out" if late else "or training.mode sync without backupWorkers")
            )
        if job.stages:
            raise Refused(f"{name} has no rule on the shards, and a job of stages needs one; use SGD, Adam, AdamW, NAdam or Adagrad")
        return RuleChoice("reduce", rule)
    if rule is None:
        raise Refused(
            f"training.updateAt is shard, but {name} has no rule on the shards; use SGD, Adam, AdamW, NAdam or Adagrad, or drop it"
        )
    return RuleChoice(rule, rule)


def check_kind(optimizer: torch.optim.Optimizer) -> None:
    """Raise Refused for an optimizer that no job can step."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise Refused(
            "LBFGS evaluates the loss several times in one step, and a job takes the mean of the workers' gradients once. Take "
            "torch.optim.Adam, or SGD with momentum, and more steps"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise Refused(
            "SparseAdam steps the rows of a worker's own batch, and the mean of the workers' gradients is dense. Take ps.Embedding(…, "
            "optimizer='adam', lr=…), whose shards step the rows of all batches, or torch.optim.Adagrad"
        )


def as_it_runs(here: ProcessContext, optimizer: torch.optim.Optimizer) -> ProcessContext:
    """The place of a worker that comes back: where its optimizer steps by itself the job is in sync, whatever its config asks for since."""
    came_back, job = here.number > 1 or here.rewinds > 0, here.config
    if (
        came_back
        and job.mode in contract.GOES_ON
        and job.update_rule is None
        and _steps_alone(optimizers.describe_optimizer(optimizer)[0], job)
    ):
        return replace(here, config=replace(job, mode="sync"))
    return here


def _steps_alone(rule: str | None, job: Config) -> bool:
    return job.update_at == "worker" or (rule is None and job.update_at is None)


def check_state_size(rule: str, blocks: int, workers: int) -> None:
    """Raise Refused if a checkpoint's manifest could not list what the shards keep of each worker."""
    listed = blocks * workers * len(rules.named(rule).per_worker)
    if listed > MOST_LISTED:
        raise Refused(
            f"training.updateRule {rule} keeps {listed} tensors for {workers} workers and {blocks} blocks on the shards, "
            f"at most {MOST_LISTED} can be listed in a checkpoint; take dana-slim, or fewer workers"
        )


def _whole_numbers(p: torch.Tensor, rule: str) -> str:
    return (
        f"a parameter of shape {tuple(p.shape)} is {p.dtype}; {rule} take floating point ones. Make it a buffer by register_buffer, "
        "or leave it out of the optimizer"
    )


def _outer_rule(optimizer: torch.optim.Optimizer, job: Config) -> RuleChoice:
    """Of mode local, where the script's optimizer steps on the worker, whichever it is. Raises Refused."""
    odd = next((p for group in optimizer.param_groups for p in group["params"] if not optimizers.updatable(p)), None)
    if odd is not None:
        raise Refused(_whole_numbers(odd, "rules of training.mode local"))
    hyperparameters = {"lr": job.local.lr, "momentum": job.local.momentum}
    if job.update_rule is None:
        return RuleChoice(OUTER, None, hyperparameters)
    return RuleChoice(job.update_rule, None, {**hyperparameters, **_options(job.update_rule, job)})


def _named(wanted: str, like: str | None, optimizer: torch.optim.Optimizer, job: Config) -> RuleChoice:
    """The rule that the manifest names. Raises Refused if the script's optimizer, the mode or an option does not go with it."""
    goes = _GOES.get(wanted, _HEAVY)
    groups = optimizers.current_hyperparameters(optimizer) if like == goes.like else []
    odd = [group for group in groups if any(bool(group[name]) != there for name, there in goes.hyperparameters.items())]
    if odd or not groups:
        taken = [name for name in rules.named(wanted).hyperparameters if name not in _own(wanted)]
        raise Refused(
            f"training.updateRule {wanted} takes {listed_names(taken)} from {goes.words()}; "
            f"the script has {type(optimizer).__name__}{_told(odd[0], goes) if odd else ''}"
        )
    made = RuleChoice(wanted, like, _options(wanted, job))
    made.hyperparameters(optimizer)  # what cannot be is refused at attach
    return made


def _own(wanted: str) -> tuple[str, ...]:
    """Numbers of a rule that no optimizer of the script's has."""
    return (*contract.UPDATE_RULES[wanted], "workers")


def _options(wanted: str, job: Config) -> Hyperparameters:
    """training.ruleOptions as the rule takes them; Refused names one that it does not know, or whose value cannot be."""
    try:
        return of_manifest(wanted, job.workers, job.rule_options)
    except ValueError as error:
        raise Refused(str(error)) from None


def _told(group: Mapping[str, float | bool], goes: _Goes) -> str:
    return " with " + ", ".join(f"{name} {group[name]:g}" for name in goes.hyperparameters)
