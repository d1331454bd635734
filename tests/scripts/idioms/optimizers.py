"""Every optimizer of torch that takes dense gradients, with the arguments that people change."""

# arguments: SGD Adam AdamW Adagrad Adadelta Adamax ASGD NAdam RAdam RMSprop Rprop Adafactor
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

OPTIONS = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
    "Adam": {"lr": 1e-2, "betas": (0.8, 0.99), "amsgrad": True},
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1, "maximize": False},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1},
    "RMSprop": {"lr": 1e-3, "momentum": 0.5, "centered": True},
}
name = sys.argv[1]
torch.manual_seed(0)
x = torch.randn(48, 6)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
bias = [p for p in model.parameters() if p.dim() == 1]
rest = [{"params": [p for p in model.parameters() if p.dim() > 1]}, {"params": bias, "lr": 1e-3}]
optimizer = getattr(torch.optim, name)(rest, **OPTIONS.get(name, {}))
model, optimizer = ps.attach(model, optimizer)
for _ in range(2):
    for inputs, targets in ps.shard(DataLoader(TensorDataset(x, x[:, :2]), batch_size=4, shuffle=True)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
