"""All stages of a pipeline in one process, each in its own order of work, handing tensors to each other as workers would."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from psjob.pipeline.predict import Begin
from psjob.pipeline.random_draws import Draw
from psjob.pipeline.schedule import TrainingWay
from psjob.pipeline.stage import Grads, Micro, OneMemory, StagePart, StageRun, arguments, cut
from tests.support.pipeline_orders import Direction, StageWork, work_of
from tests.support.pipeline_reference import Loss, MakeOptimizer, Outcome, Rate, Tensors, Update, expected, owners, version_of


def train(
    model: nn.Module,
    loss_fn: Loss,
    batches: Sequence[tuple[Any, Any]],
    *,
    parts: Sequence[StagePart],
    way: TrainingWay,
    microbatches: int,
    optimizer: MakeOptimizer,
    rate: Rate | None = None,
    seed: int = 0,
    correct: Begin | None = None,
) -> Outcome:
    """Train as `pipeline_reference.train` does and with the same arguments, by running the stages' schedules against each other.

    Delays are measured: a stage takes the version that is there when its forward begins, as its way says.

    Raises:
        ValueError: what the way cannot do; a minibatch of fewer samples than micro-batches.
        RuntimeError: the schedules wait for each other.
    """
    return _Running(model, loss_fn, batches, parts, way, microbatches, optimizer, rate, seed, correct).run()


class _Running:
    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        batches: Sequence[tuple[Any, Any]],
        parts: Sequence[StagePart],
        way: TrainingWay,
        microbatches: int,
        optimizer: MakeOptimizer,
        rate: Rate | None,
        seed: int,
        correct: Begin | None,
    ) -> None:
        self.loss_fn, self.parts, self.way, self.microbatches, self.seed = loss_fn, parts, way, microbatches, seed
        self.micros: list[Micro] = []
        for number, (x, y) in enumerate(batches):
            self.micros += (pieces := cut((arguments(x), y), microbatches))
            if len(pieces) < microbatches:
                raise ValueError(f"minibatch {number} has {len(pieces)} samples for {microbatches} micro-batches; leave it out")
        delays = [way.delay(part.index, [1] * len(parts), microbatches) for part in parts]
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        self.stages = [StageRun(part, buffers, recompute=way.recompute, verify=True, in_place=way.in_place) for part in parts]
        self.work = [work_of(way, part.index, len(parts), microbatches, len(batches)) for part in parts]
        self.weights = _Weights(model, owners(parts, delays), delays, way, optimizer, rate, correct)
        first = version_of(self.weights.masters)
        self.memories = [OneMemory({name: first[name] for name in part.parameters}) for part in parts] if way.in_place else None
        """Of each stage, where its weights change in place."""
        self.finished = [0] * len(parts)
        """Minibatches of which all backwards are done, by stage."""
        self.taken: dict[tuple[int, int], tuple[int, Tensors]] = {}
        """By stage and minibatch: the version, and its weights."""
        self.values: dict[tuple[int, int], Any] = {(0, n): micro.value[0] for n, micro in enumerate(self.micros)}
        self.grads: dict[tuple[int, int], Grads | None] = {}
        self.losses = [torch.zeros((), dtype=torch.float32, device="cpu") for _ in batches]
        self.outcome = Outcome([], {}, buffers, [Counter() for _ in parts])

    def run(self) -> Outcome:
        places = [0] * len(self.parts)
        while any(place < len(work) for place, work in zip(places, self.work, strict=True)):
            before = list(places)
            for stage, work in enumerate(self.work):
                while places[stage] < len(work) and self.can(stage, work[places[stage]]):
                    self.do(stage, work[places[stage]])
                    places[stage] += 1
            if places == before:
                raise RuntimeError(f"stages wait for each other after {places} pieces of work")
        for run in self.stages:
            self.outcome.buffers.update(run.buffers)
        self.outcome.losses.extend(float(loss) for loss in self.losses)
        self.outcome.weights.update(self.weights.now())
        return self.outcome

    def can(self, stage: int, work: StageWork) -> bool:
        """Has what it needs come?"""
        return (stage, work.micro) in (self.values if work.direction is Direction.FORWARD else self.grads)

    def do(self, stage: int, work: StageWork) -> None:
        """One forward or backward, and the update after the last backward of a minibatch."""
        minibatch = work.micro // self.microbatches
        if work.direction is Direction.FORWARD:
            self.forward(stage, work.micro, minibatch)
            return
        run = self.stages[stage]
        if self.memories is not None:
            self.renew(stage)
        if self.way.recompute:
            run.load(self.finished[stage], self.weights.version(self.finished[stage]))
        back, grads = run.backward(work.micro, self.grads.pop((stage, work.micro)))
        if stage:
            self.grads[stage - 1, work.micro] = back
        self.weights.add(stage, work.micro, minibatch, grads)
        if (work.micro + 1) % self.microbatches == 0:
            version, opened = self.taken.pop((stage, minibatch))
            self.outcome.delays[stage][self.finished[stage] - version] += 1
            self.finished[stage] += 1
            self.weights.finish(stage, minibatch, opened)

    def renew(self, stage: int) -> Tensors:
        """The one memory of a stage, with its newest weights in it."""
        assert self.memories is not None
        memory, newest = self.memories[stage], self.weights.version(self.finished[stage])
        memory.take({name: newest[name] for name in memory.leaves})
        return memory.leaves

    def forward(self, stage: int, micro: int, minibatch: int) -> None:
        """One forward, on the version that its minibatch began with."""
        if (stage, minibatch) not in self.taken:
            first = self.taken[0, minibatch][0] if stage else self.finished[0]
            number = self.way.version(minibatch, self.finished[stage], first)
            self.taken[stage, minibatch] = (number, self.weights.version(number, self.way.predicts))
        number, tensors = self.taken[stage, minibatch] if self.memories is None else (self.finished[stage], self.renew(stage))
        self.stages[stage].load(number, tensors)
        draw = Draw(self.seed, minibatch, micro % self.microbatches)
        value = self.values.pop((stage, micro))
        if stage + 1 < len(self.parts):
            self.values[stage + 1, micro] = self.stages[stage].forward(micro, value, draw)
            return
        target, weight = self.micros[micro].value[1], self.micros[micro].weight
        loss = self.stages[stage].forward(micro, value, draw, lambda output: self.loss_fn(output, target) * weight)
        self.losses[minibatch] = self.losses[minibatch] + loss.detach()
        self.grads[stage, micro] = None


class _Weights:
    """All versions of all weights, in place of the shards. A weight of several stages is updated when all of them are done."""

    def __init__(
        self,
        model: nn.Module,
        owner: dict[str, list[int]],
        delays: Sequence[int],
        way: TrainingWay,
        optimizer: MakeOptimizer,
        rate: Rate | None,
        correct: Begin | None,
    ) -> None:
        self.correctors = [correct()] if correct else []
        self.masters = {name: nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}
        self.groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, owning in owner.items():
            if self.masters[name].requires_grad:
                self.groups[tuple(owning)].append(name)
        self.delays = {stages: delays[stages[0]] for stages in self.groups}
        self.optimizers = {
            stages: optimizer([self.masters[name] for name in names], self.delays[stages]) for stages, names in self.groups.items()
        }
        self.rate, self.predicts = rate, way.predicts
        self.oldest = max(delays) + len(delays)
        """Updates after which no stage takes a version any more: its own delay, and what one stage is ahead of another."""
        self.versions: dict[int, Tensors] = defaultdict(dict)
        self.ahead: dict[int, Tensors] = defaultdict(dict)
        self.grads: dict[tuple[str, int], dict[int, list[tuple[int, torch.Tensor]]]] = defaultdict(lambda: defaultdict(list))
        self.done: Counter[tuple[tuple[int, ...], int]] = Counter()
        self.constant = {name: p.detach() for name, p in self.masters.items() if not p.requires_grad}
        for stages in self.groups:
            self._keep(stages, 0)

    def version(self, number: int, ahead: bool = False) -> Tensors:
        """The weights after so many updates, those that are there; or those that were expected then."""
        return self.constant | (self.ahead if ahead and self.predicts else self.versions)[number]

    def now(self) -> Tensors:
        return {name: p.detach().clone() for name, p in self.masters.items()}

    def add(self, stage: int, micro: int, minibatch: int, grads: Tensors) -> None:
        """Gradients of one micro-batch, of one stage."""
        for name, grad in grads.items():
            self.grads[name, minibatch][micro].append((stage, grad))

    def finish(self, stage: int, minibatch: int, opened: Tensors) -> None:
        """A stage has added all of a minibatch, which it computed on these weights: update what waits for no other."""
        for stages, names in self.groups.items():
            if stage not in stages:
                continue
            self.done[stages, minibatch] += 1
            if self.done[stages, minibatch] == len(stages):
                sums = {name: _in_order(self.grads.pop((name, minibatch), {})) for name in names}
                masters = {name: self.masters[name] for name in names}
                rate = self.rate and self.rate(self.delays[stages], minibatch)
                Update(self.optimizers[stages], masters, [sums], rate, self.correctors, opened).make()
                self._keep(stages, minibatch + 1)

    def _keep(self, stages: tuple[int, ...], number: int) -> None:
        masters = {name: self.masters[name] for name in self.groups[stages]}
        for versions in (self.versions, self.ahead):
            versions.pop(number - self.oldest - 1, None)
        now = version_of(masters)
        self.versions[number] |= now
        if self.predicts:
            self.ahead[number] |= expected(now, masters, [self.optimizers[stages]], [self.delays[stages]])


def _in_order(by_micro: dict[int, list[tuple[int, torch.Tensor]]]) -> torch.Tensor | None:
    """The sum as one process makes it: micro-batches in order, in each the last stage first."""
    total = None
    for micro in sorted(by_micro):
        grads = [grad for _, grad in sorted(by_micro[micro], key=lambda one: -one[0])]
        one = grads[0]
        for grad in grads[1:]:
            one = one + grad
        total = one if total is None else total + one
    return total
