"""An average of the weights is swapped in for an evaluation and out again."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(115)
x = torch.randn(48, 6)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = ps.attach(model, optimizer)
average = copy.deepcopy(model)
for _ in range(2):
    for inputs, targets in ps.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        for kept, p in zip(average.parameters(), model.parameters(), strict=True):
            kept.data.mul_(0.9).add_(p.data, alpha=0.1)
    for kept, p in zip(average.parameters(), model.parameters(), strict=True):
        p.data, kept.data = kept.data, p.data
    with torch.no_grad():
        print("loss of the average", nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).item())
    for kept, p in zip(average.parameters(), model.parameters(), strict=True):
        p.data, kept.data = kept.data, p.data
