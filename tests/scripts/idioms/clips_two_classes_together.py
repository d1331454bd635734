"""Muon for matrices and AdamW for all else, with one norm over the whole model."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(204)
x = torch.randn(42, 4)
model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))
muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02, ns_steps=3)
adamw = torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], lr=3e-3)
model, (muon, adamw) = ps.attach(model, (muon, adamw))
loader = ps.shard(DataLoader(TensorDataset(x, 4 * x.sum(1, keepdim=True)), batch_size=4, shuffle=True))
for _ in range(2):
    for inputs, targets in loader:
        muon.zero_grad()
        adamw.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        muon.step()
        adamw.step()
