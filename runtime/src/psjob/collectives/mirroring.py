"""`mirror`: a replica of the model in every process, gradients averaged inside each step, no parameter server (MirroredStrategy)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from psjob.collectives.reducing import DEADLINE, check, connected, flattened, local_ranks, put_back
from psjob.collectives.runner import PointToPoint, Transport, run
from psjob.collectives.schedule import broadcast_from_first
from psjob.collectives.strategies import Planner, chunks_for, planner
from psjob.process.errors import refuse

M = TypeVar("M", bound=torch.nn.Module)
T = TypeVar("T", bound=torch.optim.Optimizer)
R = TypeVar("R")


def mirror(
    model: M,
    optimizer: T,
    strategy: str = "mirrored",
    *,
    devices: int | None = None,
    order: Sequence[int] | None = None,
    deadline: float = DEADLINE,
) -> tuple[M, T]:
    """Make this process one of the replicas that torchrun (or the script) has started; a single process is left unchanged.

    All take rank 0's parameters and buffers. From then on `optimizer.step()` first replaces each gradient by its mean over all ranks. So
    every replica makes the same step. With the strategy mirrored the mean is added in rank order, as a sync job adds it. Every rank must
    make the same number of steps. Buffers are each replica's own afterwards.

    Args:
        model: what is trained.
        optimizer: over parameters of `model`.
        strategy: as of `all_reduce`.
        devices: as of `all_reduce`.
        order: as of `all_reduce`.
        deadline: as of `all_reduce`.

    Returns:
        The model and the optimizer that were given.

    Raises:
        Refused: where the script asks for what cannot be done. In a job this process ends with status 77 and the sentence.
        PeerLost: where a peer is lost, in `mirror` and in each step of the optimizer.

    Example:
        >>> import torch, psjob as ps
        >>> model = torch.nn.Linear(2, 1)
        >>> model, optimizer = ps.mirror(model, torch.optim.SGD(model.parameters(), lr=0.1), "ring")
    """
    __tracebackhide__ = True

    def begin() -> None:
        check(strategy, deadline)
        # Before the ranks meet: a rank that ended while they do would leave the others with a broken connection for an answer.
        known = {id(p) for p in model.parameters()}
        if strangers := [p for given in optimizer.param_groups for p in given["params"] if id(p) not in known]:
            raise ValueError(f"the optimizer has a parameter of shape {tuple(strangers[0].shape)} that is not in the model given to mirror")
        group = connected(deadline)
        if group is None or group.size() == 1:
            return
        plan = planner(strategy, group.size(), local_ranks() if devices is None else devices, order)
        replica = Replica(PointToPoint(group), group.size(), model, optimizer, plan, deadline)
        replica.begin()
        optimizer.register_step_pre_hook(lambda _optimizer, args, kwargs: told(lambda: replica.average(args, kwargs)))

    try:
        begin()
    except ValueError as refused:
        refuse(str(refused))
    return model, optimizer


def told(call: Callable[[], R]) -> R:
    """Run a call of the optimizer's hook; where it is refused, say so as the process has to."""
    try:
        return call()
    except ValueError as refused:
        refuse(str(refused))


class Replica:
    """One process of a mirrored model."""

    def __init__(
        self, transport: Transport, ranks: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, plan: Planner, deadline: float
    ) -> None:
        self._transport, self._ranks, self._plan, self._deadline = transport, ranks, plan, deadline
        self._held = dict(model.named_parameters()) | dict(model.named_buffers())
        self._parameters = [p for given in optimizer.param_groups for p in given["params"]]

    def begin(self) -> None:
        """Take rank 0's parameters and buffers. Raises ValueError where this rank's differ in name, shape, dtype or order."""
        names = {id(tensor): name for name, tensor in self._held.items()}
        shapes = [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in self._held.items()]
        table = repr((shapes, [names[id(p)] for p in self._parameters]))
        mine = torch.frombuffer(bytearray(hashlib.sha256(table.encode()).digest()), dtype=torch.uint8)
        first = mine.clone()
        self._spread(first)
        if not torch.equal(first, mine):
            raise ValueError(
                f"rank {self._transport.rank}'s model or optimizer is not rank 0's: "
                "names, shapes, dtypes and order of parameters must be the same"
            )
        for dtype in dict.fromkeys(tensor.dtype for tensor in self._held.values()):
            same = [tensor.detach() for tensor in self._held.values() if tensor.dtype == dtype]
            flat = flattened(same)
            self._spread(flat)
            put_back(flat, same)

    def average(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Replace each gradient by its mean over all ranks. None on every rank stays None; on some it counts as zeros."""
        if any(callable(given) for given in (*args[1:], *kwargs.values())):
            raise ValueError("step(closure) of a mirrored optimizer: call backward before step, without a closure")
        with torch.no_grad():
            for dtype in dict.fromkeys(p.dtype for p in self._parameters):
                self._average([p for p in self._parameters if p.dtype == dtype and p.requires_grad])

    def _average(self, parameters: list[torch.Tensor]) -> None:
        for sparse in (p for p in parameters if p.grad is not None and p.grad.layout is not torch.strided):
            raise ValueError(f"a parameter of shape {tuple(sparse.shape)} has a sparse gradient; use dense gradients (sparse=False)")
        if not parameters:
            return
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        present = torch.tensor([p.grad is not None for p in parameters], device="cpu").to(grads[0])
        flat = flattened([*grads, present])
        run(self._plan(flat.nbytes), flat, self._transport, self._deadline)
        flat.mul_(1.0 / self._ranks)
        put_back(flat, [*grads, present])
        for p, grad, ranks in zip(parameters, grads, present.tolist(), strict=True):
            p.grad = grad if ranks else None

    def _spread(self, flat: torch.Tensor) -> None:
        run(broadcast_from_first(self._ranks, chunks_for(flat.nbytes)), flat, self._transport, self._deadline)
