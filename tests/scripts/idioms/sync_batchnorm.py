"""Layers that torch's converter has made SyncBatchNorm."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(207)
x = torch.randn(48, 4)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))
for inputs, targets in ps.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
