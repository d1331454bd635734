"""A penalty on the gradient by the input."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(111)
x = torch.randn(48, 6)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model, optimizer = ps.attach(model, optimizer)

for _ in range(2):
    for inputs, targets in ps.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)):
        optimizer.zero_grad()
        inputs.requires_grad_()
        out = model(inputs)
        (slope,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
        (nn.functional.mse_loss(out, targets) + 0.1 * (slope.norm(dim=1) - 1).pow(2).mean()).backward()
        optimizer.step()
