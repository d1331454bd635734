"""torch.distributed with gloo. `--what ps`: one rank sends its gradient, the other makes one fused step and sends the weights back, whole
(a tensor at a time, with receives posted ahead, was slower). `--what allreduce`: every rank reduces its gradient with the others and
makes its own fused step; `--device cuda`: the gradient lies on the first GPU."""

from __future__ import annotations

import argparse
import os

import clock
import torch
import torch.distributed as dist
from on_device import device_of, wait_for


def main() -> None:
    words = clock.asked(__doc__)
    device_of(words)
    ranks = words.workers if words.what == "allreduce" else words.workers + 1
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
    if words.what == "allreduce":
        reduce(words)
    elif words.rank == words.workers:
        serve(words)
    else:
        work(words)
    dist.destroy_process_group()


def work(words: argparse.Namespace) -> None:
    grad, weight, server = torch.ones(words.megabytes * 250_000), torch.zeros(words.megabytes * 250_000), words.workers

    def cycle() -> None:
        dist.send(grad, server)
        dist.recv(weight, server)

    found = clock.cycles(cycle, words.seconds, lambda more: dist.send(torch.tensor([float(more)]), server))
    clock.check((float(weight[at]) for at in (0, -1)), clock.moved(found))
    clock.answer(found)


def serve(words: argparse.Namespace) -> None:
    grad, weight, flag = torch.empty(words.megabytes * 250_000), torch.zeros(words.megabytes * 250_000), torch.zeros(1)
    optimizer, data = sgd(weight, grad), weight.detach()
    dist.recv(flag, 0)
    while flag.item():
        dist.recv(grad, 0)
        optimizer.step()
        dist.send(data, 0)
        dist.recv(flag, 0)


def sgd(weight: torch.Tensor, grad: torch.Tensor) -> torch.optim.Optimizer:
    weight.requires_grad_()
    weight.grad = grad
    return torch.optim.SGD([weight], lr=clock.RATE, fused=True)


def reduce(words: argparse.Namespace) -> None:
    device, elements = device_of(words), words.megabytes * 250_000
    grad, weight = torch.ones(elements, device=device), torch.zeros(elements, device=device)
    optimizer = sgd(weight, grad)
    flag = torch.zeros(1)

    def step() -> None:
        dist.all_reduce(grad)
        grad.mul_(1.0 / words.workers)
        optimizer.step()
        wait_for(device)

    def more(yes: bool) -> None:
        flag.fill_(float(yes))
        dist.broadcast(flag, 0)

    if words.rank == 0:
        found = clock.cycles(step, words.seconds, more)
        clock.check((float(weight[at]) for at in (0, -1)), clock.moved(found))
        clock.answer(found)
        return
    dist.broadcast(flag, 0)
    while flag.item():
        step()
        dist.broadcast(flag, 0)


if __name__ == "__main__":
    main()
