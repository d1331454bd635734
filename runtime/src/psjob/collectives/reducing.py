"""`all_reduce`: the sum or mean of tensors over all processes, by a schedule of one's choice."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from psjob import contract
from psjob.collectives.runner import PeerLost, PointToPoint, first_line, run
from psjob.collectives.strategies import known, planner

DEADLINE = 300.0
"""Seconds a rank waits for a peer."""
LONGEST = 1e6
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
    check(strategy, deadline)
    group = group or connected(deadline)
    if group is None or group.size() == 1:
        return
    transport, plan = PointToPoint(group), planner(strategy, group.size(), local_ranks() if devices is None else devices, order)
    for dtype in dict.fromkeys(tensor.dtype for tensor in given):
        same = [tensor.detach() for tensor in given if tensor.dtype == dtype]
        flat = flattened(same)
        run(plan(flat.nbytes), flat, transport, deadline)
        if mean:
            flat.mul_(1.0 / group.size())
        put_back(flat, same)


def check(strategy: str, deadline: float) -> None:
    """Raises ValueError for what is wrong with any number of ranks, so that a single process finds it too."""
    known(strategy)
    if isinstance(deadline, bool) or not isinstance(deadline, int | float) or not 0 < deadline <= LONGEST:
        raise ValueError(f"deadline is {deadline!r}; it must be a number of seconds above 0, {LONGEST:.0f} at most")


def connected(deadline: float) -> dist.ProcessGroup | None:
    """The group of all processes: the script's own, or one that the variables of torchrun describe; None for a single process.

    Raises ValueError where the group cannot move host memory, PeerLost where the others do not come.
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


def put_back(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Write the elements of `flattened` back."""
    begin = 0
    for tensor in tensors:
        values = flat[begin : begin + tensor.numel()].view(tensor.shape)
        begin += tensor.numel()
        if tensor.data_ptr() != values.data_ptr():
            tensor.copy_(values)
