"""Runs one stage: forwards and backwards of micro-batches, each on one version of the stage's weights.

`OneMemory` holds the weights of a stage that keeps no older ones: one memory, which changes under open graphs.
A `StagePart` is the part of a model that a stage runs: which parameters and buffers it needs, and its forward on tensors that are given to
it. `cut` makes micro-batches of a batch, a nested structure of tensors, along dimension 0.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from psjob.pipeline.random_draws import Calls, Draw, drawing, may_draw


class OneMemory:
    """Autograd does not see that it changes: a backward goes through what is in it.

    What a forward has made of a weight and kept, such as its product with another one, stays as it was.

    Attributes:
        leaves: the tensors that forwards take, by name.
    """

    def __init__(self, leaves: Mapping[str, torch.Tensor]) -> None:
        self.leaves = dict(leaves)

    def take(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Put these in place of what is there. Raises KeyError for a name that is not there."""
        for name, tensor in weights.items():
            # `data` has a version counter of its own: through the leaf, autograd would refuse the backward.
            self.leaves[name].data.copy_(tensor)
        torch.clear_autocast_cache()  # it keeps a leaf's cast until autocast ends, and nothing tells it that the leaf has changed


Grads = list[torch.Tensor | None]
"""One for each leaf of a structure, in pytree's order; None for what has no gradient."""
Sink = Callable[[str, torch.Tensor], None]
Finish = Callable[[Any], torch.Tensor]


class ChangedInPlace(RuntimeError):
    """Weights under a graph whose backward is to come are not what they were: a gradient would be wrong silently."""


