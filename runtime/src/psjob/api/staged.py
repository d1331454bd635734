"""One stage of a pipeline in a job: micro-batches come from the stage before and go to the one behind, and gradients come back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from psjob.api import attach as attaching
from psjob.api import autocuts, stagecuts
from psjob.api.attached import AttachedJob
from psjob.api.stagefirst import StageMemory
from psjob.api.stageturns import StageTurns
from psjob.pipeline import predict, schedule
from psjob.pipeline.cuts import Cuts, needs_example, split
from psjob.pipeline.microbatch import LossFn, arguments
from psjob.pipeline.stage import StageRun
from psjob.process.config import Place
from psjob.process.errors import Refused, exit_refused
from psjob.protocol.stage.exchange import MOST_MICROBATCHES
from psjob.worker.clip import Clip
from psjob.worker.overlap import Hook


class StagedPipeline:
    """As `psjob.api.pipelining.Pipeline`, of one stage. Raises ValueError and Refused for what cannot be cut or trained so."""

    def __init__(
        self, place: Place, model: nn.Module, loss_fn: LossFn, cuts: Cuts, microbatches: int, seed: int | None, example: Any
    ) -> None:
        config, stage = place.config, place.config.stages.of(place.index)
        if stage is None:
            raise Refused("ps.pipeline in a job without stages: give the manifest spec.stages, or take ps.attach alone")
        if auto := autocuts.is_auto(cuts):
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
            cuts = autocuts.decided(place, model, microbatches, None if example is None else arguments(example))
        if needs_example(model, cuts) and example is None:
            raise ValueError(
                f"{type(model).__name__} is not an nn.Sequential; give example=x of one micro-batch, so that it can be cut before attach"
            )
        self.seed = config.seed if seed is None else seed
        memory = StageMemory.of(model, self.seed)
        parts = split(model, cuts, None if example is None else arguments(example))
        if len(parts) != len(config.stages.replicas):
            raise Refused(f"the job has {len(config.stages.replicas)} stages and the cuts make {len(parts)}; give one cut less than stages")
        self.way = schedule.way_of(config.schedule, config.stage_weights, config.predict)
        try:
            self.correct = predict.corrector(self.way, config.correct, config.correct_options)
        except ValueError as error:
            raise Refused(str(error)) from error
        known = stagecuts.cuts_of(parts, stage, memory)
        if memory is not None:
            memory.give(parts[stage])
        self.delay_by_stage = stagecuts.delays_of(self.way, known.stages, config.stages.replicas, microbatches)
        self.cuts = known if self.way.flushes else replace(known, late=self, ahead=max(self.delay_by_stage) + 1)
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

        Where the job does not flush, the loss is that of the newest batch whose backwards are done here: 0 before there is one.
        """
        job = self.attached()
        if job is None:
            exit_refused("ps.pipeline: give the model to ps.attach before the first step")
        if job.replay or job.places.skipping:
            return torch.zeros((), dtype=torch.float32, device="cpu")
        self.inside = True
        try:
            return self.turns(job).step(x, y)
        finally:
            self.inside = False

    def turns(self, job: AttachedJob) -> StageTurns:
        """What this worker does in a job that it has joined."""
        if self._turns is None:
            self._turns = StageTurns(self, job)
        return self._turns

    def edge(self, job: AttachedJob) -> None:
        """See `stagecuts.Late`."""
        self.turns(job).edge()

    def stepped(self, job: AttachedJob, hyperparameters: list[dict[str, float | bool]], clip: Clip) -> None:
        """See `stagecuts.Late`."""
        self.turns(job).stepped(hyperparameters, clip)

    def drain(self, job: AttachedJob) -> None:
        """See `stagecuts.Late`."""
        self.turns(job).drain()

    @property
    def delays(self) -> Mapping[int, int]:
        """Of the updates that this process has made: how many were late by so many updates."""
        return {} if self._turns is None else dict(self._turns.delays)

    def _only_a_part(self, what: str) -> None:
        """Weights of other stages are what they were at the beginning: nobody shall take them for the job's."""
        if not self.inside and attaching.current is not None:
            attaching.current.refuse(
                f"{what} in a job of stages: this worker has the weights of stage {self.stage} alone. The job's are in its checkpoints, "
                "and in final.safetensors at its end"
            )

    def attached(self) -> AttachedJob | None:
        """The job whose steps these are."""
        attaching.settle()
        return attaching.current

    def evaluate(self, x: Any) -> Any:
        """Not in a job."""
        exit_refused("pipe.evaluate in a job: this worker has the weights of its stage alone. Evaluate a checkpoint outside the job")

    def state_dict(self) -> dict[str, int]:
        """Nothing: steps are counted by the job."""
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """As `state_dict`."""
