"""Weights of a stage: with flush the parameters themselves, without it each version in memory of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from psjob.pipeline import predict
from psjob.pipeline.predict import check_correction
from psjob.pipeline.stage import OneMemory
from psjob.process.errors import Refused

if TYPE_CHECKING:
    from psjob.api.attached import AttachedJob
    from psjob.api.staged import StagedPipeline

Weights = dict[str, torch.Tensor]


class StageVersions:
    """Of one process. What a graph still needs of a version lives on with the graph; here are those that a forward may take.

    Attributes:
        rows: names of the rows of the job's table, in order.
        number: of the newest version.
    """

    def __init__(self, pipe: StagedPipeline, job: AttachedJob) -> None:
        self._way, self._job, config = pipe.way, job, job.place.config
        parameters = dict(pipe.model.named_parameters())
        self._parameters = {name: parameters[name] for name in pipe.run.part.parameters}
        names = {id(p): name for name, p in parameters.items()}
        self.rows = [names[id(p)] for p in job.parameters]
        self._groups = dict(zip(self.rows, (spec.group for spec in job.session.layout.table), strict=True))
        self.number = job.session.clock
        self._late = pipe.delay_by_stage[pipe.stage]
        self._behind = self._late if pipe.stage else 0
        """Versions by which the first stage's may be older than this stage's own."""
        self._predicts = self._way.predicts and self._late > 0
        self._word, self._anneal, self._highest = config.correct, config.anneal_steps, config.highest_momentum
        self._stages = len(config.stages.replicas)
        self._corrector = pipe.correct() if pipe.correct is not None and self._late else None
        own = config.stages.replicas[pipe.stage]
        self._parts = {name: pipe.scale[name] / own for name in self._parameters}
        """A worker's gradient by its part in the mean of the shards: what is left is the mean over its own samples."""
        self._kept = {self.number: {name: _leaf(p, p) for name, p in self._parameters.items()}}
        self._memory = OneMemory(self._kept[self.number]) if self._way.in_place else None
        self._ahead = self._kept[self.number]
        """The newest, as they are expected when the gradient of a forward counts."""

    def check(self, hyperparameters: list[dict[str, float | bool]]) -> None:
        """Raise Refused for what the script steps with, where the job's settings for late stages do not go with it."""

        def each(look: Callable[[Mapping[str, float | bool]], None]) -> None:
            for group in hyperparameters:
                look(group)

        looks: dict[str, Callable[[], object]] = {}
        if self._way.predicts:
            looks["predict nesterov"] = partial(each, partial(predict.check_step, self._job.rule))
        if self._anneal is not None:
            looks["annealSteps"] = lambda: predict.annealed(hyperparameters, 0, 0, 1)
        if self._highest is not None:
            looks["highestMomentum"] = lambda: self._with_momentum(hyperparameters)
        if self._word != "none":
            looks[f"correct {self._word}"] = partial(each, partial(check_correction, self._word))
        for field, look in looks.items():
            try:
                look()
            except ValueError as error:
                raise Refused(f"training.pipeline.{field}: {error}; or leave {field.split()[0]} out") from error

    def pushed_with(self, hyperparameters: list[dict[str, float | bool]], update: int) -> list[dict[str, float | bool]]:
        """Those of the update of that number: learning rate and momentum go by the stage's delay, where the job says so."""
        if self._anneal is not None:
            hyperparameters = predict.annealed(hyperparameters, self._late, update, self._anneal)
        if self._highest is not None:
            hyperparameters = self._with_momentum(hyperparameters)
        return hyperparameters

    def _with_momentum(self, hyperparameters: list[dict[str, float | bool]]) -> list[dict[str, float | bool]]:
        assert self._highest is not None
        return predict.with_momentum(self._job.rule, hyperparameters, self._late, self._stages, self._highest)

    def outgoing(
        self, grads: Mapping[str, torch.Tensor], opened: Weights, hyperparameters: list[dict[str, float | bool]]
    ) -> list[torch.Tensor | None]:
        """What is pushed, for each row: these gradients by name, corrected where the job says so.

        Args:
            grads: of an update, as the shards take their mean.
            opened: the weights that they were computed on.
            hyperparameters: that they are pushed with.
        """
        if self._corrector is None:
            return [grads.get(name) for name in self.rows]
        now = self._kept[self.number]
        made: list[torch.Tensor | None] = []
        for name in self.rows:
            grad, lr = grads.get(name), float(hyperparameters[self._groups[name]]["lr"])
            if grad is not None:
                part = self._parts[name]
                grad = self._corrector.corrected(name, grad if part == 1 else grad / part, now[name], opened[name], lr)
                grad = grad if part == 1 else grad.mul_(part)
            made.append(grad)
        return made

    def taken(self, wanted: int) -> tuple[int, Weights]:
        """The version that forwards take which want that one, and its weights."""
        if self._way.flushes:
            return wanted, dict(self._parameters)
        # A process that came back has none that are older than it, and the first stage may have taken one that it is to make again.
        number = min(max(wanted, min(self._kept)), self.number)
        return number, self._ahead if self._predicts else self._kept[number]

    def newest(self) -> tuple[int, Weights]:
        """The version after the last update, and its weights."""
        return self.number, dict(self._parameters) if self._way.flushes else self._kept[self.number]

    def fresh(self) -> list[torch.Tensor]:
        """Memory for the next version, a tensor for each row; rows of other stages are as they are."""
        return [
            torch.empty_like(p.detach()) if name in self._parameters else p for name, p in zip(self.rows, self._job.parameters, strict=True)
        ]

    def come(self, fresh: list[torch.Tensor], hyperparameters: list[dict[str, float | bool]]) -> None:
        """The next version has come into that memory; the model shows it."""
        landed = {name: tensor for name, tensor in zip(self.rows, fresh, strict=True) if name in self._parameters}
        if self._memory is not None:
            self._memory.take(landed)
            self.number += 1
            self._kept = {self.number: self._memory.leaves}
            self._ahead = self._memory.leaves
            return
        before = self._kept[self.number]
        for name, tensor in landed.items():
            self._parameters[name].data = tensor
        if self._corrector is not None:
            used = self.pushed_with(hyperparameters, self.number)
            for name, tensor in landed.items():
                self._corrector.moved(name, before[name], tensor, float(used[self._groups[name]]["lr"]))
        self.number += 1
        now = self._kept[self.number] = before | {name: _leaf(tensor, self._parameters[name]) for name, tensor in landed.items()}
        if self._predicts:
            self._ahead = now | {
                name: predict.from_step(
                    self._job.rule, before[name], now[name], self.number, hyperparameters[self._groups[name]], self._late
                ).requires_grad_(now[name].requires_grad)
                for name in landed
            }
        oldest = self._way.version(self.number, self.number, self.number - self._behind)
        self._kept = {number: weights for number, weights in self._kept.items() if number >= oldest}


def _leaf(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The same memory under a version counter of its own."""
    return tensor.data.requires_grad_(like.requires_grad)
