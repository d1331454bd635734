"""Samplers that people give to a loader."""

# arguments: subset subset_random batch replacement own drop_last uneven
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(106)
x = torch.randn(48, 6)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = ps.attach(model, optimizer)
data, draws = TensorDataset(x, x.sum(1, keepdim=True)), torch.utils.data


class Halves(draws.Sampler):
    def __iter__(self):
        return iter([*range(1, 48, 2), *range(0, 48, 2)])

    def __len__(self):
        return 48


loader = {
    "subset": lambda: DataLoader(draws.Subset(data, range(0, 48, 2)), batch_size=4, shuffle=True),
    "subset_random": lambda: DataLoader(data, batch_size=4, sampler=draws.SubsetRandomSampler(range(30))),
    "batch": lambda: DataLoader(data, batch_sampler=draws.BatchSampler(draws.RandomSampler(data), 4, drop_last=True)),
    "replacement": lambda: DataLoader(data, batch_size=4, sampler=draws.RandomSampler(data, replacement=True, num_samples=40)),
    "own": lambda: DataLoader(data, batch_size=4, sampler=Halves()),
    "drop_last": lambda: DataLoader(draws.Subset(data, range(43)), batch_size=4, shuffle=True, drop_last=True),
    "uneven": lambda: DataLoader(draws.Subset(data, range(41)), batch_size=8, shuffle=True),
}[sys.argv[1]]()
for inputs, targets in ps.shard(loader):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
