"""The learning rate set by hand at each step, without a scheduler."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(20)
x = torch.randn(60, 4)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
model, optimizer = ps.attach(model, optimizer)
loader = ps.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True))
total, step = 2 * len(loader), 0
for _ in range(2):
    for inputs, targets in loader:
        step += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(step / 4, 0.5 * (1 + math.cos(math.pi * step / total)))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
