"""Matrices by one optimizer and all else by another, as with Muon and AdamW; each clips its own."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(201)
x = torch.randn(48, 4)
model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))
matrices = [p for p in model.parameters() if p.ndim == 2]
others = [p for p in model.parameters() if p.ndim < 2]
optimizers = (torch.optim.SGD(matrices, lr=0.05, momentum=0.9, nesterov=True), torch.optim.AdamW(others, lr=3e-3))
model, optimizers = ps.attach(model, optimizers)
for _ in range(2):
    for inputs, targets in ps.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)):
        nn.functional.mse_loss(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(matrices, 0.5)
        nn.utils.clip_grad_norm_(others, 0.1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
