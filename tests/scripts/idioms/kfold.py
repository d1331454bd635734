"""Cross-validation: a model for each fold, all attached by name before the first one is run."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import psjob as ps

torch.manual_seed(113)
x = torch.randn(40, 6)
data = TensorDataset(x, x.sum(1, keepdim=True))
folds = []
for fold in range(2):
    model = nn.Linear(6, 1)
    folds.append(ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05), name=f"fold{fold}"))
for fold, (model, optimizer) in enumerate(folds):
    held = range(fold * 20, fold * 20 + 20)
    for inputs, targets in ps.shard(DataLoader(Subset(data, [i for i in range(40) if i not in held]), batch_size=4)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
