"""Stochastic weight averaging with torch's AveragedModel, its scheduler and update_bn."""

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(15)
x = torch.randn(48, 5)
model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = ps.attach(model, optimizer)
loader = ps.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=6, shuffle=True))
averaged, scheduler = AveragedModel(model), SWALR(optimizer, swa_lr=0.05, anneal_epochs=1)
for _ in range(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    averaged.update_parameters(model)
    scheduler.step()
update_bn(loader, averaged)
print("averaged", averaged(x).mean().item())
