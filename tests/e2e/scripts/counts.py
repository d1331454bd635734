"""Counts in its weights: each worker its own steps, and the sum of the data that it has trained on. `python counts.py STEPS PACE`."""

import sys
import time

import torch

import psjob as ps

steps, pace = int(sys.argv[1]), float(sys.argv[2])
world = ps.world()
model = torch.nn.Module()
model.book = torch.nn.Parameter(torch.zeros(world, 2))
optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
model, optimizer = ps.attach(model, optimizer)
data = torch.utils.data.TensorDataset(torch.arange(float(steps * world)))
for (x,) in ps.shard(torch.utils.data.DataLoader(data, batch_size=1)):
    optimizer.zero_grad()
    # The mean over workers of a gradient of -world at the own place adds 1 there.
    (-world * (model.book[ps.rank(), 0] + x[0] * model.book[ps.rank(), 1])).backward()
    optimizer.step()
    time.sleep(pace)
