"""Every scheduler of torch, by step or by epoch."""

# arguments: LambdaLR MultiplicativeLR StepLR MultiStepLR ConstantLR LinearLR ExponentialLR PolynomialLR CosineAnnealingLR
# arguments: ChainedScheduler SequentialLR ReduceLROnPlateau CyclicLR OneCycleLR CosineAnnealingWarmRestarts
import sys

import torch
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(0)
x = torch.randn(48, 6)
model = nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = ps.attach(model, optimizer)
loader = ps.shard(DataLoader(TensorDataset(x, x[:, :2]), batch_size=4, shuffle=True))
scheduler = {
    "LambdaLR": lambda: lrs.LambdaLR(optimizer, lambda step: 0.9**step),
    "MultiplicativeLR": lambda: lrs.MultiplicativeLR(optimizer, lambda step: 0.95),
    "StepLR": lambda: lrs.StepLR(optimizer, 4), "MultiStepLR": lambda: lrs.MultiStepLR(optimizer, [3, 7]),
    "ConstantLR": lambda: lrs.ConstantLR(optimizer), "LinearLR": lambda: lrs.LinearLR(optimizer),
    "ExponentialLR": lambda: lrs.ExponentialLR(optimizer, 0.9), "PolynomialLR": lambda: lrs.PolynomialLR(optimizer, 10),
    "CosineAnnealingLR": lambda: lrs.CosineAnnealingLR(optimizer, len(loader) * 2),
    "ChainedScheduler": lambda: lrs.ChainedScheduler([lrs.ConstantLR(optimizer), lrs.ExponentialLR(optimizer, 0.9)]),
    "SequentialLR": lambda: lrs.SequentialLR(optimizer, [lrs.LinearLR(optimizer), lrs.ExponentialLR(optimizer, 0.9)], [4]),
    "ReduceLROnPlateau": lambda: lrs.ReduceLROnPlateau(optimizer, patience=0), "CyclicLR": lambda: lrs.CyclicLR(optimizer, 0.01, 0.2, 3),
    "OneCycleLR": lambda: lrs.OneCycleLR(optimizer, 0.2, total_steps=len(loader) * 2),
    "CosineAnnealingWarmRestarts": lambda: lrs.CosineAnnealingWarmRestarts(optimizer, 5),
}[sys.argv[1]]()  # fmt: skip
for _ in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        scheduler.step(*([1.0] if sys.argv[1] == "ReduceLROnPlateau" else []))
