"""A layer with a complex parameter."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(115)


class Wave(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 2, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight).abs()


x = torch.randn(48, 6)
model = Wave()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = ps.attach(model, optimizer)
for inputs, _ in ps.shard(DataLoader(TensorDataset(x, x), batch_size=4, shuffle=True)):
    optimizer.zero_grad()
    (model(inputs) - 1).pow(2).mean().backward()
    optimizer.step()
