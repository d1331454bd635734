"""A part of a model that one stage runs: which parameters and buffers it needs, and its forward on tensors that are given to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from psjob.pipeline.draws import Calls, Draw, drawing, may_draw


class StagePart(ABC):
    """Stage `index` of a model. A parameter that several parts use is in each of them.

    Attributes:
        index: from 0.
        parameters: their names in the model, as `named_parameters` gives them.
        buffers: their names in the model, as `named_buffers` gives them.
    """

    index: int
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]

    @abstractmethod
    def run(self, parameters: Mapping[str, torch.Tensor], buffers: dict[str, torch.Tensor], value: Any, draw: Draw, calls: Calls) -> Any:
        """The forward.

        Args:
            parameters: by name, all of `self.parameters`. They are used as they are, so a graph keeps these very tensors.
            buffers: by name, all of `self.buffers`; changed where the forward changes them.
            value: of part 0 `(args, kwargs)` of the model; of others what the part before returned.
            draw: what random bits depend on.
            calls: counts the calls of modules.

        Returns:
            A nested structure of tensors: for the next part, or what the model returns.
        """

    @abstractmethod
    def expect(self, given: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        """Be ready for a micro-batch of which the model takes `given`: where the parts before run elsewhere, this one does not see it."""

    @abstractmethod
    def repeating(self, draw: Draw, devices: Sequence[torch.device], calls: Calls) -> Any:
        """A context for the backward of a forward that was run with this draw and counted in `calls`."""


class Pieces(StagePart):
    """Modules of which each takes what the one before returned. A piece without a name is the whole model."""

    def __init__(self, index: int, model: nn.Module, pieces: Sequence[tuple[str, nn.Module]]) -> None:
        self.index = index
        self._names = [name for name, _ in pieces]
        self._holder = _Holder([piece for _, piece in pieces])
        self._local = local_names(model, self._holder)
        known = dict(model.named_parameters())
        self.parameters = tuple(name for name in self._local if name in known)
        self.buffers = tuple(name for name in self._local if name not in known)
        self._drawing = [{id(m): name for name, m in piece.named_modules() if may_draw(m)} for _, piece in pieces]

    def run(self, parameters: Mapping[str, torch.Tensor], buffers: dict[str, torch.Tensor], value: Any, draw: Draw, calls: Calls) -> Any:
        given = {self._local[name]: parameters[name] for name in self.parameters}
        given |= {self._local[name]: buffers[name] for name in self.buffers}
        devices = devices_of([*given.values(), value])

        def forward(pieces: Sequence[nn.Module]) -> Any:
            args, kwargs = value if self.index == 0 else ((value,), {})
            if self._names != [""] and (len(args) != 1 or kwargs):
                raise ValueError(
                    f"an nn.Sequential takes one argument without a name, and was given {len(args) + len(kwargs)}; "
                    "give it a tensor, or a tuple of one structure"
                )
            for name, piece, names in zip(self._names, pieces, self._drawing, strict=True):
                if names:
                    with drawing(draw, names, devices, calls, prefix=name):
                        output = piece(*args, **kwargs)
                else:
                    output = piece(*args, **kwargs)
                args, kwargs = (output,), {}
            return args[0]

        result = torch.func.functional_call(self._holder, given, (forward,))
        for name in self.buffers:  # a forward may put another tensor into a buffer's place
            buffers[name] = given[self._local[name]]
        return result

    def expect(self, given: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        """Modules take any shape."""

    @contextmanager
    def repeating(self, draw: Draw, devices: Sequence[torch.device], calls: Calls) -> Iterator[None]:
        with ExitStack() as stack:
            for name, names in zip(self._names, self._drawing, strict=True):
                if names:
                    stack.enter_context(drawing(draw, names, devices, calls, again=True, prefix=name))
            yield


class _Holder(nn.Module):
    """Runs what it is given on its pieces, so that `functional_call` swaps tensors once for all of them."""

    def __init__(self, pieces: Sequence[nn.Module]) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(pieces)

    def forward(self, run: Any) -> Any:
        return run(self.pieces)


def devices_of(values: Any) -> list[torch.device]:
    """Where the tensors of a structure lie."""
    return list(dict.fromkeys(leaf.device for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)))


def local_names(model: nn.Module, part: nn.Module) -> dict[str, str]:
    """Names in the model of all parameters and buffers of `part`, each with its first name in `part`."""
    canonical = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    names: dict[str, str] = {}
    for local, tensor in [*part.named_parameters(), *part.named_buffers()]:
        names.setdefault(canonical[id(tensor)], local)
    return names
