"""Loader processes that stay over the epochs, each with its own seed and its own collate function."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(107)
x = torch.randn(48, 6)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = ps.attach(model, optimizer)


def begin(worker):
    torch.manual_seed(100 + worker)


def joined(samples):
    return torch.stack([s[0] for s in samples]), torch.stack([s[1] for s in samples])


data = TensorDataset(x, x.sum(1, keepdim=True))
options = {"num_workers": 2, "persistent_workers": True, "worker_init_fn": begin, "collate_fn": joined, "prefetch_factor": 2}
loader = ps.shard(DataLoader(data, batch_size=4, shuffle=True, **options))
for _ in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
