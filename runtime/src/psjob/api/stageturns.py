"""What a worker of a stage does with the batches that its script is given: its turns at forwards and backwards, and its updates."""

from __future__ import annotations

import functools
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from psjob.api.inputs import sum_of
from psjob.api.stagegrads import StageGrads
from psjob.api.stageversions import StageVersions
from psjob.pipeline.draws import Draw
from psjob.pipeline.microbatch import Micro, arguments, cut, mean_loss
from psjob.pipeline.schedule import Backward, Forward, StageSchedule, Update, Work
from psjob.pipeline.stage import Grads
from psjob.process.errors import Refused
from psjob.protocol.stage.exchange import MOST_MICROBATCHES, Key
from psjob.wire.frame import Kind
from psjob.worker.clip import Clip

if TYPE_CHECKING:
    from psjob.api.attached import AttachedJob
    from psjob.api.staged import StagedPipeline


class Batch:
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
        self.clip = Clip()
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

    def __init__(self, pipe: StagedPipeline, job: AttachedJob) -> None:
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
        self._open: dict[int, Batch] = {}
        self._loss = torch.zeros((), dtype=torch.float32, device="cpu")
        self._records: dict[int, bytes] = {}
        """By step: what a process begins with that comes back at it. They are handed in when the step's weights are there."""
        self._broken = False
        self._coming: tuple[Batch, list[torch.Tensor]] | None = None
        """The batch that was pushed last, and the memory into which the weights that follow come."""
        self._loaded: dict[str, torch.Tensor] | None = None
        """The weights that the next forward would take."""

    # -- the script's side -------------------------------------------------------------------------

    def step(self, x: Any, y: Any) -> torch.Tensor:
        """The script is given a batch. Returns the mean loss of the newest batch that is through."""
        pipe, job, flushes = self.pipe, self.job, self.way.flushes
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
        batch = Batch(number, micros, _sum((x, y)))
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

    def stepped(self, hyperparameters: list[dict[str, float | bool]], clip: Clip) -> None:
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

    def edge(self) -> None:
        """The script stands between two steps: it could go on from here."""
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
        """Raises SessionEnd where a neighbour or a shard is waited for and the script's turn ends."""
        match piece:
            case Forward():
                self._forward(self._open[piece.batch], piece.micro)
            case Backward():
                self._backward(self._open[piece.batch], piece.micro)
            case Update():
                if not self.way.flushes:
                    self._update(self._open[piece.batch])

    def _load(self, batch: Batch, first: int | None = None) -> None:
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

    def _forward(self, batch: Batch, place: int) -> None:
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

    def _check(self, batch: Batch, place: int, sum_: Any) -> None:
        """Raise Refused where the stage before was given another batch."""
        pipe = self.pipe
        if sum_ != batch.sum:
            other = pipe.place.config.stages.serving(pipe.stage - 1, place)
            raise Refused(
                f"worker {other} (stage {pipe.stage - 1}) was given another batch in step {batch.number} than worker "
                f"{pipe.place.index} (stage {pipe.stage}): in a job of stages all workers need the same one. Take ps.shard, do "
                "not slice data by ps.rank(), and seed what is drawn for a batch"
            )

    def _backward(self, batch: Batch, place: int) -> None:
        """Gradients of parameters that earlier stages have too go on to these, which add their own, as one process would."""
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

    def _add(self, batch: Batch, name: str, grad: torch.Tensor) -> None:
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

    def _update(self, batch: Batch) -> None:
        """Push a batch's gradient. The weights that follow come into memory of their own, meanwhile."""
        self._land()
        job, exchange = self.job, self.job.session.exchange
        job.by_hand.refuse_before_step()
        assert batch.weights is not None
        pushed_with = self.versions.pushed_with(batch.hyperparameters, batch.number)
        grads = self.versions.outgoing(batch.grads, batch.weights, pushed_with)
        fresh = self.versions.fresh()
        exchange.finite.skips(grads, [], False)
        exchange.clip = batch.clip
        exchange.push(grads, pushed_with, False, 1.0, fresh)
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
        job.by_hand.stepped()
        self.links.stand(job.session.clock)
        self._hand_in()

    def _hand_in(self) -> None:
        """The edge of the step at which the weights are, once the script has been there."""
        clock = self.job.session.clock
        if clock in self._records and self._coming is None:
            record = self._records[clock]
            self.job.carry_out(lambda: self.job.session.edge(lambda: record))
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
