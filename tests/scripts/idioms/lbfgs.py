"""LBFGS, whose step evaluates the loss several times."""

import torch
from torch import nn

import psjob as ps

torch.manual_seed(16)
x = torch.randn(40, 3)[ps.rank() :: ps.world()]
model = nn.Linear(3, 1)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
model, optimizer = ps.attach(model, optimizer)


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    loss.backward()
    return loss


for _ in range(3):
    optimizer.step(closure)
