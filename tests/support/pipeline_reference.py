"""What a pipeline is to compute, as plain as can be: one process, one minibatch after the other, old weights from a list.

Stage k computes minibatch b on the weights w_k^(b - min(b, d_k)), where d_k is the delay that the way promises. Nothing here knows of
schedules, queues or open graphs: runs of stages are compared with it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from psjob.pipeline import predict
from psjob.pipeline.predict import Begin, Corrector
from psjob.pipeline.random_draws import Calls, Draw
from psjob.pipeline.schedule import TrainingWay, check_shared
from psjob.pipeline.stage import StagePart, arguments, cut
from tests.support.pipeline_orders import updates_before

Loss = Callable[[Any, Any], torch.Tensor]
MakeOptimizer = Callable[[list[nn.Parameter], int], torch.optim.Optimizer]
"""From parameters of one stage and the stage's delay."""
Rate = Callable[[int, int], float]
"""From a delay and the number of updates made, the learning rate of the next."""
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What training came to.

    `losses` has the mean loss of each minibatch, `weights` and `buffers` the last ones by name, and `delays` for each stage how often
    each delay came, in updates.
    """

    losses: list[float]
    weights: Tensors
    buffers: Tensors
    delays: list[Counter[int]]


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
    replicas: Sequence[int] = (),
    correct: Begin | None = None,
    clip: float | None = None,
) -> Outcome:
    """Train copies of the model's weights; the model stays as it is.

    Args:
        model: gives names and first values.
        loss_fn: from the model's output and a target, the mean loss of the samples, without dimensions.
        batches: `(x, y)` of each minibatch; x as for `arguments`.
        parts: of the model.
        way: of training.
        microbatches: M, of every minibatch.
        optimizer: makes one for each stage.
        rate: sets the learning rate before each update.
        seed: of random draws.
        replicas: of each stage, on which delays depend; empty: one each.
        correct: makes what corrects gradients before an update; each replica of a stage corrects the mean of its own micro-batches.
        clip: the largest norm of a minibatch's gradient over all stages, after `correct`.

    Raises:
        ValueError: what the way cannot do, such as a weight of several stages whose delays differ.
    """
    replicas = replicas or [1] * len(parts)
    delays = [way.delay(part.index, replicas, microbatches) for part in parts]
    owner = owners(parts, delays)
    masters = {name: nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    trained = [[name for name in part.parameters if owner[name][0] == part.index and masters[name].requires_grad] for part in parts]
    optimizers = [
        optimizer([masters[name] for name in names], delay) if names else None for names, delay in zip(trained, delays, strict=True)
    ]
    counts = {name: replicas[stages[0]] if correct else 1 for name, stages in owner.items()}
    correctors = [correct() for _ in range(max(replicas))] if correct else []
    history: dict[int, Tensors] = {}
    ahead: dict[int, Tensors] = {}
    outcome = Outcome([], {}, buffers, [Counter() for _ in parts])
    for number, (x, y) in enumerate(batches):
        history[number] = version_of(masters)
        ahead[number] = expected(history[number], masters, optimizers, delays) if way.predicts else history[number]
        for kept in (history, ahead):
            kept.pop(number - max(delays) - 1, None)
        versions = [number - min(number, delay) for delay in delays]
        taken = _taken(parts, ahead, versions)
        sums: list[Tensors] = [{} for _ in range(max(len(correctors), 1))]
        loss = torch.zeros((), dtype=torch.float32, device="cpu")
        for place, micro in enumerate(cut((arguments(x), y), microbatches)):
            value, target = micro.value
            draw = Draw(seed, number, place)

            def finish(output: Any, target: Any = target, weight: float = micro.weight) -> torch.Tensor:
                return loss_fn(output, target) * weight

            if way.in_place:
                taken = _taken(parts, history, [updates_before(part.index, replicas, microbatches, number, place) for part in parts])
            compute = _recomputed if way.recompute else _in_place if way.in_place else _at_once
            part_loss, grads = compute(parts, taken, history[number], buffers, value, draw, finish)
            loss = loss + part_loss
            for name, grad in grads.items():
                total = sums[place % counts[name]]
                total[name] = total[name] + grad if name in total else grad
        updates = []
        for names, optimizer_, delay, version, counted in zip(trained, optimizers, delays, versions, outcome.delays, strict=True):
            counted[number - version] += 1
            if optimizer_ is not None:
                parts_of = [{name: total.get(name) for name in names} for total in sums[: counts[names[0]]]]
                opened = {name: taken[owner[name][0]][name] for name in names}
                rate_ = rate and rate(delay, number)
                updates.append(Update(optimizer_, {name: masters[name] for name in names}, parts_of, rate_, correctors, opened))
        if clip is not None:
            norm = float(nn.utils.get_total_norm([grad for one in updates for grad in one.total.values() if grad is not None]))
            for one in updates:
                one.scale(min(1.0, clip / (norm + 1e-6)))
        for one in updates:
            one.make()
        outcome.losses.append(float(loss))
    outcome.weights.update({name: p.detach().clone() for name, p in masters.items()})
    return outcome


def _taken(parts: Sequence[StagePart], kept: dict[int, Tensors], versions: Sequence[int]) -> list[Tensors]:
    """The weights of each part, of that version."""
    return [{name: kept[version][name] for name in part.parameters} for part, version in zip(parts, versions, strict=True)]


def _at_once(
    parts: Sequence[StagePart], taken: list[Tensors], _now: Tensors, buffers: Tensors, value: Any, draw: Draw, finish: Any
) -> tuple[torch.Tensor, Tensors]:
    """One graph through all parts."""
    leaves = {name: tensor for tensors in taken for name, tensor in tensors.items()}
    calls = Calls()
    for part, tensors in zip(parts, taken, strict=True):
        value = part.run(tensors, buffers, value, draw, calls)
    loss = finish(value)
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    return loss.detach(), _found(wanted, torch.autograd.grad(loss, list(wanted.values()), allow_unused=True))


def _in_place(
    parts: Sequence[StagePart], taken: list[Tensors], now: Tensors, buffers: Tensors, value: Any, draw: Draw, finish: Any
) -> tuple[torch.Tensor, Tensors]:
    """As `_at_once`, but weights change in place between forward and backward, where autograd does not see it."""
    mine = [{name: tensor.detach().clone().requires_grad_(tensor.requires_grad) for name, tensor in tensors.items()} for tensors in taken]
    leaves = {name: tensor for tensors in mine for name, tensor in tensors.items()}
    calls = Calls()
    for part, tensors in zip(parts, mine, strict=True):
        value = part.run(tensors, buffers, value, draw, calls)
    loss = finish(value)
    for name, leaf in leaves.items():
        leaf.data.copy_(now[name])
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    return loss.detach(), _found(wanted, torch.autograd.grad(loss, list(wanted.values()), allow_unused=True))


def _recomputed(
    parts: Sequence[StagePart], taken: list[Tensors], now: Tensors, buffers: Tensors, value: Any, draw: Draw, finish: Any
) -> tuple[torch.Tensor, Tensors]:
    """Forward on what was taken, without a graph; then each part, the last first, forward and backward on the weights of now."""
    before = {name: tensor.clone() for name, tensor in buffers.items()}
    inputs = []
    with torch.no_grad():
        for part, tensors in zip(parts, taken, strict=True):
            inputs.append(pytree.tree_map_only(torch.Tensor, torch.clone, value))
            value = part.run(tensors, buffers, value, draw, Calls())
        loss = finish(value)
    grads: Tensors = {}
    back: list[torch.Tensor | None] = []
    for part in reversed(parts):
        leaves, structure = pytree.tree_flatten(inputs[part.index])
        if part.index:
            leaves = [leaf.requires_grad_() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf for leaf in leaves]
        given = [leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf for leaf in leaves]
        weights = {name: now[name] for name in part.parameters}
        output = part.run(weights, before, pytree.tree_unflatten(given, structure), draw, Calls())
        last = part is parts[-1]
        ends = [finish(output)] if last else pytree.tree_leaves(output)
        pairs = [
            (end, None if last else grad) for end, grad in zip(ends, [None] if last else back, strict=True) if last or grad is not None
        ]
        wanted = {name: leaf for name, leaf in weights.items() if leaf.requires_grad}
        sources = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        found = torch.autograd.grad([end for end, _ in pairs], [*sources, *wanted.values()], [grad for _, grad in pairs], allow_unused=True)
        of_sources = iter(found)
        back = [next(of_sources) if isinstance(leaf, torch.Tensor) and leaf.requires_grad else None for leaf in leaves]
        for name, grad in _found(wanted, found[len(sources) :]).items():
            grads[name] = grads[name] + grad if name in grads else grad
    return loss, grads


def owners(parts: Sequence[StagePart], delays: Sequence[int]) -> dict[str, list[int]]:
    """The stages of each parameter. Raises ValueError if stages that share one have different delays: two updates would mix."""
    found: dict[str, list[int]] = {}
    for part in parts:
        for name in part.parameters:
            found.setdefault(name, []).append(part.index)
    check_shared(found, delays, "a way with one delay (flush, 2bw, vertical sync)")
    return found


class Update:
    """One step of an optimizer. `total` is the gradient that it will be made with, by name; None: the weight stays as it is."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        masters: dict[str, nn.Parameter],
        parts: Sequence[dict[str, torch.Tensor | None]],
        rate: float | None,
        correctors: Sequence[Corrector],
        opened: Tensors,
    ) -> None:
        """Corrects the gradient.

        Args:
            optimizer: of these parameters.
            masters: by name.
            parts: of each replica, the sum of its micro-batches' gradients by name; without correctors all is one part.
            rate: the learning rate where one is given.
            correctors: of each replica; none: gradients stay as they are.
            opened: the weights that these gradients were computed on, by name.
        """
        if rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = rate
        self._optimizer, self._masters, self._correctors = optimizer, masters, correctors[: len(parts)]
        groups = optimizer.param_groups if correctors else []  # they alone ask for the learning rate
        self._rates = {id(p): float(group["lr"]) for group in groups for p in group["params"]}
        self.total = {name: self._corrected(name, [part[name] for part in parts], opened[name]) for name in masters}

    def _corrected(self, name: str, mine: Sequence[torch.Tensor | None], opened: torch.Tensor) -> torch.Tensor | None:
        if not self._correctors:
            return mine[0]
        now, rate = self._masters[name].detach(), self._rates[id(self._masters[name])]
        made = [
            corrector.corrected(name, grad * len(mine), now, opened, rate)
            for corrector, grad in zip(self._correctors, mine, strict=True)
            if grad is not None
        ]
        return sum(made[1:], made[0]) / len(mine) if made else None

    def scale(self, factor: float) -> None:
        """The gradient times this."""
        self.total = {name: None if grad is None else grad * factor for name, grad in self.total.items()}

    def make(self) -> None:
        """Change the weights, and tell the correctors by how much."""
        before = {name: p.detach().clone() for name, p in self._masters.items()} if self._correctors else {}
        for name, p in self._masters.items():
            p.grad = self.total[name]
        self._optimizer.step()
        for corrector in self._correctors:
            for name, p in self._masters.items():
                corrector.moved(name, before[name], p.detach(), self._rates[id(p)])


