"""An embedding that brings its rows to a norm while it looks them up."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(105)
ids = torch.randint(0, 20, (48, 3))
model = nn.Sequential(nn.Embedding(20, 4, max_norm=1.0), nn.Flatten(), nn.Linear(12, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer = ps.attach(model, optimizer)
for (inputs,) in ps.shard(DataLoader(TensorDataset(ids), batch_size=4, shuffle=True)):
    optimizer.zero_grad()
    model(inputs).pow(2).mean().backward()
    optimizer.step()
