"""Two losses with a backward pass each before one step."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(109)
x = torch.randn(48, 6)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = ps.attach(model, optimizer)

for inputs, targets in ps.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)):
    optimizer.zero_grad()
    out = model(inputs)
    nn.functional.mse_loss(out, targets).backward(retain_graph=True)
    (0.1 * out.abs().mean()).backward()
    optimizer.step()
