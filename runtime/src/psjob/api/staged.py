"""One stage of a pipeline in a job: micro-batches come from the stage before and go to the one behind, and gradients come back.

`StageTurns` is what a worker does with the batches that its script is given: its turns at forwards and backwards, and its updates. With
flush the weights are the parameters themselves, without it each version has memory of its own. Gradients are added up over micro-batches
where the shards read them: no second copy is made for the push.
"""

from __future__ import annotations

import functools
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from psjob.api import attach as attaching
from psjob.api import auto_cuts, stage_cuts
from psjob.api.consistency import sum_of
from psjob.api.stage_cuts import StageMemory
from psjob.api.training_job import TrainingJob
from psjob.layout import devices
from psjob.pipeline import predict, schedule
from psjob.pipeline.cuts import Cuts, needs_example, split_model
from psjob.pipeline.predict import check_correction
from psjob.pipeline.random_draws import Draw
from psjob.pipeline.schedule import Backward, Forward, StageSchedule, Update, Work
from psjob.pipeline.stage import Grads, LossFn, Micro, OneMemory, StageRun, accumulate, arguments, cut, mean_loss
from psjob.process.config import ProcessContext
from psjob.process.errors import Refused, exit_refused
from psjob.protocol.pipeline import MOST_MICROBATCHES, Key
from psjob.wire.frame import Kind
from psjob.worker.exchange import GradientClip
from psjob.worker.overlap import Hook


class StageGrads:
    """Of one step. `parameters` by name; `scale` by name, what their gradients are multiplied by."""

    def __init__(self, job: TrainingJob, parameters: Mapping[str, nn.Parameter], scale: Mapping[str, float]) -> None:
        self._parameters, self._scale = parameters, scale
        self._sharing = job.session.exchange.sharing if job.half is None else None  # a rule's half makes other gradients of them
        self._rows = {spec.name: row for row, spec in enumerate(job.session.layout.table)}

    def add(self, name: str, grad: torch.Tensor) -> None:
        """A micro-batch's gradient of a parameter that this worker pushes."""
        p, scale = self._parameters[name], self._scale[name]
        grad = grad if scale == 1.0 else grad * scale
        row = self._rows.get(name)
        if p.grad is None and self._sharing is not None and row is not None and grad.layout is torch.strided:
            p.grad = self._sharing.lay(row, grad)  # None: it does not lie there
            if p.grad is not None:
                return
        accumulate(p, grad)


Weights = dict[str, torch.Tensor]


class StageVersions:
    """Of one process. What a graph still needs of a version lives on with the graph; here are those that a forward may take.

    Attributes:
        rows: names of the rows of the job's table, in order.
        number: of the newest version.
    """

    def __init__(self, pipe: StagedPipeline, job: TrainingJob) -> None:
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


class OpenBatch:
    """One that is open: it has been begun, and its update was not made."""

    weights: dict[str, torch.Tensor] | None

    def __init__(self, number: int, micros: list[Micro], sum_: int) -> None:
        self.number, self.micros = number, micros
        self.sum = sum_
        """A sum over what the script was given, which all workers must be given."""
        self.losses: dict[int, torch.Tensor] = {}
        self.grads: dict[str, torch.Tensor] = {}
        """Of its backwards so far, by name; with flush they are the parameters' own."""
        self.hyperparameters: list[dict[str, float | bool]] = []
        self.clip = GradientClip()
        self.version, self.weights = number, None
        """That its forwards take, once the first one has begun."""
        self.first: int | None = None
        """The version that the first stage took for it, where this one goes by it."""
        self.memory: set[int] = set()
        """In which those weights lie."""
        self.backwards = 0
        """That are made."""

    @property
    def loss(self) -> torch.Tensor:
        """The mean of this worker's micro-batches."""
        if not self.losses:
            return torch.zeros((), dtype=torch.float32, device="cpu")
        total = functools.reduce(torch.add, (self.losses[micro] for micro in sorted(self.losses)))
        share = sum(self.micros[micro].weight for micro in self.losses)
        return (total if len(self.losses) == len(self.micros) else total / share).clone()  # what was sent of it may be sent again


