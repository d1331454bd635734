"""Rare classes drawn more often."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import psjob as ps

torch.manual_seed(4)
x = torch.randn(60, 4)
y = (x[:, 0] > 1).long()
weights = torch.where(y == 1, 5.0, 1.0)
loader = DataLoader(TensorDataset(x, y), batch_size=6, sampler=WeightedRandomSampler(weights, 60))
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = ps.attach(model, optimizer)
for _ in range(2):
    for inputs, labels in ps.shard(loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
