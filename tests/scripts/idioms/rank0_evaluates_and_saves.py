"""Evaluation and saving on rank 0 alone, each epoch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(18)
x = torch.randn(50, 4)
train, test = TensorDataset(x[:40], x[:40].sum(1, keepdim=True)), DataLoader(TensorDataset(x[40:], x[40:].sum(1, keepdim=True)))
model = nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
model, optimizer = ps.attach(model, optimizer)
for epoch in range(3):
    model.train()
    for inputs, targets in ps.shard(DataLoader(train, batch_size=4, shuffle=True)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    if ps.is_first():
        model.eval()
        with torch.no_grad():
            loss = sum(nn.functional.mse_loss(model(inputs), targets).item() for inputs, targets in test) / len(test)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, f"epoch{epoch}.pt")
        print(f"epoch {epoch} loss {loss:.3f}")
