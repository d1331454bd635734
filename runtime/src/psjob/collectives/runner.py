"""One rank's part of a schedule, carried out on a flat tensor."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from psjob.collectives.schedule import Move, Schedule, part


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
    """A transfer under way. `wait` raises RuntimeError where it fails or is not through in time."""

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


def run(schedule: Schedule, flat: torch.Tensor, transport: Transport, seconds: float) -> None:
    """Carry out this rank's moves on `flat` (1-D, contiguous, host memory), in place. Every rank of the schedule calls it.

    Raises PeerLost where a transfer fails or takes longer than `seconds`.
    """
    rank, deadline = transport.rank, timedelta(seconds=seconds)
    spans = schedule.spans(flat.numel())
    scratch = ReceiveBuffers(flat)
    for moves in part(schedule, rank):
        under_way: list[tuple[Move, torch.Tensor, Pending]] = []
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


def _lost(rank: int, move: Move, seconds: float, error: RuntimeError) -> PeerLost:
    peer, what = (move.receiver, "took") if move.sender == rank else (move.sender, "sent")
    return PeerLost(
        f"rank {rank}: rank {peer} {what} nothing (limit {seconds:g} s; {first_line(error)}); end all ranks and start them again"
    )


def first_line(error: Exception) -> str:
    """What an error of torch.distributed says first."""
    return (str(error).strip().splitlines() or ["no reason given"])[0][:200]
