"""A loop without ps.shard: each rank takes its own samples of a list."""

import torch
from torch import nn

import psjob as ps

torch.manual_seed(22)
x = torch.randn(32, 4)
mine = list(range(ps.rank(), 32, ps.world()))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = ps.attach(model, optimizer)
for _ in range(3):
    for begin in range(0, len(mine), 4):
        inputs = x[mine[begin : begin + 4]]
        optimizer.zero_grad(set_to_none=False)
        nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
        optimizer.step()