class StageTurns:
    """Of one process that has joined its job.

    With flush a batch is through when `step` returns, its gradient is that of the parameters, and the script's step pushes it. Without,
    batches stay open, and each is pushed when its last backward is made.

    Attributes:
        delays: how many updates were late by so many updates.
    """

    def __init__(self, pipe: StagedPipeline, job: TrainingJob) -> None:
        stages, stage, clock = pipe.place.config.stages, pipe.stage, job.session.clock
        links = job.session.stage_links
        assert links is not None
        self.pipe, self.job, self.links, self.way = pipe, job, links, pipe.way
        self.parameters = {name: p for name, p in pipe.model.named_parameters() if name in pipe.scale}
        self.grads = StageGrads(job, self.parameters, pipe.scale)
        self.device = next((p.device for p in self.parameters.values()), torch.device("cpu"))
        self._replica, self._replicas = pipe.place.index - stages.ranks(stage).start, stages.replicas[stage]
        self.schedule = StageSchedule(self.way, stage, stages.replicas, self._replica, clock)
        self.versions = StageVersions(pipe, job)
        self.delays: Counter[int] = Counter()
        self._open: dict[int, OpenBatch] = {}
        self._loss = torch.zeros((), dtype=torch.float32, device="cpu")
        self._records: dict[int, bytes] = {}
        """By step: what a process begins with that comes back at it. They are handed in when the step's weights are there."""
        self._broken = False
        self._coming: tuple[OpenBatch, list[torch.Tensor]] | None = None
        """The batch that was pushed last, and the memory into which the weights that follow come."""
        self._loaded: dict[str, torch.Tensor] | None = None
        """The weights that the next forward would take."""

    # -- the script's side -------------------------------------------------------------------------

    def step(self, x: Any, y: Any) -> torch.Tensor:
        """The script is given a batch. Returns the mean loss of the newest batch that is through."""
        pipe, job, flushes = self.pipe, self.job, self.way.flushes
        if devices.capturing():
            job.refuse(devices.in_capture("pipe.step", "leave it to pipe.step, which runs a stage's kernels as they are"))
        number = job.session.clock if flushes else self.schedule.stepped
        if number == job.piped:
            job.refuse(f"pipe.step was called twice in step {number}. Call it once for each optimizer.step(), with more microbatches")
        if self._broken:
            job.refuse("pipe.step was called after one that has failed. Without flush what was open then is lost. Let the script end there")
        if flushes:
            self.schedule.stepped = self.schedule.updates = number
        else:
            x, y = pytree.tree_map_only(torch.Tensor, torch.clone, (x, y))  # the script may write into its batch while this is open
        micros = cut((arguments(x), y), pipe.microbatches)
        if not flushes and len(micros) < pipe.microbatches:
            job.refuse(
                f"the batch of step {number} has {len(micros)} samples, and without flush it needs one for each of {pipe.microbatches} "
                "micro-batches: stages would wait for each other. Give the DataLoader drop_last=True, or take schedule: flush"
            )
        batch = OpenBatch(number, micros, _sum((x, y)))
        buffers = dict(pipe.model.named_buffers())
        pipe.run.buffers = {name: buffers[name] for name in pipe.run.part.buffers}
        self._open[number] = batch
        job.piped = number
        if self._coming is None:
            job.carry_out(lambda: self.links.stand(job.session.clock))
        job.carry_out(lambda: self.links.begin(number, len(batch.micros)))
        self._broken = not flushes
        try:
            self._all(self.schedule.batch(len(batch.micros)))
        finally:
            if flushes:
                self._open.clear()
                pipe.run.drop()
        self._broken = False
        pipe.run.put_buffers_back(pipe.model, buffers)
        if flushes:
            self._loss = batch.loss
        return self._loss

    def stepped(self, hyperparameters: list[dict[str, float | bool]], clip: GradientClip) -> None:
        """The script has stepped its optimizer, without flush: each batch is updated with what held at its own step."""
        batch = self._open.get(self.schedule.stepped)
        if batch is None:
            self.job.refuse(
                "a step of a job of stages without pipe.step: take loss = pipe.step(x, y) in place of forward and backward, once for each"
            )
            return
        self.job.carry_out(lambda: self.versions.check(hyperparameters))
        batch.hyperparameters, batch.clip = hyperparameters, clip
        self._all(self.schedule.step())

    def step_boundary(self) -> None:
        """The script stands between two steps: it could continue from here."""
        step = self.schedule.stepped
        if step not in self._open:
            self._records[step] = self.job.records.make(self.job.cursor, step=step)
            self._hand_in()

    def drain(self) -> None:
        """The script has ended: nothing stays open."""
        self._all(self.schedule.drain())
        self.job.carry_out(self._land)
        if self._open:
            number = min(self._open)
            self.job.refuse(f"the script has ended after pipe.step of step {number} without optimizer.step(): no stage has its gradient")

    # -- the work ----------------------------------------------------------------------------------

    def _all(self, work: Iterator[Work]) -> None:
        for piece in work:
            self.job.carry_out(functools.partial(self._do, piece))

    def _do(self, piece: Work) -> None:
        """Raises SessionEnd if a neighbour or a shard is waited for and the script's turn ends."""
        match piece:
            case Forward():
                self._forward(self._open[piece.batch], piece.micro)
            case Backward():
                self._backward(self._open[piece.batch], piece.micro)
            case Update():
                if not self.way.flushes:
                    self._update(self._open[piece.batch])

    def _load(self, batch: OpenBatch, first: int | None = None) -> None:
        """The weights for a batch's forwards. `first`: the version that the first stage took, where it said so."""
        if self.way.in_place:
            self._land()
        if batch.weights is None or first != batch.first:
            made = self.schedule.updates
            wanted = self.way.version(batch.number, made, made if first is None else first)
            if wanted > self.versions.number:
                self._land()
            batch.version, batch.weights = self.versions.taken(wanted)
            batch.first, batch.memory = first, set(map(_memory, batch.weights.values()))
        if self._loaded is not batch.weights:
            self._loaded = batch.weights
            self.pipe.run.load(batch.version, batch.weights)

    def _forward(self, batch: OpenBatch, place: int) -> None:
        pipe, micro, vertical = self.pipe, batch.micros[place], self.way.vertical_sync
        first: int | None = None
        if not (vertical and pipe.stage):
            self._load(batch)
        value, target = micro.value
        if pipe.stage:
            pipe.run.part.expect(value)
            value, sum_, first = self._activation(Key(batch.number, place, Kind.ACTIVATION))
            self._check(batch, place, sum_)
            value = self._here(value)
        if vertical and pipe.stage:
            self._load(batch, first)
        draw = Draw(pipe.seed, batch.number, place)
        name = batch.number * MOST_MICROBATCHES + place
        if pipe.last:
            batch.losses[place] = pipe.run.forward(name, value, draw, mean_loss(pipe.loss_fn, target, micro.weight)).detach()
            return
        kept = [leaf for leaf in pytree.tree_leaves(micro.value) if isinstance(leaf, torch.Tensor)]
        output = pipe.run.forward(name, value, draw)
        # The script may write into its batch for the next step, and the stage into its buffers, while this is held.
        others = batch.memory.union(map(_memory, (*kept, *pipe.run.buffers.values())))
        output = pytree.tree_map_only(torch.Tensor, lambda leaf: _apart(leaf, others), output)
        told = [batch.version if first is None else first] if vertical else []
        self.links.give(Key(batch.number, place, Kind.ACTIVATION), (output, batch.sum, *told))

    def _take(self, key: Key) -> Any:
        """Who would wait for a neighbour takes its own answers first: others may wait for what follows from them."""
        if not self.links.has(key):
            self._land()
        return self.links.take(key)

    def _activation(self, key: Key) -> tuple[Any, Any, int | None]:
        """What a stage hands on, the sum of its batch, and with vertical sync the version that the first stage took. Raises Refused."""
        match self._take(key):
            case (value, sum_) if not self.way.vertical_sync:
                return value, sum_, None
            case (value, sum_, int(first)) if self.way.vertical_sync and first >= 0:
                return value, sum_, first
        raise self._strange(key, -1)

    def _gradient(self, key: Key) -> tuple[Any, dict[str, torch.Tensor], torch.Tensor]:
        """Gradients of what was handed on, those of parameters by name, and the loss. Raises Refused."""
        match self._take(key):
            case (back, dict() as sums, torch.Tensor() as loss) if all(isinstance(one, torch.Tensor) for one in sums.values()):
                return back, sums, loss
        raise self._strange(key, 1)

    def _strange(self, key: Key, side: int) -> Refused:
        pipe = self.pipe
        other = pipe.stage + side
        rank = pipe.place.config.stages.serving(other, key.micro)
        return Refused(
            f"what worker {rank} (stage {other}) gave for micro-batch {key.micro} of step {key.step} is no {key.kind.name.lower()} of a "
            "stage. Let all workers run the same psjob and the same script"
        )

    def _check(self, batch: OpenBatch, place: int, sum_: Any) -> None:
        """Raise Refused if the stage before was given another batch."""
        pipe = self.pipe
        if sum_ != batch.sum:
            other = pipe.place.config.stages.serving(pipe.stage - 1, place)
            raise Refused(
                f"worker {other} (stage {pipe.stage - 1}) was given another batch in step {batch.number} than worker "
                f"{pipe.place.index} (stage {pipe.stage}): in a job of stages all workers need the same one. Take ps.shard, do "
                "not slice data by ps.rank(), and seed what is drawn for a batch"
            )

    def _backward(self, batch: OpenBatch, place: int) -> None:
        """Gradients of parameters that earlier stages have too continue to these, which add their own, as one process would."""
        pipe = self.pipe
        back: Grads | None = None
        sums: dict[str, torch.Tensor] = {}
        if not pipe.last:
            back, sums, batch.losses[place] = self._here(self._gradient(Key(batch.number, place, Kind.GRADIENT)))
        if self.way.in_place:
            self._land()
        if self.way.recompute:
            self._land()
            self._loaded = None
            self.pipe.run.load(*self.versions.newest())
        names = pipe.run.part.parameters
        later = {name: sums[name] for name in names if name in sums}
        back, grads = pipe.run.backward(batch.number * MOST_MICROBATCHES + place, back, later, functools.partial(self._add, batch))
        sums |= grads
        if pipe.stage:
            own = set(names) - pipe.handed
            up = {name: grad for name, grad in sums.items() if name not in own}
            self.links.give(Key(batch.number, place, Kind.GRADIENT), (back, up, batch.losses[place]))
        for name, grad in sums.items():
            if name in pipe.scale and name not in pipe.handed:
                self._add(batch, name, grad)
        batch.backwards += 1
        if batch.backwards == len(range(self._replica, len(batch.micros), self._replicas)):
            self._loss = batch.loss

    def _add(self, batch: OpenBatch, name: str, grad: torch.Tensor) -> None:
        """A micro-batch's gradient of a parameter that this worker pushes."""
        if self.way.flushes:
            self.grads.add(name, grad)
            return
        grad = grad if self.pipe.scale[name] == 1.0 else grad * self.pipe.scale[name]
        batch.grads[name] = batch.grads[name].add_(grad) if name in batch.grads else grad.clone()

    def _here(self, value: Any) -> Any:
        """The structure with its tensors on this worker's device."""
        if self.device.type == "cpu":
            return value
        return pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.detach().to(self.device).requires_grad_(leaf.requires_grad), value)

    # -- updates without flush -----------------------------------------------------------------------

    def _update(self, batch: OpenBatch) -> None:
        """Push a batch's gradient. The weights that follow come into memory of their own, meanwhile."""
        self._land()
        job, exchange = self.job, self.job.session.exchange
        job.weight_guard.refuse_before_step()
        assert batch.weights is not None
        pushed_with = self.versions.pushed_with(batch.hyperparameters, batch.number)
        grads = self.versions.outgoing(batch.grads, batch.weights, pushed_with)
        fresh = self.versions.fresh()
        exchange.finite.skips(grads, [], False)
        exchange.clip = batch.clip
        job.session.push(grads, pushed_with, False, 1.0, fresh)
        self._coming = batch, fresh
        del self._open[batch.number]

    def _land(self) -> None:
        """Take the weights that follow the last push: its step is over then."""
        if self._coming is None:
            return
        job, (batch, fresh) = self.job, self._coming
        job.session.exchange.finish()
        self._coming = None
        self.versions.come(fresh, batch.hyperparameters)
        late = batch.number - batch.version
        self.delays[late] += 1
        self.links.gauge.updated(late)
        job.weight_guard.stepped()
        self.links.stand(job.session.clock)
        self._hand_in()

    def _hand_in(self) -> None:
        """The step boundary of the step at which the weights are, once the script has been there."""
        clock = self.job.session.clock
        if clock in self._records and self._coming is None:
            record = self._records[clock]
            self.job.carry_out(lambda: self.job.session.step_boundary(lambda: record))
            self._records = {step: kept for step, kept in self._records.items() if step > clock}


