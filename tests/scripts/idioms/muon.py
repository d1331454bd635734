"""Muon, torch's optimizer of matrices."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(121)
x = torch.randn(48, 6)
model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 2, bias=False))
model, optimizer = ps.attach(model, torch.optim.Muon(model.parameters(), lr=0.02, weight_decay=0.1, ns_steps=3))
for _ in range(2):
    for inputs, targets in ps.shard(DataLoader(TensorDataset(x, x[:, :2]), batch_size=4, shuffle=True)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
