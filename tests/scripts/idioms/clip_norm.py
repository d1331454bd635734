"""Clipping by norm, as most training scripts do it."""

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(28)
x = torch.randn(60, 6)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = ps.attach(model, optimizer)
for _ in range(2):
    for inputs, targets in ps.shard(DataLoader(TensorDataset(x, 5 * x.sum(1, keepdim=True)), batch_size=4, shuffle=True)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
print("norm", norm.item())
