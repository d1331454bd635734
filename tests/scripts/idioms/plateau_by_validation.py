"""ReduceLROnPlateau by a validation loss that all workers compute, and the best weights kept."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(118)
x = torch.randn(48, 6)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = ps.attach(model, optimizer)

scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
best, kept = float("inf"), None
for _ in range(4):
    for inputs, targets in ps.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=6, shuffle=True)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).item()
    scheduler.step(loss)
    if loss < best:
        best, kept = loss, copy.deepcopy(model.state_dict())
assert kept is not None and optimizer.param_groups[0]["lr"] < 0.05