class StageRun:
    """One stage. `load` gives it weights, `forward` and `backward` use them.

    The graph of a forward is what keeps its weights. `load` takes fresh tensors for each version, and nothing writes into them until
    the backwards of all forwards on them are done. With `recompute` a forward keeps only its inputs, and its backward runs it again on
    the weights that were loaded last. Buffers such as BatchNorm's statistics change only in the first run.

    Args:
        part: what is run.
        buffers: by name; changed by forwards.
        shared: names of parameters for which `backward` is given gradients of later stages.
        recompute: as above.
        verify: compare the contents of weights too, before a backward and in `load`: a pass over all weights each time.
        in_place: weights may change under open graphs, and nothing looks whether they do; see `psjob.pipeline.stage`.

    Attributes:
        buffers: by name, as the forwards left them.
        opened: version by micro-batch, of the forwards whose backward is to come.
    """

    def __init__(
        self,
        part: StagePart,
        buffers: Mapping[str, torch.Tensor],
        *,
        shared: frozenset[str] = frozenset(),
        recompute: bool = False,
        verify: bool = False,
        in_place: bool = False,
    ) -> None:
        self.part, self.buffers = part, {name: buffers[name] for name in part.buffers}
        self._shared, self._recompute, self._verify, self._in_place = shared, recompute, verify and not in_place, in_place
        self._loaded: _Version | None = None
        self._open: dict[int, _Open] = {}

    @property
    def opened(self) -> dict[int, int]:
        return {micro: one.version.number for micro, one in self._open.items()}

    def load(self, number: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the weights for the forwards to come.

        Args:
            number: of the version. The same number means the same values.
            tensors: by name, at least those of the part; requires_grad says which get a gradient. They are used as they are, and must
                not be written into while a graph is open.

        Raises:
            ChangedInPlace: weights of another version, whose graph is open, lie in the same memory.
            KeyError: a parameter of the part is missing.
        """
        leaves = {name: _leaf(tensors[name]) for name in self.part.parameters}
        loaded = _Version(number, leaves, self._verify)
        if not self._recompute and not self._in_place:
            for micro, one in self._open.items():
                if one.version.number != number and (name := one.version.overlap(loaded)):
                    raise ChangedInPlace(
                        f"stage {self.part.index}: version {number} of {name} lies in the memory of version {one.version.number}, which "
                        f"the backward of micro-batch {micro} needs; put each version into memory of its own"
                    )
        self._loaded = loaded

    def forward(self, micro: int, value: Any, draw: Draw, finish: Finish | None = None) -> Any:
        """Run one micro-batch on the weights loaded last.

        Args:
            micro: its number; not open yet.
            value: nested structure of tensors: `(args, kwargs)` for part 0, else what the part before gave. Tensors with requires_grad
                get a gradient in the backward.
            draw: what random bits depend on.
            finish: of the last stage: takes the model's output and returns a tensor without dimensions, whose gradient is wanted.

        Returns:
            What the part gives, or what `finish` gave, cut off from the graph; requires_grad says what needs a gradient.

        Raises:
            RuntimeError: no weights were loaded, or the micro-batch is open.
        """
        if self._loaded is None or micro in self._open:
            what = "its backward did not come yet" if micro in self._open else "no weights were loaded"
            raise RuntimeError(f"stage {self.part.index}: forward of micro-batch {micro}: {what}")
        one = _Open(self._loaded, value, draw, finish, Calls(), _casts())
        if self._recompute:
            one.buffers = {name: tensor.clone() for name, tensor in self.buffers.items()}
            with torch.no_grad():
                # Copies, since the part may write into what it is given and the backward needs it as it was.
                output = self._run(one, pytree.tree_map_only(torch.Tensor, torch.clone, value), self.buffers)
            leaves, structure = pytree.tree_flatten(output)
            wanted = any(leaf.requires_grad for leaf in (*one.version.leaves.values(), *_tensors(value)))
            output = pytree.tree_unflatten([_needing(leaf, wanted) for leaf in leaves], structure)
        else:
            graph = self._build(one, self.buffers)
            leaves, structure = pytree.tree_flatten(graph)
            output = pytree.tree_unflatten([_cut_off(leaf) for leaf in leaves], structure)
        self._open[micro] = one
        return output

    def backward(
        self, micro: int, grads: Grads | None = None, later: Mapping[str, torch.Tensor] | None = None, sink: Sink | None = None
    ) -> tuple[Grads, dict[str, torch.Tensor]]:
        """The gradients of one micro-batch, which is closed then.

        Args:
            micro: an open one.
            grads: of the leaves of what `forward` returned; None after a forward with `finish`.
            later: gradients that later stages have for parameters of this one too, by name. They are added first, as one process would.
            sink: given the dense gradient of each parameter that is not shared as soon as it is made: they are not held all at once.

        Returns:
            Gradients of the leaves of the forward's value, and of the parameters by name, with `later` in them. What has none is None, or
            left out, and so is what `sink` was given.

        Raises:
            ChangedInPlace: the weights of the forward were written into since.
            RuntimeError: the micro-batch is not open.
        """
        one = self._open.pop(micro, None)
        if one is None or self._loaded is None:
            raise RuntimeError(f"stage {self.part.index}: backward of micro-batch {micro}, which is not open")
        version = self._loaded if self._recompute else one.version
        if not self._in_place and (name := version.changed()):
            raise ChangedInPlace(
                f"stage {self.part.index}: {name} of version {version.number} was written into before the backward of micro-batch {micro}; "
                "put new weights into new tensors"
            )
        if self._recompute:
            one.version, calls, one.calls = version, one.calls, Calls()
            with one.cast():
                self._build(one, one.buffers)
            one.calls = calls
        return self._grads(one, grads, later or {}, sink)

    def put_buffers_back(self, model: nn.Module, held: Mapping[str, torch.Tensor]) -> None:
        """Let the model have the buffers of this stage. `held` are those it has: a forward may have put another tensor into one's place."""
        for name, tensor in self.buffers.items():
            if tensor is not held[name]:
                owner, _, attribute = name.rpartition(".")
                model.get_submodule(owner)._buffers[attribute] = tensor

    def drop(self) -> None:
        """Forget all open micro-batches, as after an error."""
        self._open.clear()

    def _grads(
        self, one: _Open, grads: Grads | None, later: Mapping[str, torch.Tensor], sink: Sink | None
    ) -> tuple[Grads, dict[str, torch.Tensor]]:
        pairs = [
            (output, None if grads is None else grads[place])
            for place, output in enumerate(one.outputs)
            if isinstance(output, torch.Tensor) and output.requires_grad and (grads is None or grads[place] is not None)
        ]
        pairs += [(one.used[name], grad) for name, grad in later.items()]
        inputs = [leaf for leaf in one.inputs if leaf is not None]
        weights = {name: leaf for name, leaf in one.version.leaves.items() if leaf.requires_grad}
        gone: set[str] = set()
        found: Sequence[torch.Tensor | None] = [None] * (len(inputs) + len(weights))
        if pairs and found:
            away = {} if sink is None else {name: leaf for name, leaf in weights.items() if name not in self._shared}
            with self.part.repeating(one.draw, tensor_devices([weights, inputs]), one.calls), _no_casts(), _sinking(away, sink, gone):
                found = torch.autograd.grad(
                    [output for output, _ in pairs], [*inputs, *weights.values()], [grad for _, grad in pairs], allow_unused=True
                )
        of_inputs = iter(found[: len(inputs)])
        back = [None if leaf is None else next(of_inputs) for leaf in one.inputs]
        named = zip(weights, found[len(inputs) :], strict=True)
        return back, {name: grad for name, grad in named if grad is not None and name not in gone}

    def _build(self, one: _Open, buffers: dict[str, torch.Tensor]) -> Any:
        """Run the forward with a graph, whose ends `one` keeps."""
        leaves, structure = pytree.tree_flatten(one.value)
        one.inputs = [_entry(leaf) for leaf in leaves]
        with torch.enable_grad():
            # A copy of what gets a gradient: the part may begin with an operation in place, which a leaf of a graph does not allow.
            given = [leaf if entry is None else entry.clone() for leaf, entry in zip(leaves, one.inputs, strict=True)]
            # A view, so that gradients of a parameter meet at a node to which those of later stages can be given first.
            one.used = {name: leaf.view_as(leaf) if name in self._shared else leaf for name, leaf in one.version.leaves.items()}
            output = self._run(one, pytree.tree_unflatten(given, structure), buffers)
        one.outputs = pytree.tree_leaves(output)
        if not self._recompute:
            one.value = None
        return output

    def _run(self, one: _Open, value: Any, buffers: dict[str, torch.Tensor]) -> Any:
        output = self.part.run(one.used or one.version.leaves, buffers, value, one.draw, one.calls)
        return output if one.finish is None else one.finish(output)


class _Version:
    """Weights, and how to tell that somebody wrote into them."""

    def __init__(self, number: int, leaves: dict[str, torch.Tensor], contents: bool) -> None:
        self.number, self.leaves = number, leaves
        self._counters = {name: leaf._version for name, leaf in leaves.items()}
        self._sums = {name: _sum_of_bits(leaf) for name, leaf in leaves.items()} if contents else {}

    def changed(self) -> str | None:
        """The name of a tensor that was written into, where that can be seen."""
        for name, leaf in self.leaves.items():
            if leaf._version != self._counters[name] or (self._sums and _sum_of_bits(leaf) != self._sums[name]):
                return name
        return None

    def overlap(self, other: _Version) -> str | None:
        """The name of a tensor of `other` that lies in memory of this version. One that no training changes may."""
        spans = sorted(
            [(*_span(leaf), False, name) for name, leaf in self.leaves.items() if leaf.requires_grad]
            + [(*_span(leaf), True, name) for name, leaf in other.leaves.items() if leaf.requires_grad]
        )
        last = {False: ("", -1, ""), True: ("", -1, "")}
        for place, begin, end, theirs, name in spans:
            before_place, before_end, before_name = last[not theirs]
            if before_place == place and begin < before_end:
                return name if theirs else before_name
            if (place, end) > last[theirs][:2]:
                last[theirs] = (place, end, name)
        return None


@dataclass(eq=False)
class _Open:
    """A forward whose backward is to come."""

    version: _Version
    value: Any
    draw: Draw
    finish: Finish | None
    calls: Calls
    casts: dict[str, tuple[bool, torch.dtype]]

    def __post_init__(self) -> None:
        self.buffers: dict[str, torch.Tensor] = {}
        self.inputs: Grads = []
        self.used: dict[str, torch.Tensor] = {}
        self.outputs: list[Any] = []

    @contextmanager
    def cast(self) -> Iterator[None]:
        """With autocast as it was in the forward."""
        with ExitStack() as stack:
            for kind, (enabled, dtype) in self.casts.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield


def _casts() -> dict[str, tuple[bool, torch.dtype]]:
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}


