"""Lazy models in a job of stages: each worker has memory for its stage, and rank 0 makes the first values of all blocks, one at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from psjob.layout import memory
from psjob.layout.blocks import Block, TensorSpec
from psjob.layout.packing import Pack
from psjob.pipeline.lazy import FirstValues, give_memory
from psjob.pipeline.parts import StagePart
from psjob.process.errors import Refused


class StageMemory:
    """Of a model with tensors on the meta device, as one worker has it. Weights are pulled; what no shard holds is drawn here.

    Raises ValueError for what cannot be drawn for one stage alone.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._model, self._values = model, FirstValues(model, seed)
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

        Raises Refused where the script has set values since: the shards would be given others.
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

    def __init__(self, values: FirstValues, tensors: Mapping[str, torch.Tensor], table: Sequence[TensorSpec]) -> None:
        self._values, self._tensors, self._table = values, tensors, table
        self._drawn: dict[str, torch.Tensor] = {}

    def fill(self, block: Block, pack: Pack) -> torch.Tensor:
        """The block's first values, in the buffer of its pack. Raises Refused where they cannot be drawn."""
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


def check(of: StageMemory | None, model: nn.Module) -> None:
    """Raise Refused for a parameter without memory that no stage will have."""
    lazy = (name for name, p in model.named_parameters() if p.is_meta and p.requires_grad) if isinstance(model, nn.Module) else iter(())
    if of is None and (name := next(lazy, None)):
        raise Refused(
            f"parameter {name} is on the meta device and has no values. Give the model memory before attach, such as "
            "model.to_empty(device='cpu'). A model of ps.lazy() needs spec.stages in the manifest, and ps.pipeline first"
        )


def told(buffers: Collection[str] | None, of: StageMemory | None, initial: Collection[str]) -> Collection[str] | None:
    """Of the buffers of a worker, those that a run's first record brings it: of a lazy model rank 0 gives its own stage's alone."""
    return buffers if of is None or buffers is None else frozenset(buffers) & frozenset(initial)
