"""Training by steps, with an iterator that is made anew where it ends."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(103)
x = torch.randn(48, 6)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = ps.attach(model, optimizer)
loader = ps.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True))
batches, step = iter(loader), 0
while step < 15:
    try:
        inputs, targets = next(batches)
    except StopIteration:
        batches = iter(loader)
        inputs, targets = next(batches)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    step += 1