@contextmanager
def _no_casts() -> Iterator[None]:
    """Backward takes the dtypes of the forward; autocast around it would cast once more."""
    with ExitStack() as stack:
        for kind, (enabled, _) in _casts().items():
            if enabled:
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def _sinking(leaves: Mapping[str, torch.Tensor], sink: Sink | None, gone: set[str]) -> Iterator[None]:
    """Inside, dense gradients of these leaves go to `sink`, and their names to `gone`; a backward gives zeros without memory for them."""

    def took(name: str, grad: torch.Tensor) -> torch.Tensor:
        if sink is None or grad.layout is not torch.strided:
            return grad
        gone.add(name)
        with torch.no_grad():
            sink(name, grad)
        return grad.new_zeros(()).expand_as(grad)

    handles: list[Any] = [leaf.register_hook(functools.partial(took, name)) for name, leaf in leaves.items()]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_leaf else _cut_off(tensor)


def _entry(leaf: Any) -> torch.Tensor | None:
    return leaf.detach().requires_grad_() if isinstance(leaf, torch.Tensor) and leaf.requires_grad else None


def _cut_off(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def _needing(leaf: Any, wanted: bool) -> Any:
    if isinstance(leaf, torch.Tensor) and wanted and (leaf.is_floating_point() or leaf.is_complex()):
        return leaf.detach().requires_grad_()
    return leaf


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _span(tensor: torch.Tensor) -> tuple[str, int, int]:
    """The memory of a tensor: its device, first byte and the one behind its last."""
    begin = tensor.data_ptr()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return str(tensor.device), begin, begin + (reach * tensor.element_size() if tensor.numel() else 0)


def _sum_of_bits(tensor: torch.Tensor) -> int:
    """A number that changes with the contents: the sum of the elements' bits, read as integers, modulo 2^64."""
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[real.element_size()]
    return int(real.contiguous().view(kind).sum(dtype=torch.int64))


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
        devices = tensor_devices([*given.values(), value])

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


def tensor_devices(values: Any) -> list[torch.device]:
    """Where the tensors of a structure lie."""
    return list(dict.fromkeys(leaf.device for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)))


