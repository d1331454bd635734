"""One stage of a pipeline in a job: micro-batches come from the stage before and go to the one behind, and gradients come back."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from psjob.api import attach as attaching
from psjob.api import stagecuts
from psjob.api.attached import AttachedJob
from psjob.api.inputs import sum_of
from psjob.api.stagefirst import StageMemory
from psjob.api.stagegrads import StageGrads
from psjob.pipeline.cuts import Cuts, needs_example, split
from psjob.pipeline.draws import Draw
from psjob.pipeline.losses import LossFn, mean_loss
from psjob.pipeline.microbatch import Micro, arguments, cut
from psjob.pipeline.order import Direction, StageWork, without_flush
from psjob.pipeline.stage import Grads, StageRun
from psjob.process.config import Place
from psjob.process.errors import Refused, exit_refused
from psjob.protocol.stage.exchange import MOST_MICROBATCHES
from psjob.wire.frame import Kind
from psjob.worker.hooks import Hook
from psjob.worker.stagelinks import StageLinks


class StagedPipeline:
    """As `psjob.api.pipelining.Pipeline`, of one stage. Raises ValueError and Refused for what cannot be cut or trained so."""

    def __init__(
        self, place: Place, model: nn.Module, loss_fn: LossFn, cuts: Cuts, microbatches: int, seed: int | None, example: Any
    ) -> None:
        config, stage = place.config, place.config.stages.of(place.index)
        if stage is None:
            raise Refused("ps.pipeline in a job without stages: give the manifest spec.stages, or take ps.attach alone")
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
        if needs_example(model, cuts) and example is None:
            raise ValueError(
                f"{type(model).__name__} is not an nn.Sequential; give example=x of one micro-batch, so that it can be cut before attach"
            )
        self._seed = config.seed if seed is None else seed
        memory = StageMemory.of(model, self._seed)
        parts = split(model, cuts, None if example is None else arguments(example))
        if len(parts) != len(config.stages.replicas):
            raise Refused(f"the job has {len(config.stages.replicas)} stages and the cuts make {len(parts)}; give one cut less than stages")
        self.cuts = known = stagecuts.cuts_of(parts, stage, memory)
        if memory is not None:
            memory.give(parts[stage])
        self._place, self._model, self._loss_fn, self._microbatches = place, model, loss_fn, microbatches
        self._stage, self._last = stage, stage == len(parts) - 1
        shared = frozenset(name for name, stages in known.stages.items() if len(stages) > 1)
        self._run = StageRun(parts[stage], dict(model.named_buffers()), shared=shared)
        self._handed = frozenset(name for name in parts[stage].parameters if known.stages[name][0] < stage)
        """Parameters whose gradients an earlier stage pushes, the first that has them."""
        self._scale = {name: float(len(config.stages.who(known.stages[name]) or ())) for name in parts[stage].parameters}
        """Shards take the mean over all workers that have a parameter; of the sum over micro-batches each worker has a part."""
        if len(parts) > 1:
            model.register_forward_pre_hook(lambda _model, _args: self._only_a_part("a forward of the model"))
            used = Hook(lambda _model: self._only_a_part("model.state_dict()"))
            model.register_state_dict_pre_hook(used)  # type: ignore[no-untyped-call]
        self._inside = False
        """Is `step` under way? A model that is exported runs then."""

    def step(self, x: Any, y: Any) -> torch.Tensor:
        """As `Pipeline.step`. Of the batch, which every worker is given, this worker's micro-batches count for the loss."""
        job = self.attached()
        if job is None:
            exit_refused("ps.pipeline: give the model to ps.attach before the first step")
            raise AssertionError("exit_refused does not come back")
        if job.replay or job.places.skipping:
            return torch.zeros(())
        clock, links = job.session.clock, job.session.stage_links
        assert links is not None
        if clock == job.piped:
            job.refuse(f"pipe.step was called twice in step {clock}; call it once for each optimizer.step(), with more microbatches")
        job.piped = clock
        micros = cut((arguments(x), y), self._microbatches)
        buffers = dict(self._model.named_buffers())
        parameters = {name: p for name, p in self._model.named_parameters() if name in self._scale}
        self._run.load(clock, parameters)
        self._run.buffers = {name: buffers[name] for name in self._run.part.buffers}
        turn = _Turn(self, job, links, clock, micros, parameters, _sum((x, y)))
        self._inside = True
        try:
            loss = turn.run()
        finally:
            self._inside = False
            self._run.drop()
        self._run.put_buffers_back(self._model, buffers)
        return loss.clone()  # what was sent of it may be sent again

    def _only_a_part(self, what: str) -> None:
        """Weights of other stages are what they were at the beginning: nobody shall take them for the job's."""
        if not self._inside and attaching.current is not None:
            attaching.current.refuse(
                f"{what} in a job of stages: this worker has the weights of stage {self._stage} alone; the job's are in its checkpoints, "
                "and in final.safetensors at its end"
            )

    def attached(self) -> AttachedJob | None:
        """The job whose steps these are."""
        attaching.settle()
        return attaching.current

    def evaluate(self, x: Any) -> Any:
        """Not in a job."""
        exit_refused("pipe.evaluate in a job: this worker has the weights of its stage alone; evaluate a checkpoint outside the job")

    def state_dict(self) -> dict[str, int]:
        """Nothing: steps are counted by the job."""
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """As `state_dict`."""


