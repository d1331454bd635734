"""`pipeline`: a model cut into stages, with one call in place of forward and backward; `lazy`: such a model before it has memory."""

from __future__ import annotations

import functools
from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from psjob.api import auto_cuts, stage_cuts
from psjob.api.staged import StagedPipeline
from psjob.embeddings.lookup import Lookup
from psjob.pipeline.cuts import Cuts, needs_example, split_model
from psjob.pipeline.lazy import materialise, on_meta
from psjob.pipeline.random_draws import Draw
from psjob.pipeline.stage import Grads, LossFn, Micro, StageRun, accumulate, arguments, cut, mean_loss
from psjob.process import config
from psjob.process.errors import Refused, refuse


def pipeline(
    model: nn.Module, loss_fn: LossFn, cuts: Cuts = (), microbatches: int = 1, seed: int | None = None, example: Any = None
) -> Pipeline | StagedPipeline:
    """Cut a model into stages that are trained as a pipeline. Outside a job all stages run in this process, in plain torch.

    In a job of stages each worker runs its own, and the model is given to `psjob.attach` afterwards. Losses and gradients are the same
    bits for any cuts; docs/limits.md has the exceptions. A model built under `psjob.lazy()` gets its memory and first values here; in a
    job a worker gives memory only to its stage.

    Args:
        model: what is trained. An nn.Sequential, or a model that only calls one, is cut without a change. Others are exported by
            torch.export, once for each shape of a micro-batch.
        loss_fn: from the model's output and the target, the mean loss of the samples, a tensor without dimensions. It has no parameters.
        cuts: where stages begin: names of modules, such as "layers.6", or numbers of children of an nn.Sequential. Or a dict of
            `torch.distributed.pipelining.SplitPoint` by name. Empty: one stage. "auto": psjob chooses them at the job's start; see
            docs/pipelines.md. Outside a job that is one stage.
        microbatches: into how many parts each batch is cut along dimension 0; fewer where it has fewer samples.
        seed: of first values and of random bits such as Dropout's; if None, torch's initial seed, and in a job training.seed.
        example: what the model takes, of one micro-batch: in a job, for a model that must be exported and for `cuts="auto"`.

    Returns:
        A `Pipeline`: `step` makes forward and backward, `evaluate` only a forward.

    Raises:
        Refused: where the script asks for what cannot be done. In a job this process ends with status 77 and the sentence.

    Example:
        >>> import torch, psjob as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        >>> pipe = ps.pipeline(model, torch.nn.functional.mse_loss, cuts=[2], microbatches=2)
        >>> loss = pipe.step(torch.ones(8, 2), torch.zeros(8, 1))
        >>> model[0].weight.grad.shape
        torch.Size([4, 2])
    """
    __tracebackhide__ = True
    try:
        _check(model, loss_fn)
        place = config.place()
        try:
            if place is not None:
                staged = StagedPipeline(place, model, loss_fn, cuts, microbatches, seed, example)
                stage_cuts.remember(model, staged.cuts)
                return staged
            return Pipeline(
                model, loss_fn, () if auto_cuts.is_auto(cuts) else cuts, microbatches, torch.initial_seed() if seed is None else seed
            )
        except ValueError as error:
            raise Refused(f"ps.pipeline: {error}") from error
    except Refused as refused:
        refuse(str(refused))


def lazy() -> AbstractContextManager[None]:
    """Build a model without memory: inside, modules are made on the meta device.

    `psjob.pipeline` gives them memory and first values. These come from the `reset_parameters` of each module, its name and the seed. They
    are the same for any number of stages, and differ from those of a model that is built at once. `psjob.pipeline` refuses parameters and
    buffers that are set elsewhere, by name.

    Returns:
        A context manager.

    Example:
        >>> import torch, psjob as ps
        >>> with ps.lazy():
        ...     model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
        >>> pipe = ps.pipeline(model, torch.nn.functional.mse_loss, cuts=[1], seed=0)
        >>> model[0].weight.device.type
        'cpu'
    """
    return on_meta()


