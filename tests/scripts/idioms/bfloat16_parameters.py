"""A model whose parameters are bfloat16, as large ones are kept."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(123)
x = torch.randn(48, 6).bfloat16()
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).bfloat16()
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
for _ in range(2):
    for inputs, targets in ps.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
