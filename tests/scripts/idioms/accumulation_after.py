"""Gradient accumulation; 25 batches on two workers do not come out even."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(2)
x = torch.randn(50, 6)
model = nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = ps.attach(model, optimizer)
loader = ps.shard(DataLoader(TensorDataset(x, x[:, :2] * 2), batch_size=2, shuffle=True))
for _ in range(2):
    optimizer.zero_grad()
    for i, (inputs, targets) in enumerate(loader):
        loss = nn.functional.mse_loss(model(inputs), targets) / 4
        loss.backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    if (i + 1) % 4:
        optimizer.step()
        optimizer.zero_grad()
