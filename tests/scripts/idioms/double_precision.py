"""Parameters in float64, of odd shapes: a number, an empty tensor, four dimensions, a transposed one."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 3))
        self.cube, self.turned = nn.Parameter(torch.randn(2, 1, 3, 1)), nn.Parameter(torch.randn(4, 3).t())

    def forward(self, x):
        return self.scale * (x @ self.turned).sum(1) * self.cube.sum() + self.empty.sum()


torch.manual_seed(17)
model = Odd().double()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model, optimizer = ps.attach(model, optimizer)
x = torch.randn(40, 3, dtype=torch.float64)
for _ in range(2):
    for inputs, targets in ps.shard(DataLoader(TensorDataset(x, x.sum(1)), batch_size=4, shuffle=True)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
