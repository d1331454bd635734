"""Early stopping on a held-out loss that every rank computes alike."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(8)
x = torch.randn(40, 4)
train, held = TensorDataset(x[:32], x[:32].sum(1, keepdim=True)), (x[32:], x[32:].sum(1, keepdim=True))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
model, optimizer = ps.attach(model, optimizer)
best, patience = float("inf"), 2
for _epoch in range(30):
    for inputs, targets in ps.shard(DataLoader(train, batch_size=4, shuffle=True)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(held[0]), held[1]).item()
    if loss < best - 1e-4:
        best, patience = loss, 2
    else:
        patience -= 1
    if not patience:
        break
