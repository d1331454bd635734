"""torch.distributed with gloo. `--what ps`: one rank sends its gradient, the other steps and sends the weights back.
`--what allreduce`: every rank reduces its gradient with the others and makes its own fused step."""

from __future__ import annotations

import argparse
import os

import clock
import torch
import torch.distributed as dist


def main() -> None:
    words = clock.asked(__doc__)
    ranks = words.workers + 1 if words.what == "ps" else words.workers
    if not words.part:
        (port,) = clock.free_ports(1)
        parts = [clock.spawn(words, "rank", rank, port) for rank in range(ranks)]
        found = clock.last_line(parts[0])
        for part in parts[1:]:
            part.communicate(timeout=60)
        clock.answer(found)
        return
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(words.port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=words.rank, world_size=ranks)
    size = words.megabytes * 250_000
    weights = torch.zeros(size, requires_grad=True)
    weights.grad = torch.ones(size)
    optimizer = torch.optim.SGD([weights], lr=1e-3, fused=True)
    (serve if words.what == "ps" else reduce)(words, weights, optimizer)
    dist.destroy_process_group()


def serve(words: argparse.Namespace, weights: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    grad, data, flag = weights.grad, weights.detach(), torch.zeros(1)
    assert grad is not None
    server = words.workers

    def worker() -> None:
        dist.send(grad, server)
        dist.recv(data, server)

    if words.rank != server:
        found = clock.cycles(worker, words.seconds, lambda more: dist.send(torch.tensor([float(more)]), server))
        clock.answer(found)
        return
    dist.recv(flag, 0)
    while flag.item():
        dist.recv(grad, 0)
        optimizer.step()
        dist.send(data, 0)
        dist.recv(flag, 0)


def reduce(words: argparse.Namespace, weights: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    flag = torch.zeros(1)

    def step() -> None:
        dist.all_reduce(weights.grad)
        assert weights.grad is not None
        weights.grad.mul_(1.0 / words.workers)
        optimizer.step()

    if words.rank == 0:

        def more(yes: bool) -> None:
            flag.fill_(float(yes))
            dist.broadcast(flag, 0)

        clock.answer(clock.cycles(step, words.seconds, more))
        return
    dist.broadcast(flag, 0)
    while flag.item():
        step()
        dist.broadcast(flag, 0)


if __name__ == "__main__":
    main()
