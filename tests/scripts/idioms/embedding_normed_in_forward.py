"""Rows of an embedding are brought to a norm in the forward pass, and the weights are left as they are."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(106)


class Normed(nn.Embedding):
    def forward(self, ids):
        rows = super().forward(ids)
        return rows / rows.norm(dim=-1, keepdim=True).clamp(min=1.0)


ids = torch.randint(0, 20, (48, 3))
model = nn.Sequential(Normed(20, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer = ps.attach(model, optimizer)
for (inputs,) in ps.shard(DataLoader(TensorDataset(ids), batch_size=4, shuffle=True)):
    optimizer.zero_grad()
    model(inputs).pow(2).mean().backward()
    optimizer.step()
