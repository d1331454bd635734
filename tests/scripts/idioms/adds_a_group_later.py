"""Fine-tuning: the head alone in the first epoch, the backbone in a parameter group of its own from the second on."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

# arguments: SGD Adam RMSprop
torch.manual_seed(26)
x = torch.randn(48, 4)
backbone, head = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 1)
model = nn.Sequential(backbone, head)
backbone.requires_grad_(False)
optimizer = getattr(torch.optim, sys.argv[1])(head.parameters(), lr=1e-2)
model, optimizer = ps.attach(model, optimizer, later=[backbone])
loader = ps.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True))
for epoch in range(3):
    if epoch == 1:
        backbone.requires_grad_(True)
        optimizer.add_param_group({"params": backbone.parameters(), "lr": 1e-3})
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
