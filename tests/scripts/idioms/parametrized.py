"""Weights under a parametrization instead of a change by hand."""

# arguments: weight_norm spectral_norm orthogonal old_weight_norm
import sys

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(104)
MAKE = {
    "weight_norm": parametrizations.weight_norm, "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal, "old_weight_norm": torch.nn.utils.weight_norm,
}  # fmt: skip
x = torch.randn(48, 6)
model = nn.Sequential(MAKE[sys.argv[1]](nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = ps.attach(model, optimizer)

for _ in range(2):
    for inputs, targets in ps.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
