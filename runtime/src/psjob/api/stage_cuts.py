"""Which parameters and buffers belong to which stage, of the model that `ps.pipeline` has cut: `attach` and its records go by it.

Lazy models in a job of stages: each worker has memory for its stage, and rank 0 makes the first values of all blocks, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from psjob.api.compatibility import PIPEDREAM, PIPEDREAM_NORM, PIPEDREAM_TAKE
from psjob.layout import memory
from psjob.layout.blocks import Block, TensorSpec
from psjob.layout.packing import Pack
from psjob.pipeline.lazy import InitialValues, give_memory
from psjob.pipeline.schedule import TrainingWay, check_shared
from psjob.pipeline.stage import StagePart
from psjob.process.config import Config
from psjob.process.errors import Refused
from psjob.worker.exchange import GradientClip


class Late(Protocol):
    """A pipeline whose stages do not wait for each other's updates: it pushes by itself, after the step of the script."""

    def step_boundary(self) -> None:
        """The script stands between two steps."""
        ...

    def stepped(self, hyperparameters: list[dict[str, float | bool]], clip: GradientClip) -> None:
        """The script has stepped its optimizer, with these hyperparameters by parameter group, and clips this step so."""
        ...

    def drain(self) -> None:
        """The script has ended: push what is open."""
        ...


@dataclass(frozen=True)
class StageCuts:
    """Of one model, as one worker sees it. `buffers` are those of its stage; None: no stages, all of them."""

    stages: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By name of a parameter, the stages that use it."""
    buffers: Collection[str] | None = None
    piped: bool = False
    """Gradients come only from `pipe.step`."""
    memory: StageMemory | None = None
    """Of a lazy model."""
    late: Callable[[], Late] | None = None
    """Gives who makes the updates, where a job does not flush."""
    ahead: int = 0
    """Steps that a worker of any stage may begin beyond the first whose update it has not made."""


WHOLE = StageCuts()
_known: list[tuple[nn.Module, StageCuts]] = []


def stage_cuts_of(parts: Sequence[StagePart], stage: int, memory: StageMemory | None = None) -> StageCuts:
    """What the parts say to a worker of that stage. Raises Refused for a buffer that two of them have: each would change its own."""
    owners: dict[str, int] = {}
    for part in parts:
        for name in part.buffers:
            if owners.setdefault(name, part.index) != part.index:
                raise Refused(
                    f"buffer {name} is in stages {owners[name]} and {part.index}, whose workers would each change their own; "
                    "cut the model so that one stage has it, or take two modules"
                )
    stages: dict[str, tuple[int, ...]] = {}
    for part in parts:
        for name in part.parameters:
            stages[name] = (*stages.get(name, ()), part.index)
    return StageCuts(stages, frozenset(parts[stage].buffers), piped=True, memory=memory)


def remember(model: nn.Module, cuts: StageCuts) -> None:
    """`attach` will be given this model. Raises Refused if another one was cut."""
    if _known:
        raise Refused("ps.pipeline was called twice; a job of stages trains one model")
    _known.append((model, cuts))


def known_cuts(model: nn.Module, job: Config) -> StageCuts:
    """How the model that is attached was cut. Raises Refused if a job of stages trains it without."""
    if not job.stages:
        return WHOLE
    found = next((cuts for cut, cuts in _known if cut is model), None)
    if found is None:
        count = len(job.stages.replicas)
        raise Refused(f"this job has {count} stages: cut the model with ps.pipeline(model, loss_fn, …) before it is given to attach")
    return found


def clip_problem(job: Config, clip: GradientClip) -> str | None:
    """Why a job of stages cannot clip a step so, and what to take. A stage that clips by norm without the others would wait forever."""
    if not job.stages or clip.norm == job.max_grad_norm:
        return None
    if job.schedule == "pipedream":
        return f"clip_grad_norm_ in a job of stages does not go with {PIPEDREAM}: {PIPEDREAM_NORM}; {PIPEDREAM_TAKE}"
    return (
        f"clip_grad_norm_ with max_norm {clip.norm:g} in a job of stages, whose workers must all clip alike; "
        f"set spec.training.sync.maxGradNorm: {clip.norm:g}, which clips every step"
    )


def check_stage_table(job: Config, table: Sequence[TensorSpec]) -> None:
    """Raise Refused for a stage that has nothing to push: nothing would tell how far its workers are."""
    for stage in range(len(job.stages.replicas)):
        if not any(stage in row.stages or not row.stages for row in table):
            raise Refused(f"stage {stage} has no parameter that the optimizer trains; cut the model so that each stage has one")


def delays_of(way: TrainingWay, owners: Mapping[str, tuple[int, ...]], replicas: Sequence[int], microbatches: int) -> list[int]:
    """The delay of each stage. Raises ValueError for a way that cannot train these stages, or their shared weights."""
    delays = [way.delay(stage, replicas, microbatches) for stage in range(len(replicas))]
    check_shared(owners, delays, "schedule: flush or 2bw, or weights: vertical")
    return delays


def step_problem(cuts: StageCuts, optimizer: torch.optim.Optimizer, grads: Sequence[torch.Tensor | None], made: bool) -> str | None:
    """Why a job of stages cannot make a step of these gradients, and what to do. `made`: `pipe.step` was called for it."""
    if cuts.late is not None and any(g is not None for g in grads):
        return (
            "the script has added gradients of its own, and a job of stages without flush pushes only those of pipe.step. Make them a "
            "part of loss_fn, or take training.pipeline.schedule: flush"
        )
    if not made and any(g is not None for g in grads):
        return (
            "a step of a job of stages without pipe.step. This worker has only the weights of its stage, and a forward of the whole "
            "model takes first values for all others. Take loss = pipe.step(x, y) in place of forward and backward"
        )
    if getattr(optimizer, "found_inf", None) is not None or getattr(optimizer, "grad_scale", None) is not None:
        return "GradScaler in a job of stages: pipe.step makes the backward itself, without its scale. Train in bfloat16"
    return None


class StageMemory:
    """Of a model with tensors on the meta device, as one worker has it. Weights are pulled; what no shard holds is drawn here.

    Raises ValueError for what cannot be drawn for only one stage.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._model, self._values = model, InitialValues(model, seed)
        self._own: tuple[str, ...] = ()
        self._versions: dict[str, int] = {}

    @classmethod
    def of(cls, model: nn.Module, seed: int) -> StageMemory | None:
        """None where the model has memory."""
        lazy = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        return cls(model, seed) if lazy else None

    def give(self, part: StagePart) -> None:
        """Let the worker's stage have memory."""
        self._own = tuple(name for name in (*part.parameters, *part.buffers) if name in self._values.names)
        memory.return_freed()
        tensors = self._tensors()
        give_memory(self._model, [tensors[name] for name in self._own], self._values.device)
        tensors = self._tensors()
        self._versions = {name: tensors[name]._version for name in self._own}

    def attached(self, table: Sequence[TensorSpec]) -> FirstBlocks:
        """The model is attached, with these parameters. Draw the stage's other tensors, which are not pulled.

        Raises Refused if the script has set values since: the shards would be given others.
        """
        tensors, pulled = self._tensors(), {row.name for row in table}
        for name in sorted(self._values.names):
            tensor = tensors.get(name)
            if tensor is None or (tensor._version != self._versions[name] if name in self._versions else not tensor.is_meta):
                raise Refused(
                    f"{name} of a model under ps.lazy was set after ps.pipeline, and a job of stages takes first values from "
                    "reset_parameters; leave it, or begin from a checkpoint with checkpoint.resumeFrom"
                )
        left = [name for name in self._own if name not in pulled]
        while left:
            values = self._values.of(left[0])
            with torch.no_grad():
                for name in left:
                    if name in values:
                        tensors[name].copy_(values[name])
            left = [name for name in left if name not in values]
        return FirstBlocks(self._values, tensors, table)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}