class Pipeline:
    """A model in stages, all of them in this process. Made by `psjob.pipeline`."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, cuts: Cuts, microbatches: int, seed: int) -> None:
        if microbatches < 1:
            raise ValueError(f"microbatches is {microbatches}, must be 1 or more")
        self._model, self._loss_fn, self._cuts, self._microbatches, self._seed = model, loss_fn, cuts, microbatches, seed
        self._steps = 0
        self._stages: list[StageRun] = []
        exported = needs_example(model, cuts)
        materialise(model, seed)
        if not exported:
            self._split(None)

    def step(self, x: Any, y: Any) -> torch.Tensor:
        """Forward and backward of one batch, in place of `loss = loss_fn(model(x), y); loss.backward()`.

        Gradients of the batch's mean loss are added to `.grad` of the model's parameters. Shapes may change from step to step.

        Args:
            x: what the model takes: a tuple holds its arguments, a mapping those by name, anything else is the only one. Structures
                of tensors may be nested; dimension 0 of each tensor counts samples.
            y: the target that `loss_fn` takes, cut as x is.

        Returns:
            The mean loss of the batch: a tensor without dimensions and without a graph.

        Raises:
            ValueError: a batch that cannot be cut, a loss that is no mean, a loss without a gradient, a model that cannot be exported.
        """
        micros = cut((arguments(x), y), self._microbatches)
        if not self._stages:
            self._split(micros[0].value[0])
        parameters, buffers = dict(self._model.named_parameters()), dict(self._model.named_buffers())
        for stage in self._stages:
            stage.load(self._steps, parameters)
            stage.buffers = {name: buffers[name] for name in stage.part.buffers}
        losses = []
        try:
            for place, micro in enumerate(micros):
                losses.append(self._forward(place, micro))
                self._backward(place, parameters)
        finally:
            for stage in self._stages:
                stage.drop()
        for stage in self._stages:
            stage.put_buffers_back(self._model, buffers)
        self._steps += 1
        return functools.reduce(torch.add, losses)

    @torch.no_grad()
    def evaluate(self, x: Any) -> Any:
        """A forward in evaluation mode, without gradients and of the whole batch at once.

        Args:
            x: as of `step`.

        Returns:
            The model's output.
        """
        modes = {module: module.training for module in self._model.modules()}
        args, kwargs = arguments(x)
        try:
            return self._model.eval()(*args, **kwargs)
        finally:
            for module, training in modes.items():
                module.training = training

    def state_dict(self) -> dict[str, int]:
        """The number of steps made, on which random bits depend: for checkpoints of the script.

        Returns:
            A dict of numbers.
        """
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at the step that `state_dict` told.

        Args:
            state: of `state_dict`.
        """
        self._steps = int(state["steps"])

    def _split(self, example: tuple[tuple[Any, ...], dict[str, Any]] | None) -> None:
        buffers = dict(self._model.named_buffers())
        parts = split_model(self._model, self._cuts, example)
        counts = Counter(name for part in parts for name in part.parameters)
        shared = frozenset(name for name, count in counts.items() if count > 1)
        self._stages = [StageRun(part, buffers, shared=shared) for part in parts]

    def _forward(self, place: int, micro: Micro) -> torch.Tensor:
        value, target = micro.value
        draw, finish = Draw(self._seed, self._steps, place), mean_loss(self._loss_fn, target, micro.weight)
        for stage in self._stages[:-1]:
            value = stage.forward(place, value, draw)
        loss: torch.Tensor = self._stages[-1].forward(place, value, draw, finish)
        return loss.detach()

    def _backward(self, place: int, parameters: dict[str, nn.Parameter]) -> None:
        back: Grads | None = None
        sums: dict[str, torch.Tensor] = {}
        for stage in reversed(self._stages):
            later = {name: sums[name] for name in stage.part.parameters if name in sums}
            back, grads = stage.backward(place, back, later, lambda name, grad: accumulate(parameters[name], grad))
            sums |= grads
        for name, grad in sums.items():
            accumulate(parameters[name], grad)


def _check(model: nn.Module, loss_fn: LossFn) -> None:
    if not isinstance(model, nn.Module):
        raise Refused(f"ps.pipeline takes a torch Module, got {type(model).__name__}")
    if table := next((name for name, module in model.named_modules() if isinstance(module, Lookup)), None):
        raise Refused(f"ps.pipeline: {table} keeps its rows on the shards, which a pipeline does not train yet; use torch's nn.Embedding")
    if isinstance(loss_fn, nn.Module) and (name := next((name for name, p in loss_fn.named_parameters() if p.requires_grad), None)):
        raise Refused(f"ps.pipeline: loss_fn has the parameter {name}, which no stage would train; make it a part of the model")
