"""Books every push: step s of rank r adds 1 to coordinate (r, s) of every tensor, each in a block of its own."""

import sys
import time

import torch

import psjob as ps

STEPS, PAUSE = int(sys.argv[1]), float(sys.argv[2])


def main() -> None:
    model = torch.nn.Module()
    for name in ("a", "b", "c", "d"):
        model.register_parameter(name, torch.nn.Parameter(torch.zeros(ps.world() * STEPS)))
    # A group each: a block never holds two of them.
    optimizer = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=1.0)
    model, optimizer = ps.attach(model, optimizer)
    for step in range(STEPS):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
            p.grad[ps.rank() * STEPS + step] = -1.0
        optimizer.step()
        time.sleep(PAUSE)


if __name__ == "__main__":
    main()