class FirstBlocks:
    """First values by block. What is drawn for one block is forgotten with the next that needs other tensors.

    `tensors` are the model's: those that are not lazy have their values already.
    """

    def __init__(self, values: InitialValues, tensors: Mapping[str, torch.Tensor], table: Sequence[TensorSpec]) -> None:
        self._values, self._tensors, self._table = values, tensors, table
        self._drawn: dict[str, torch.Tensor] = {}

    def fill(self, block: Block, pack: Pack) -> torch.Tensor:
        """The block's first values, in the buffer of its pack. Raises Refused if they cannot be drawn."""
        rows = frozenset(piece.tensor for piece in block.pieces)
        left = rows
        while left:
            values = self._having(self._table[min(left)].name)
            now = frozenset(row for row in left if self._table[row].name in values)
            pack.gather([values.get(spec.name) for spec in self._table], rows - now)
            left -= now
        return pack.flat

    def _having(self, name: str) -> Mapping[str, torch.Tensor]:
        if name not in self._values.names:
            return {name: self._tensors[name]}
        if name not in self._drawn:
            self._drawn = {}  # so that no two groups are held
            try:
                self._drawn = self._values.of(name)
            except ValueError as error:
                raise Refused(f"ps.pipeline: {error}") from error
        return self._drawn


def check_first_values(of: StageMemory | None, model: nn.Module) -> None:
    """Raise Refused for a parameter without memory that no stage will have."""
    lazy = (name for name, p in model.named_parameters() if p.is_meta and p.requires_grad) if isinstance(model, nn.Module) else iter(())
    if of is None and (name := next(lazy, None)):
        raise Refused(
            f"parameter {name} is on the meta device and has no values. Give the model memory before attach, such as "
            "model.to_empty(device='cpu'). A model of ps.lazy() needs spec.stages in the manifest, and ps.pipeline first"
        )


def buffers_told(buffers: Collection[str] | None, of: StageMemory | None, initial: Collection[str]) -> Collection[str] | None:
    """Of the buffers of a worker, those that a run's first record brings it: of a lazy model rank 0 gives only its own stage's."""
    return buffers if of is None or buffers is None else frozenset(buffers) & frozenset(initial)