def local_names(model: nn.Module, part: nn.Module) -> dict[str, str]:
    """Names in the model of all parameters and buffers of `part`, each with its first name in `part`."""
    canonical = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    names: dict[str, str] = {}
    for local, tensor in [*part.named_parameters(), *part.named_buffers()]:
        names.setdefault(canonical[id(tensor)], local)
    return names


@dataclass(frozen=True)
class Micro:
    """One micro-batch: the structure of the batch with its samples, and the share of the batch's samples that it has, above 0 to 1."""

    value: Any
    weight: float


def cut(batch: Any, microbatches: int) -> list[Micro]:
    """Cut `batch` into at most `microbatches`; fewer where it has fewer samples.

    Sizes differ by one at most, larger ones first. The n_i of N samples weigh n_i/N, so that the weighted sum of the micro-batches'
    means is the mean of the batch. Tensors of a micro-batch are views of the batch's. What is no tensor, and tensors without
    dimensions, are given to every micro-batch.

    Args:
        batch: tuples, lists, dicts and other structures known to torch's pytree, nested, of tensors. Tensors have the same length of
            dimension 0.
        microbatches: 1 or more.

    Raises:
        ValueError: a number below 1, lengths that differ, an empty batch, or no tensor with a dimension.
    """
    if microbatches < 1:
        raise ValueError(f"microbatches is {microbatches}, must be 1 or more")
    leaves, structure = pytree.tree_flatten(batch)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    samples = _samples(batch, [leaves[place] for place in places])
    cuts = min(microbatches, samples)
    sizes = [samples // cuts + (number < samples % cuts) for number in range(cuts)]
    parts: list[list[Any]] = [list(leaves) for _ in sizes]
    for place in places:
        for part, piece in zip(parts, leaves[place].split(sizes), strict=True):
            part[place] = piece
    return [Micro(pytree.tree_unflatten(part, structure), size / samples) for part, size in zip(parts, sizes, strict=True)]


def arguments(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a model is called with, `(args, kwargs)`: a tuple holds its arguments, a mapping those by name; else there is one."""
    if isinstance(x, Mapping):
        return (), dict(x)
    return (x if isinstance(x, tuple) else (x,)), {}


def _samples(batch: Any, tensors: list[torch.Tensor]) -> int:
    if not tensors:
        raise ValueError(
            f"the batch ({type(batch).__name__}) holds no tensor with a dimension; give tensors whose dimension 0 counts samples"
        )
    lengths = [len(tensor) for tensor in tensors]
    if len(set(lengths)) > 1:
        found = ", ".join(map(str, sorted(set(lengths))))
        raise ValueError(f"the tensors of the batch have {found} samples in dimension 0; all must have the same number")
    if not lengths[0]:
        raise ValueError("the batch has 0 samples; leave empty batches out")
    return lengths[0]


LossFn = Callable[[Any, Any], torch.Tensor]
"""From the model's output and the target, the mean loss of the samples."""


def mean_loss(loss_fn: LossFn, target: Any, weight: float) -> Callable[[Any], torch.Tensor]:
    """From the model's output of a micro-batch, its part of the batch's mean loss. That raises ValueError for a loss that is none."""

    def finish(output: Any) -> torch.Tensor:
        loss = loss_fn(output, target)
        if not isinstance(loss, torch.Tensor) or loss.dim():
            shape = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn returned {shape}, must be the mean loss as a tensor without dimensions")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ValueError("the loss has no gradient: no parameter of the model that needs one leads to it")
        return loss * weight

    return finish


def accumulate(p: nn.Parameter, grad: torch.Tensor) -> None:
    """As autograd adds a gradient to a leaf."""
    if p.grad is None:
        p.grad = grad.clone()  # autograd may give one tensor as the gradient of several
    elif p.grad.layout is torch.strided:
        p.grad.add_(grad)
    else:
        p.grad = p.grad + grad