def version_of(masters: dict[str, nn.Parameter]) -> Tensors:
    """Copies of all weights."""
    return {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in masters.items()}


def expected(
    now: Tensors, masters: dict[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer | None], delays: Sequence[int]
) -> Tensors:
    """The weights of each stage as they are expected after its delay; those of a stage without delay are of now."""
    names = {id(p): name for name, p in masters.items()}
    ahead = dict(now)
    for optimizer, delay in zip(optimizers, delays, strict=True):
        if optimizer is not None and delay:
            ahead |= {names[id(p)]: tensor.requires_grad_() for p, tensor in of_optimizer(optimizer, delay).items()}
    return ahead


def _found(wanted: Tensors, grads: Sequence[torch.Tensor | None]) -> Tensors:
    return {name: grad for name, grad in zip(wanted, grads, strict=True) if grad is not None}


def momentum_ahead(weights: torch.Tensor, buffer: torch.Tensor, lr: float, momentum: float, delay: int) -> torch.Tensor:
    """The weights to which SGD's momentum leads in `delay` updates: w - lr (γ - γ^(τ+1))/(1-γ) v.

    The sum of τ steps of torch's SGD with zero gradients. FTPipe, `weight_prediction/sgd.py` (Eliad et al., ATC 2021).

    Args:
        weights: any shape and dtype of real numbers.
        buffer: `momentum_buffer` of torch's SGD, of the same shape.
        lr: learning rate.
        momentum: γ, from 0 to below 1.
        delay: τ, 0 or more.

    Raises:
        ValueError: a momentum or a delay outside its range.
    """
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum is {momentum}, must be from 0 to below 1")
    predict._check_delay(delay)
    return weights - lr * (momentum - momentum ** (delay + 1)) / (1 - momentum) * buffer


