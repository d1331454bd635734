"""Schedulers that are told where they are: a fraction of an epoch, an epoch's number, and a loss on data that all workers have."""

# arguments: fraction number plateau
import sys

import torch
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(122)
x = torch.randn(48, 6)
model = nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = ps.attach(model, optimizer)
loader = ps.shard(DataLoader(TensorDataset(x, x[:, :2]), batch_size=4, shuffle=True))
how = sys.argv[1]
restarts = lrs.CosineAnnealingWarmRestarts(optimizer, T_0=2) if how == "fraction" else None
steps = lrs.StepLR(optimizer, 1, gamma=0.5) if how == "number" else None
plateau = lrs.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0) if how == "plateau" else None
for epoch in range(4):
    for i, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        if restarts is not None:
            restarts.step(epoch + i / len(loader))
    if steps is not None:
        steps.step(epoch)
    if plateau is not None:
        plateau.step(nn.functional.mse_loss(model(x), x[:, :2]).detach())
