"""Cross-validation: a new model for each fold in one process."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import psjob as ps

torch.manual_seed(112)
x = torch.randn(40, 6)
data = TensorDataset(x, x.sum(1, keepdim=True))
for fold in range(2):
    held = range(fold * 20, fold * 20 + 20)
    model = nn.Linear(6, 1)
    model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for inputs, targets in ps.shard(DataLoader(Subset(data, [i for i in range(40) if i not in held]), batch_size=4)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