def adam_ahead(
    weights: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    step: int,
    lrs: Sequence[float],
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> torch.Tensor:
    """The weights to which Adam's first moment leads in len(lrs) updates, the second moment staying as it is.

    Subtracts lr_i β1^i m / (1 - β1^(t+i)) / (sqrt(v / (1 - β2^(t+i))) + eps) for i = 1..τ. FTPipe, `weight_prediction/adam.py`.

    Args:
        weights: any shape and dtype of real numbers.
        exp_avg: m of torch's Adam, of the same shape.
        exp_avg_sq: v of torch's Adam, of the same shape.
        step: t, the updates that were made.
        lrs: the learning rate of each of the updates to come.
        betas: of Adam.
        eps: of Adam.

    Raises:
        ValueError: a step below 0.
    """
    if step < 0:
        raise ValueError(f"step is {step}, must be 0 or more")
    ahead = weights.clone()
    for later, lr in enumerate(lrs, 1):
        denominator = (exp_avg_sq.sqrt() / math.sqrt(1 - betas[1] ** (step + later))).add_(eps)
        ahead.addcdiv_(exp_avg * betas[0] ** later, denominator, value=-lr / (1 - betas[0] ** (step + later)))
    return ahead


def of_optimizer(optimizer: torch.optim.Optimizer, delay: int) -> dict[torch.Tensor, torch.Tensor]:
    """Each parameter of a torch optimizer, and where it is expected in `delay` updates of the present learning rate: new tensors.

    Raises:
        ValueError: an optimizer or an option of it that no formula here knows.
    """
    predict._check_delay(delay)
    if type(optimizer) not in (torch.optim.SGD, torch.optim.Adam):
        raise ValueError(
            f"weights of {type(optimizer).__name__} cannot be predicted; take torch's SGD or Adam, or a way without prediction"
        )
    ahead: dict[torch.Tensor, torch.Tensor] = {}
    for group in optimizer.param_groups:
        if option := next((key for key in predict.UNKNOWN if group.get(key)), None):
            raise ValueError(f"weights of {type(optimizer).__name__} with {option}={group[option]} cannot be predicted; leave {option} out")
        for p in group["params"]:
            ahead[p] = _ahead(p.detach(), optimizer.state[p], group, delay)
    return ahead


def _ahead(weights: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, object], delay: int) -> torch.Tensor:
    lr = float(group["lr"])  # type: ignore[arg-type]
    if "exp_avg" in state:
        lrs = [lr] * delay
        return adam_ahead(weights, state["exp_avg"], state["exp_avg_sq"], int(state["step"]), lrs, group["betas"], group["eps"])  # type: ignore[arg-type]
    if state.get("momentum_buffer") is not None:
        return momentum_ahead(weights, state["momentum_buffer"], lr, float(group["momentum"]), delay)  # type: ignore[arg-type]
    return weights.clone()  # no update was made yet, or there is no momentum: nothing is known of the next