def _sum(batch: Any) -> int:
    """Over the beginnings of its tensors and their shapes."""
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    shapes = zlib.crc32(repr([tuple(leaf.shape) for leaf in leaves]).encode())
    return functools.reduce(lambda before, leaf: sum_of(leaf, before), (leaf for leaf in leaves if leaf.layout is torch.strided), shapes)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _apart(leaf: torch.Tensor, others: set[int]) -> torch.Tensor:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if _memory(leaf) in others else leaf


class StagedPipeline:
    """As `psjob.api.pipelining.Pipeline`, of one stage. Raises ValueError and Refused for what cannot be cut or trained so."""

    def __init__(
        self, place: ProcessContext, model: nn.Module, loss_fn: LossFn, cuts: Cuts, microbatches: int, seed: int | None, example: Any
    ) -> None:
        config, stage = place.config, place.config.stages.of(place.index)
        if stage is None:
            raise Refused("ps.pipeline in a job without stages: give the manifest spec.stages, or call only ps.attach")
        if auto := auto_cuts.is_auto(cuts):
            cuts = ()
        if config.cuts and cuts and [str(cut) for cut in cuts] != list(config.cuts):
            raise Refused(
                f"the manifest cuts at {', '.join(config.cuts)}, ps.pipeline at {', '.join(map(str, cuts))}; leave one of them out"
            )
        if config.cuts and isinstance(cuts, Mapping) and cuts:
            raise Refused("the manifest has cuts, and ps.pipeline was given SplitPoints; leave one of them out")
        if config.microbatches is not None and microbatches not in (1, config.microbatches):
            raise Refused(
                f"training.pipeline.microbatches is {config.microbatches}, and ps.pipeline was given {microbatches}; leave one of them out"
            )
        cuts, microbatches = cuts or config.cuts, config.microbatches or microbatches
        if not 1 <= microbatches <= MOST_MICROBATCHES:
            raise ValueError(f"microbatches is {microbatches}, must be 1 to {MOST_MICROBATCHES} in a job")
        if auto and not cuts and len(config.stages.replicas) > 1:
            cuts = auto_cuts.decided_cuts(place, model, microbatches, None if example is None else arguments(example))
        if needs_example(model, cuts) and example is None:
            raise ValueError(
                f"{type(model).__name__} is not an nn.Sequential; give example=x of one micro-batch, so that it can be cut before attach"
            )
        self.seed = config.seed if seed is None else seed
        memory = StageMemory.of(model, self.seed)
        parts = split_model(model, cuts, None if example is None else arguments(example))
        if len(parts) != len(config.stages.replicas):
            raise Refused(f"the job has {len(config.stages.replicas)} stages and the cuts make {len(parts)}; give one cut less than stages")
        self.way = schedule.way_of(config.schedule, config.stage_weights, config.predict)
        try:
            self.correct = predict.corrector(self.way, config.correct, config.correct_options)
        except ValueError as error:
            raise Refused(str(error)) from error
        known = stage_cuts.stage_cuts_of(parts, stage, memory)
        if memory is not None:
            memory.give(parts[stage])
        self.delay_by_stage = stage_cuts.delays_of(self.way, known.stages, config.stages.replicas, microbatches)
        self.cuts = known if self.way.flushes else replace(known, late=self.turns, ahead=max(self.delay_by_stage) + 1)
        self.place, self.model, self.loss_fn, self.microbatches = place, model, loss_fn, microbatches
        self.stage, self.last = stage, stage == len(parts) - 1
        shared = frozenset(name for name, stages in known.stages.items() if len(stages) > 1)
        self.run = StageRun(
            parts[stage], dict(model.named_buffers()), shared=shared, recompute=self.way.recompute, in_place=self.way.in_place
        )
        self.handed = frozenset(name for name in parts[stage].parameters if known.stages[name][0] < stage)
        """Parameters whose gradients an earlier stage pushes, the first that has them."""
        self.scale = {name: float(len(config.stages.who(known.stages[name]) or ())) for name in parts[stage].parameters}
        """Shards take the mean over all workers that have a parameter; of the sum over micro-batches each worker has a part."""
        if len(parts) > 1:
            model.register_forward_pre_hook(lambda _model, _args: self._only_a_part("a forward of the model"))
            used = Hook(lambda *_given: self._only_a_part("model.state_dict()"))
            model.register_state_dict_pre_hook(used)  # type: ignore[no-untyped-call]
        self.inside = False
        """Is `step` under way? A model that is exported runs then."""
        self._turns: StageTurns | None = None

    def step(self, x: Any, y: Any) -> torch.Tensor:
        """As `Pipeline.step`. Of the batch, which every worker is given, this worker's micro-batches count for the loss.

        If the job does not flush, the loss is that of the newest batch whose backwards are done here: 0 before there is one.
        """
        job = self.attached()
        if job is None:
            exit_refused("ps.pipeline: give the model to ps.attach before the first step")
        if job.replay or job.places.skipping:
            return torch.zeros((), dtype=torch.float32, device="cpu")
        self.inside = True
        try:
            return self.turns().step(x, y)
        finally:
            self.inside = False

    def turns(self) -> StageTurns:
        """What this worker does in a job that it has joined."""
        if self._turns is None:
            job = self.attached()
            assert job is not None
            self._turns = StageTurns(self, job)
        return self._turns

    @property
    def delays(self) -> Mapping[int, int]:
        """Of the updates that this process has made: how many were late by so many updates."""
        return {} if self._turns is None else dict(self._turns.delays)

    def _only_a_part(self, what: str) -> None:
        """Weights of other stages are what they were at the beginning: nobody shall take them for the job's."""
        if not self.inside and attaching.current is not None:
            attaching.current.refuse(
                f"{what} in a job of stages: this worker has only the weights of stage {self.stage}. The job's are in its checkpoints, "
                "and in final.safetensors at its end"
            )

    def attached(self) -> TrainingJob | None:
        """The job whose steps these are."""
        attaching.join_job()
        return attaching.current

    def evaluate(self, x: Any) -> Any:
        """Not in a job."""
        exit_refused("pipe.evaluate in a job: this worker has only the weights of its stage. Evaluate a checkpoint outside the job")

    def state_dict(self) -> dict[str, int]:
        """Nothing: steps are counted by the job."""
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """As `state_dict`."""
