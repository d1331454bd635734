"""Sharpness-aware minimisation as a class around another optimizer, stepped with a closure."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(113)


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, **options):
        super().__init__(params, options)
        self.base = base(self.param_groups, **options)

    @torch.no_grad()
    def step(self, closure=None):
        moved = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in moved:
            p.add_(p.grad, alpha=0.05)
        before = [p.grad.clone() for p in moved]
        with torch.enable_grad():
            closure()
        for p, grad in zip(moved, before, strict=True):
            p.sub_(grad, alpha=0.05)
        self.base.step()


x = torch.randn(48, 6)
model = nn.Linear(6, 1)
model, optimizer = ps.attach(model, SAM(model.parameters(), torch.optim.SGD, lr=0.05))
for (inputs,) in ps.shard(DataLoader(TensorDataset(x), batch_size=4)):

    def closure():
        optimizer.zero_grad()
        model(inputs).pow(2).mean().backward()  # noqa: B023

    closure()
    optimizer.step(closure)
