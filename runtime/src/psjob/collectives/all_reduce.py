"""`all_reduce`: the sum or mean of tensors over all processes, by a schedule of one's choice.

`mirror` uses it: a replica of the model in every process, gradients averaged inside each step, no parameter server (MirroredStrategy).

`run_schedule` carries out one rank's part of a schedule on a flat tensor.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from psjob import contract
from psjob.collectives.schedule import (
    ChunkTransfer,
    Planner,
    Schedule,
    broadcast_from_first,
    chunks_for,
    known_strategy,
    part_of_rank,
    planner,
)
from psjob.process.errors import refuse

DEADLINE = 300.0
"""Seconds a rank waits for a peer."""
LONGEST = 1e6
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


M = TypeVar("M", bound=torch.nn.Module)
T = TypeVar("T", bound=torch.optim.Optimizer)
R = TypeVar("R")


def all_reduce(
    tensors: torch.Tensor | Sequence[torch.Tensor],
    strategy: str = "ring",
    *,
    mean: bool = False,
    devices: int | None = None,
    order: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    deadline: float = DEADLINE,
) -> None:
    """Replace `tensors` in place by their sums (or means) over all ranks of `group`; all ranks have the same bits then.

    A single process keeps its tensors as they are.

    Args:
        tensors: one or several, of the same shapes and dtypes in the same order on every rank. They may lie on a GPU: sums are made in host
            memory.
        strategy: one of docs/collectives.md, such as "ring", "tree", "double-tree" or "mirrored".
        mean: divide by the number of ranks; only for floating-point tensors.
        devices: ranks of a node, for the hierarchical strategies; None takes torchrun's LOCAL_WORLD_SIZE.
        order: all ranks, in the order that a plan gives them; the first is the strategy's rank 0.
        group: a group of torch.distributed; None takes all processes that torchrun or the script has started.
        deadline: seconds that a peer may take for an answer.

    Raises:
        PeerLost: a peer has gone, or did not answer within `deadline`.
        ValueError: what cannot be summed, or a strategy that there is not.

    Example:
        >>> import torch, psjob as ps
        >>> gradient = torch.ones(3)
        >>> ps.all_reduce(gradient, "double-tree", mean=True)    # each process that torchrun has started
        >>> gradient.tolist()
        [1.0, 1.0, 1.0]
    """
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    for other in (t for t in given if not isinstance(t, torch.Tensor)):
        raise ValueError(f"all_reduce of a {type(other).__name__}; give a tensor or a list of tensors")
    # Before the ranks meet: a rank that ended while they do would leave the others with a broken connection for an answer.
    for strange in (t for t in given if t.layout is not torch.strided):
        raise ValueError(f"all_reduce of a {strange.layout} tensor of shape {tuple(strange.shape)}; only dense tensors are summed")
    for whole in (t for t in given if mean and not t.dtype.is_floating_point):
        raise ValueError(f"the mean of {whole.dtype} tensors is not one; ask for the sum")
    check_strategy(strategy, deadline)
    group = group or connected(deadline)
    if group is None or group.size() == 1:
        return
    transport, plan = PointToPoint(group), planner(strategy, group.size(), local_ranks() if devices is None else devices, order)
    for dtype in dict.fromkeys(tensor.dtype for tensor in given):
        same = [tensor.detach() for tensor in given if tensor.dtype == dtype]
        flat = flattened(same)
        run_schedule(plan(flat.nbytes), flat, transport, deadline)
        if mean:
            flat.mul_(1.0 / group.size())
        unflatten(flat, same)


def check_strategy(strategy: str, deadline: float) -> None:
    """Raises ValueError for what is wrong with any number of ranks, so that a single process finds it too."""
    known_strategy(strategy)
    if isinstance(deadline, bool) or not isinstance(deadline, int | float) or not 0 < deadline <= LONGEST:
        raise ValueError(f"deadline is {deadline!r}; it must be a number of seconds above 0, {LONGEST:.0f} at most")


def connected(deadline: float) -> dist.ProcessGroup | None:
    """The group of all processes: the script's own, or one that the variables of torchrun describe; None for a single process.

    Raises ValueError if the group cannot move host memory, PeerLost where the others do not come.
    """
    if not dist.is_initialized():
        if contract.ENV_ROLE in os.environ:
            raise ValueError("workers of a job of psjob meet at its shards: call psjob.attach, or start the script with torchrun")
        missing = [name for name in LAUNCHED if name not in os.environ]
        if len(missing) == len(LAUNCHED):
            return None
        if missing:
            raise ValueError(
                f"{', '.join(missing)} not set; start the script with torchrun, or call torch.distributed.init_process_group before"
            )
        try:
            dist.init_process_group("gloo", timeout=timedelta(seconds=deadline))
        except RuntimeError as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            why = first_line(error)
            raise PeerLost(f"rank {os.environ['RANK']} did not meet the others at {where} within {deadline:g} s: {why}") from None
    group = dist.group.WORLD
    assert group is not None
    if "cpu:" not in dist.get_backend_config(group):
        raise ValueError('the process group moves no host memory; use init_process_group("cpu:gloo,cuda:nccl")')
    return group


def local_ranks() -> int:
    """How many ranks torchrun has started on this node; 1 without it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def flattened(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of tensors of one dtype, one after the other, in host memory: a single tensor's own where it lies so, else a copy."""
    if len(tensors) == 1 and tensors[0].is_contiguous() and tensors[0].device.type == "cpu":
        return tensors[0].view(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Write the elements of `flattened` back."""
    begin = 0
    for tensor in tensors:
        values = flat[begin : begin + tensor.numel()].view(tensor.shape)
        begin += tensor.numel()
        if tensor.data_ptr() != values.data_ptr():
            tensor.copy_(values)


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
        check_strategy(strategy, deadline)
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
        optimizer.register_step_pre_hook(lambda _optimizer, args, kwargs: refuse_in_hook(lambda: replica.average(args, kwargs)))

    try:
        begin()
    except ValueError as refused:
        refuse(str(refused))
    return model, optimizer


def refuse_in_hook(call: Callable[[], R]) -> R:
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
        """Take rank 0's parameters and buffers. Raises ValueError if this rank's differ in name, shape, dtype or order."""
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
            unflatten(flat, same)

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
        run_schedule(self._plan(flat.nbytes), flat, self._transport, self._deadline)
        flat.mul_(1.0 / self._ranks)
        unflatten(flat, [*grads, present])
        for p, grad, ranks in zip(parameters, grads, present.tolist(), strict=True):
            p.grad = grad if ranks else None

    def _spread(self, flat: torch.Tensor) -> None:
        run_schedule(broadcast_from_first(self._ranks, chunks_for(flat.nbytes)), flat, self._transport, self._deadline)


class PeerLost(RuntimeError):
    """A peer has gone or has not answered within the deadline. The tensors hold parts of sums; the process group is of no further use.

    Example:
        >>> import torch, psjob as ps
        >>> try:
        ...     ps.all_reduce(torch.ones(3), deadline=60)
        ... except ps.PeerLost as lost:
        ...     raise SystemExit(f"start all processes again: {lost}")
    """

    __module__ = "psjob"


class Pending(Protocol):
    """A transfer under way. `wait` raises RuntimeError if it fails or is not through in time."""

    def wait(self, timeout: timedelta) -> object: ...


class Transport(Protocol):
    """Moves contiguous tensors of host memory between ranks. Two transfers of one link in one step have different tags."""

    @property
    def rank(self) -> int: ...
    def send(self, data: torch.Tensor, peer: int, tag: int) -> Pending: ...
    def receive(self, into: torch.Tensor, peer: int, tag: int) -> Pending: ...


class PointToPoint:
    """The transport of torch.distributed: isend and irecv of a group whose backend for host memory is gloo."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = group.rank()
        self._group, self._global = group, dist.get_process_group_ranks(group)

    def send(self, data: torch.Tensor, peer: int, tag: int) -> Pending:
        return self._found(dist.isend(data, self._global[peer], self._group, tag))

    def receive(self, into: torch.Tensor, peer: int, tag: int) -> Pending:
        return self._found(dist.irecv(into, self._global[peer], self._group, tag))

    def _found(self, work: dist.Work | None) -> Pending:
        if work is None:
            raise RuntimeError("this process is not in the group")
        return work


def run_schedule(schedule: Schedule, flat: torch.Tensor, transport: Transport, seconds: float) -> None:
    """Carry out this rank's moves on `flat` (1-D, contiguous, host memory), in place. Every rank of the schedule calls it.

    Raises PeerLost if a transfer fails or takes longer than `seconds`.
    """
    rank, deadline = transport.rank, timedelta(seconds=seconds)
    spans = schedule.spans(flat.numel())
    scratch = ReceiveBuffers(flat)
    for moves in part_of_rank(schedule, rank):
        under_way: list[tuple[ChunkTransfer, torch.Tensor, Pending]] = []
        scratch.free()
        for move in moves:
            chunk = flat[spans[move.chunk]]
            if not chunk.numel():
                continue
            try:
                if move.sender == rank:
                    under_way.append((move, chunk, transport.send(chunk, move.receiver, move.chunk)))
                else:
                    into = scratch.take(chunk.numel()) if move.add else chunk
                    under_way.append((move, into, transport.receive(into, move.sender, move.chunk)))
            except RuntimeError as error:
                raise _lost(rank, move, seconds, error) from None
        for move, data, pending in under_way:
            try:
                pending.wait(deadline)
            except RuntimeError as error:
                raise _lost(rank, move, seconds, error) from None
            if move.add and move.receiver == rank:
                flat[spans[move.chunk]].add_(data)


class ReceiveBuffers:
    """Room for what arrives to be added."""

    def __init__(self, like: torch.Tensor) -> None:
        self._like, self._made, self._next = like, list[torch.Tensor](), 0

    def take(self, numel: int) -> torch.Tensor:
        """A tensor of so many elements, not yet taken since the last `free`."""
        if self._next == len(self._made):
            self._made.append(self._like.new_empty(numel))
        elif self._made[self._next].numel() < numel:
            self._made[self._next] = self._like.new_empty(numel)
        self._next += 1
        return self._made[self._next - 1][:numel]

    def free(self) -> None:
        """All may be taken again."""
        self._next = 0


def _lost(rank: int, move: ChunkTransfer, seconds: float, error: RuntimeError) -> PeerLost:
    peer, what = (move.receiver, "took") if move.sender == rank else (move.sender, "sent")
    return PeerLost(
        f"rank {rank}: rank {peer} {what} nothing (limit {seconds:g} s; {first_line(error)}); end all ranks and start them again"
    )


def first_line(error: Exception) -> str:
    """What an error of torch.distributed says first."""
    return (str(error).strip().splitlines() or ["no reason given"])[0][:200]
