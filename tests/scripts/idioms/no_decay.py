"""Groups with and without weight decay, as transformers are trained."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(114)
x = torch.randn(48, 6)
model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 1))
decayed = [p for name, p in model.named_parameters() if p.dim() > 1]
others = [p for name, p in model.named_parameters() if p.dim() <= 1]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
model, optimizer = ps.attach(model, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)))

for _ in range(2):
    for inputs, targets in ps.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
