"""A script that was written for DDP: its sampler is left in, and set_epoch is called."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import psjob as ps

torch.manual_seed(5)
x = torch.randn(44, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
sampler = DistributedSampler(data, num_replicas=ps.world(), rank=ps.rank())
loader = ps.shard(DataLoader(data, batch_size=4, sampler=sampler))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = ps.attach(model, optimizer)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
