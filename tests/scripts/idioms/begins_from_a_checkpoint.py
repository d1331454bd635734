"""Weights that were trained before are loaded before attach; the head is new."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(19)
pretrained = {"0.weight": torch.full((6, 4), 0.1), "0.bias": torch.zeros(6)}
model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
missing, unexpected = model.load_state_dict(pretrained, strict=False)
assert not unexpected and len(missing) == 2
optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 1e-4}, {"params": model[2].parameters(), "lr": 1e-2}])
model, optimizer = ps.attach(model, optimizer)
x = torch.randn(40, 4)
for inputs, targets in ps.shard(DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=4, shuffle=True)):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