class _Turn:
    """One step of a stage."""

    def __init__(
        self,
        pipe: StagedPipeline,
        job: AttachedJob,
        links: StageLinks,
        clock: int,
        micros: list[Micro],
        parameters: Mapping[str, nn.Parameter],
        batch: int,
    ) -> None:
        self.batch = batch
        """A sum over what the script was given, which all workers must be given."""
        self.pipe, self.job, self.links, self.clock, self.micros, self.parameters = pipe, job, links, clock, micros, parameters
        self.device = next((p.device for p in parameters.values()), torch.device("cpu"))
        self.weights = {_memory(p) for p in parameters.values()}
        self.losses: dict[int, torch.Tensor] = {}
        self.grads = StageGrads(job, parameters, pipe._scale)

    def run(self) -> torch.Tensor:
        """All forwards and backwards; the mean loss of this worker's micro-batches."""
        pipe, stages = self.pipe, self.pipe._place.config.stages
        replica = pipe._place.index - stages.ranks(pipe._stage).start
        self.job.carry_out(lambda: self.links.begin(self.clock, len(self.micros)))
        for work in without_flush(pipe._stage, stages.replicas, len(self.micros), replica):
            self.job.carry_out(functools.partial(self.do, work))
        if not self.losses:
            return torch.zeros(())
        total = functools.reduce(torch.add, (self.losses[micro] for micro in sorted(self.losses)))
        share = sum(self.micros[micro].weight for micro in self.losses)
        return total if len(self.losses) == len(self.micros) else total / share

    def do(self, work: StageWork) -> None:
        """One forward or backward. Raises SessionEnd where a neighbour is waited for and the script's turn ends."""
        if work.direction is Direction.FORWARD:
            self.forward(work.micro)
        else:
            self.backward(work.micro)

    def forward(self, place: int) -> None:
        pipe, micro = self.pipe, self.micros[place]
        value, target = micro.value
        if pipe._stage:
            pipe._run.part.expect(value)
            value, batch = self.links.take(place, Kind.ACTIVATION)
            self.check(place, batch)
            value = self.here(value)
        draw = Draw(pipe._seed, self.clock, place)
        if pipe._last:
            self.losses[place] = pipe._run.forward(place, value, draw, mean_loss(pipe._loss_fn, target, micro.weight)).detach()
            return
        kept = [leaf for leaf in pytree.tree_leaves(micro.value) if isinstance(leaf, torch.Tensor)]
        output = pipe._run.forward(place, value, draw)
        # The script may write into its batch for the next step, and the stage into its buffers, while this is held.
        others = self.weights.union(map(_memory, (*kept, *pipe._run.buffers.values())))
        output = pytree.tree_map_only(torch.Tensor, lambda leaf: _apart(leaf, others), output)
        self.links.give(place, Kind.ACTIVATION, (output, self.batch))

    def check(self, place: int, batch: Any) -> None:
        """Raise Refused where the stage before was given another batch."""
        if batch != self.batch:
            other = self.pipe._place.config.stages.serving(self.pipe._stage - 1, place)
            raise Refused(
                f"worker {other} (stage {self.pipe._stage - 1}) was given another batch in step {self.clock} than worker "
                f"{self.pipe._place.index} (stage {self.pipe._stage}): in a job of stages all workers need the same one. Take ps.shard, do "
                "not slice data by ps.rank(), and seed what is drawn for a batch"
            )

    def backward(self, place: int) -> None:
        """Gradients of parameters that earlier stages have too go on to these, which add their own, as one process would."""
        pipe = self.pipe
        back: Grads | None = None
        sums: dict[str, torch.Tensor] = {}
        if not pipe._last:
            back, sums, self.losses[place] = self.here(self.links.take(place, Kind.GRADIENT))
        later = {name: sums[name] for name in pipe._run.part.parameters if name in sums}
        back, grads = pipe._run.backward(place, back, later, self.grads.add)
        sums |= grads
        if pipe._stage:
            own = set(pipe._run.part.parameters) - pipe._handed
            self.links.give(place, Kind.GRADIENT, (back, {name: g for name, g in sums.items() if name not in own}, self.losses[place]))
        for name, grad in sums.items():
            if name in pipe._scale and name not in pipe._handed:
                self.grads.add(name, grad)

    def here(self, value: Any) -> Any:
        """The structure with its tensors on this worker's device."""
        if self.device.type == "cpu":
            return value
        return pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.detach().to(self.device).requires_grad_(leaf.requires_grad), value)


def _sum(batch: Any) -> int:
    """Over the beginnings of its tensors and their shapes."""
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    shapes = zlib.crc32(repr([tuple(leaf.shape) for leaf in leaves]).encode())
    return functools.reduce(lambda before, leaf: sum_of(leaf, before), (leaf for leaf in leaves if leaf.layout is torch.strided), shapes)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _apart(leaf: torch.Tensor, others: set[int]) -> torch.Tensor:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if _memory(leaf) in others else leaf
