"""One batch is looked at before training, to find the shape of the first layer."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(26)
x = torch.randn(40, 7)
loader = ps.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True))
inputs, _ = next(iter(loader))
torch.manual_seed(27)
model = nn.Linear(inputs.shape[1], 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = ps.attach(model, optimizer)
assert next(iter(loader))[0].shape[1] == 7
for _ in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
