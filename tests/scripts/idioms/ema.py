"""An exponential average of the weights beside the model, used at the end."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(14)
x = torch.randn(48, 5)
model = nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = ps.attach(model, optimizer)
average = copy.deepcopy(model)
for inputs, targets in ps.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    with torch.no_grad():
        for kept, p in zip(average.parameters(), model.parameters(), strict=True):
            kept.lerp_(p, 0.1)
with torch.no_grad():
    assert not torch.equal(average.weight, model.weight)
    print("loss of the average", nn.functional.mse_loss(average(x), x.sum(1, keepdim=True)).item())
