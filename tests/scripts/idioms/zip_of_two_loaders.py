"""Labelled and unlabelled batches side by side."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(105)
x = torch.randn(48, 6)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = ps.attach(model, optimizer)

labelled = ps.shard(DataLoader(TensorDataset(x[:24], x[:24].sum(1, keepdim=True)), batch_size=2, shuffle=True))
unlabelled = ps.shard(DataLoader(TensorDataset(x), batch_size=4, shuffle=True))
for _ in range(2):
    for (inputs, targets), (more,) in zip(labelled, unlabelled, strict=True):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets) + 0.1 * (model(more) - model(more * 1.01)).pow(2).mean()
        loss.backward()
        optimizer.step()
